"""The study in about ten sentences, made of its claims."""

from __future__ import annotations

from collections.abc import Sequence

from onebasin.record import VERDICTS, Claim, Section

MOST = 15  # sentences


def summarise(sections: Sequence[Section]) -> list[str]:
    """The count of verdicts, then each question with its answer, and what did not hold.

    >>> claim = Claim("They fly.", "not reproduced", "penguins do not")
    >>> summarise([Section("birds", "Do birds fly?", ("Most do.",), claims=(claim,))])
    ['Of 1 claim 0 were reproduced, 0 with a caveat, and 1 not.', 'Do birds fly? Most do.', 'Not reproduced: They fly.']
    """
    claims = [claim for section in sections for claim in section.claims]
    counts = [sum(claim.verdict == verdict for claim in claims) for verdict in VERDICTS]
    said = f"Of {len(claims)} claim{'' if len(claims) == 1 else 's'} {counts[0]} were reproduced, {counts[1]} with a "
    found = [f"{said}caveat, and {counts[2]} not."] if claims else []
    found += [f"{section.title} {section.text[0]}" for section in sections if section.text]
    found += [_failed(claim) for claim in claims if claim.verdict == VERDICTS[2]]
    return found[:MOST]


def _failed(claim: Claim) -> str:
    return f"{claim.verdict.capitalize()}: {claim.text}"
