"""The page: chapters, contents, style and script in one HTML file that asks nobody for anything."""

from __future__ import annotations

import base64
import hashlib
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from xml.etree import ElementTree

from onebasin.reporting.drawing import WIDTH, as_variable, draw, height, house_style, style_rule
from onebasin.reporting.markdown import (
    MISSING,
    Names,
    best_rows,
    duration,
    error_text,
    escape,
    one_line,
    prose,
    published_text,
    value_text,
)
from onebasin.reporting.record import (
    VERDICTS,
    Cell,
    Claim,
    Column,
    Figure,
    Number,
    Panel,
    Record,
    Section,
    Table,
    tally,
)

# ----------------------------------------------------------------------
# A panel as SVG inside the page: colours follow the page's light or dark paper, and nothing in it can act.


_COLOUR = re.compile("#[0-9a-fA-F]{6}")
_FONT = re.compile("'DejaVu Sans'[^;]*")  # and what else matplotlib would take
_REFERENCE = re.compile(r"(?<=url\(#)[^)]+")
_KEPT = {"svg", "g", "path", "defs", "use", "clipPath", "rect", "text", "tspan", "image"}


def inline_svg(panel: Panel, name: str, title: str, tall: float | None = None) -> str:
    """A panel as an ``<svg>`` element.

    Args:
        panel: what to draw.
        name: unique on the page: the beginning of all ids.
        title: the question, read aloud to people who do not see the picture.
        tall: inches of height, at least; panels side by side look best with the same.
    """
    root = ElementTree.fromstring(_drawn(panel, max(height(panel), tall or 0.0)))
    _plain(root)
    _own_ids(root, name)
    for element in root.iter():
        if "style" in element.attrib:
            element.set("style", _dressed(element.attrib["style"]))
    view = root.attrib["viewBox"]
    root.attrib.clear()
    label = one_line(f"{title} {panel.title}".strip())
    root.attrib.update({"viewBox": view, "role": "img", "aria-label": label, "class": "panel"})
    for place, (tag, text) in enumerate((("title", label), ("desc", describe(panel)))):
        element = ElementTree.Element(tag)
        element.text = text
        root.insert(place, element)
    return ElementTree.tostring(root, encoding="unicode", short_empty_elements=True)


def describe(panel: Panel) -> str:
    """What a panel shows, in words."""
    named = [one_line(series.name) for series in panel.series if series.name]
    shown = {"heat": "Heat map", "bars": "Bars", "histogram": "Histogram", "points": "Points", "lines": "Lines"}
    axes = f"{one_line(panel.y.label) or 'values'} against {one_line(panel.x.label) or 'names'}"
    return f"{shown[panel.kind]}: {axes}{': ' + ', '.join(named) if named else ''}."


def _drawn(panel: Panel, tall: float) -> str:
    from matplotlib.figure import Figure

    with house_style():
        figure = Figure(figsize=(WIDTH, tall), layout="constrained")
        draw(figure, panel)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()


def _plain(element: ElementTree.Element) -> None:
    """Drop name spaces and everything that is not a drawing: metadata, and rules that would style the whole page."""
    element.tag = _local(element.tag)
    for key in list(element.attrib):
        element.attrib[_local(key)] = element.attrib.pop(key)
    for child in list(element):
        if _local(child.tag) in _KEPT:
            _plain(child)
        else:
            element.remove(child)


def _local(name: str) -> str:
    return name.rpartition("}")[2]


def _own_ids(root: ElementTree.Element, name: str) -> None:
    """Keep the ids that something points to, and begin them with `name`."""
    pointed = {
        found
        for element in root.iter()
        for value in element.attrib.values()
        for found in [*_REFERENCE.findall(value), *([value[1:]] if value.startswith("#") else [])]
    }
    for element in root.iter():
        for key, value in list(element.attrib.items()):
            if key == "id":
                if value in pointed:
                    element.set(key, f"{name}-{value}")
                else:
                    del element.attrib[key]
            elif key == "href" and value.startswith("#"):
                element.set(key, f"#{name}-{value[1:]}")
            else:
                element.set(key, _REFERENCE.sub(lambda found: f"{name}-{found[0]}", value))


def _dressed(style: str) -> str:
    """A style with colours of the page, and in its font.

    >>> _dressed("font: 9px 'DejaVu Sans', 'Arial'; fill: #ffffff")
    'font: 9px var(--text); fill: var(--paper)'
    """
    return _COLOUR.sub(lambda found: as_variable(found[0]), _FONT.sub("var(--text)", style))


# ----------------------------------------------------------------------
# A table of a record as HTML: sortable, every number with its error and the published one.


_ARROWS = {"higher": "↑", "lower": "↓"}


def table_html(table: Table, name: str) -> str:
    """A table with its title, and what its errors are.

    Args:
        table: what to show.
        name: unique on the page.
    """
    numeric = [any(isinstance(row[place], Number) for row in table.rows) for place in range(len(table.columns))]
    best = [best_rows(column, [row[place] for row in table.rows]) for place, column in enumerate(table.columns)]
    heads = "".join(map(_head, table.columns, numeric))
    rows = "".join(
        "<tr>"
        + "".join(
            _cell(cell, table.columns[place], numeric[place], is_first=place == 0, is_best=number in best[place])
            for place, cell in enumerate(row)
        )
        + "</tr>"
        for number, row in enumerate(table.rows)
    )
    body = rows or f'<tr><td colspan="{max(len(table.columns), 1)}" class="empty">no rows</td></tr>'
    return (
        f'<figure class="table" id="{escape(name)}"><figcaption id="{escape(name)}-title">'
        f"<h3>{prose(table.title)}</h3></figcaption>"
        f'<div class="scroll" tabindex="0" role="region" aria-labelledby="{escape(name)}-title">'
        f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
        f"{_notes(table, any(best))}</figure>"
    )


