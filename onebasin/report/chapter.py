"""One record as a chapter of the page: the summary first, then verdicts, questions, settings and words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from onebasin.record import Figure, Record, Section, Table
from onebasin.report.cells import duration
from onebasin.report.drawing import height
from onebasin.report.escape import Names, escape, prose
from onebasin.report.svg import inline_svg
from onebasin.report.tables import table_html
from onebasin.report.verdicts import verdicts_html


@dataclass(frozen=True)
class Chapter:
    """A chapter: its HTML, and what its list of contents shows as (id, text)."""

    name: str
    title: str
    html: str
    contents: list[tuple[str, str]] = field(default_factory=list)


def chapter_of(record: Record, names: Names) -> Chapter:
    """Write a record as HTML.

    Args:
        record: what to show.
        names: gives ids; shared by the chapters of a page.
    """
    name = names.fresh(record.name)
    contents: list[tuple[str, str]] = []

    def listed(text: str) -> str:
        word = names.fresh(f"{name}-{text}")
        contents.append((word, text))
        return word

    summary_id = listed("Summary")
    claims_id = listed("What held, and what did not") if any(record.claims) else ""
    section_ids = []
    for section in record.sections:
        section_ids.append(names.fresh(f"{name}-{section.name}"))
        contents.append((section_ids[-1], section.title))
    claims = [
        (claim, section_id, section.title)
        for section, section_id in zip(record.sections, section_ids, strict=True)
        for claim in section.claims
    ]
    parts = [
        f"<header><h1>{prose(record.title)}</h1>{_facts(record)}</header>",
        _summary(record, summary_id),
        verdicts_html(claims, claims_id),
        *(_section(section, word, names) for section, word in zip(record.sections, section_ids, strict=True)),
        _settings(record, listed("Settings and versions")),
        _glossary(record, listed("Glossary")) if _words(record) else "",
    ]
    return Chapter(name, record.title, f'<article id="{name}">{"".join(parts)}</article>', contents)


def command_html(command: str) -> str:
    """A command in one line that can be copied."""
    if not command:
        return ""
    return (
        f'<div class="command"><span class="prompt" aria-hidden="true">$</span><code>{escape(command)}</code>'
        '<button type="button" class="copy" aria-label="Copy this command">Copy</button></div>'
    )


def _facts(record: Record) -> str:
    took = f" in {duration(record.seconds)}" if record.seconds else ""
    return f'<p class="byline">Made{took} by this command:</p>{command_html(record.command)}' if record.command else ""


def _summary(record: Record, word: str) -> str:
    sentences = "".join(f"<li>{prose(sentence)}</li>" for sentence in record.summary)
    return f'<section class="summary" id="{word}"><h2>In short</h2><ul>{sentences}</ul></section>'


def _section(section: Section, word: str, names: Names) -> str:
    paragraphs = "".join(
        f"<p>{prose(text)}</p>" if place else f'<p class="answer">{prose(text)}</p>'
        for place, text in enumerate(section.text)
    )
    command = command_html(section.command)
    items = "".join(
        table_html(item, names.fresh(item.name))
        if isinstance(item, Table)
        else figure_html(item, names.fresh(item.name))
        for item in section.items
    )
    took = f" in {duration(section.seconds)}" if section.seconds else ""
    made = f'<div class="made"><p class="note">These numbers were made{took} by this command:</p>{command}</div>'
    return (
        f'<section class="question" id="{word}"><h2>{prose(section.title)}</h2>{paragraphs}{items}'
        f"{made if command else ''}</section>"
    )


def figure_html(figure: Figure, name: str) -> str:
    """A figure: its question, its panels side by side where there is room, and the answer."""
    tall = max(map(height, figure.panels), default=0.0)
    panels = "".join(
        inline_svg(panel, f"{name}-{place}", figure.title, tall) for place, panel in enumerate(figure.panels)
    )
    return (
        f'<figure class="drawing" id="{escape(name)}"><h3>{prose(figure.title)}</h3>'
        f'<div class="panels">{panels}</div><figcaption>{prose(figure.caption)}</figcaption></figure>'
    )


def _settings(record: Record, word: str) -> str:
    told: Mapping[str, object] = record.settings
    shown = {name: "none" if value is None else str(value) for name, value in told.items()}
    return (
        f'<section class="settings" id="{word}"><h2>Settings and versions</h2>'
        f'<div class="pairs">{_pairs("Settings", shown)}{_pairs("Versions", record.versions)}</div></section>'
    )


def _pairs(title: str, entries: Mapping[str, str]) -> str:
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in entries.items())
    return f"<div><h3>{title}</h3><dl>{rows}</dl></div>" if rows else ""


def _words(record: Record) -> dict[str, str]:
    """Terms, and heads of columns, each with its definition; alphabetical."""
    columns = {
        column.name: column.help
        for item in record.items
        if isinstance(item, Table)
        for column in item.columns
        if column.help
    }
    return dict(sorted({**columns, **record.terms}.items(), key=lambda entry: entry[0].lower()))


def _glossary(record: Record, word: str) -> str:
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{prose(text)}</dd>" for name, text in _words(record).items())
    return f'<section class="glossary" id="{word}"><h2>Glossary</h2><dl>{rows}</dl></section>'
