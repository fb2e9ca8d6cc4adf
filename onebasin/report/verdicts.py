"""Claims and their verdicts as HTML: a word and a sign, not only a colour."""

from __future__ import annotations

from collections.abc import Sequence

from onebasin.record import VERDICTS, Claim, tally
from onebasin.report.escape import escape, prose

_SIGNS = dict(zip(VERDICTS, (("good", "✓"), ("fair", "≈"), ("bad", "✗")), strict=True))


def badge(verdict: str) -> str:
    """A verdict in a coloured frame."""
    kind, sign = _SIGNS[verdict]
    return f'<span class="badge {kind}"><span aria-hidden="true">{sign}</span> {escape(verdict)}</span>'


def verdicts_html(claims: Sequence[tuple[Claim, str, str]], name: str) -> str:
    """All claims of a record.

    Args:
        claims: each with the id and the title of its section.
        name: id of the block.
    """
    if not claims:
        return ""
    counted = tally([claim for claim, _, _ in claims])
    items = "".join(_item(*entry) for entry in claims)
    return (
        f'<section class="verdicts" id="{escape(name)}"><h2>What held, and what did not</h2>'
        f'<p class="note">{len(claims)} {"claim" if len(claims) == 1 else "claims"}: {counted}. Each verdict is '
        f"computed from the numbers beside it.</p><ol>{items}</ol></section>"
    )


def _item(claim: Claim, section: str, title: str) -> str:
    facts = [("Found", claim.found), ("Published", claim.published), ("Caveat", claim.caveat)]
    told = "".join(f"<dt>{word}</dt><dd>{prose(text)}</dd>" for word, text in facts if text)
    return (
        f'<li class="claim {_SIGNS[claim.verdict][0]}"><div class="claim-head">'
        f'<p class="claim-text">{prose(claim.text)}</p>{badge(claim.verdict)}</div><dl>{told}</dl>'
        f'<p class="where"><a href="#{escape(section)}">{prose(title)}</a></p></li>'
    )