def _head(column: Column, numeric: bool) -> str:
    """A head that sorts when it is pressed, and tells what the column means."""
    arrow = (
        f'<span class="better" aria-hidden="true">{_ARROWS[column.better]}</span>'
        f'<span class="unseen">, {column.better} is better</span>'
        if column.better
        else ""
    )
    unit = f' <span class="unit">{escape(column.unit)}</span>' if column.unit else ""
    told = " ".join(part for part in (column.help, f"{column.better} is better." if column.better else "") if part)
    told = told[:1].upper() + told[1:]
    name = f"<abbr>{escape(column.name)}</abbr>" if column.help else escape(column.name)
    tip = f' title="{escape(told)}"' if told else ""
    kind = ' class="number"' if numeric else ""
    return f'<th scope="col"{kind}><button type="button" class="sort"{tip}>{name}{unit}{arrow}</button></th>'


def _cell(cell: Cell, column: Column, numeric: bool, *, is_first: bool, is_best: bool) -> str:
    tag = "th" if is_first else "td"
    scope = ' scope="row"' if is_first else ""
    if isinstance(cell, Number):
        sort = f' data-value="{cell.value!r}"' if cell.value is not None else ""
        inside = _number(cell, column, is_best)
    else:
        sort, inside = "", prose(cell) if cell else f'<span class="missing">{MISSING}</span>'
    kind = ' class="number"' if numeric else ""
    return f"<{tag}{scope}{kind}{sort}>{inside}</{tag}>"


def _number(number: Number, column: Column, is_best: bool) -> str:
    value = f'<span class="value">{value_text(number, column)}</span>'
    if is_best:
        value = f'<strong>{value}<span class="unseen"> (best)</span></strong>'
    error = f' <span class="error">{error_text(number, column)}</span>' if error_text(number, column) else ""
    published = published_text(number, column)
    return (
        value
        + error
        + (f'<span class="published">{published}</span>' if published else "")
        + (f'<span class="remark">{prose(number.note)}</span>' if number.note else "")
    )


def _notes(table: Table, has_best: bool) -> str:
    published = any(isinstance(cell, Number) and cell.published is not None for row in table.rows for cell in row)
    told = [
        prose(table.errors),
        "“paper”: the published number" if published else "",
        "bold: the best of its column, as far as errors can tell" if has_best else "",
    ]
    line = "; ".join(part.rstrip(".") for part in told if part)
    first = f"{line[:1].upper()}{line[1:]}." if line else ""
    text = " ".join(part for part in (first, prose(table.note)) if part)
    return f'<p class="note">{text}</p>' if text else ""


# ----------------------------------------------------------------------
# Claims and their verdicts as HTML: a word and a sign, not only a colour.


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


# ----------------------------------------------------------------------
# One record as a chapter of the page: the summary first, then verdicts, questions, settings and words.


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


# ----------------------------------------------------------------------
# The page: chapters, contents, style and script in one HTML file that asks nobody for anything.


def page(records: Sequence[Record]) -> str:
    """The page that shows some records, a chapter each; the same bytes from the same records."""
    names = Names()
    for own in ("content", "tip"):  # ids of the page itself
        names.fresh(own)
    chapters = [chapter_of(record, names) for record in records]
    style = style_rule() + _package_file("page.css")
    script = _package_file("page.js")
    title = " · ".join(dict.fromkeys(one_line(record.title) for record in records))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(script)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{escape(title)}</title><style>{style}</style></head>'
        '<body><a class="skip" href="#content">To the content</a>'
        f'<div class="layout">{_contents(chapters)}<main id="content">{"".join(chapter.html for chapter in chapters)}'
        "<footer><p>Written by onebasin from stored records; nothing on this page was loaded from elsewhere.</p>"
        f"</footer></main></div><script>{script}</script></body></html>\n"
    )


def _package_file(name: str) -> str:
    return files("onebasin.report").joinpath(name).read_text(encoding="utf-8")


def _policy(script: str) -> str:
    """What a browser may do with the page: draw it and run our script, by its hash; never the network."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _contents(chapters: Sequence[Chapter]) -> str:
    several = len(chapters) > 1
    lists = "".join(
        (f'<p class="chapter"><a href="#{chapter.name}">{escape(one_line(chapter.title))}</a></p>' if several else "")
        + "<ol>"
        + "".join(f'<li><a href="#{word}">{escape(one_line(text))}</a></li>' for word, text in chapter.contents)
        + "</ol>"
        for chapter in chapters
    )
    return (
        '<nav class="contents" aria-label="Contents"><div class="bar"><span class="brand">onebasin</span>'
        '<button type="button" class="theme" aria-label="Light or dark">Theme: auto</button></div>'
        f"{lists}</nav>"
    )
