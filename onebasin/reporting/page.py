"""A report as one HTML file that loads nothing from elsewhere: records in, `page.html` filled.

Every text of a record may be hostile. The template engine escapes all values; the only ones that it takes as HTML are
`Markup` made here: drawings, whose elements are on a list, prose, which is escaped before its code is marked, and the
style and script of this package.
"""

from __future__ import annotations

import base64
import hashlib
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any
from xml.etree import ElementTree

from markupsafe import Markup, escape

from onebasin.reporting.drawing import POINTS, WIDTH, as_variable, draw, height, house_style, style_rule
from onebasin.reporting.record import VERDICTS, Column, Figure, Number, Panel, Record, Section, Table, tally
from onebasin.reporting.text import (
    MISSING,
    Names,
    best_of,
    duration,
    error_text,
    one_line,
    published_text,
    readable,
    value_text,
)

_SIGNS = dict(zip(VERDICTS, (("good", "✓"), ("fair", "≈"), ("bad", "✗")), strict=True))  # not only a colour
_CODE = re.compile("`([^`]+)`")


def page(records: Sequence[Record]) -> str:
    """The page that shows some records, a chapter each; the same bytes from the same records."""
    names = Names()
    for word in ("content", "tip"):  # ids of the page itself
        names.fresh(word)
    script = _package_file("page.js")
    text: str = (
        _environment()
        .get_template("page.html")
        .render(
            chapters=[_chapter(record, names) for record in records],
            title=" · ".join(dict.fromkeys(one_line(record.title) for record in records)),
            policy=_policy(script),
            style=Markup(style_rule() + _package_file("page.css")),
            script=Markup(script),
            signs=_SIGNS,
            missing=MISSING,
        )
    )
    return text


def _environment() -> Any:
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    environment = Environment(
        loader=FunctionLoader(_package_file),
        autoescape=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        finalize=lambda value: readable(value) if type(value) is str else value,
    )
    environment.filters.update(
        column_tip=_column_tip,
        duration=duration,
        error_text=error_text,
        one_line=one_line,
        prose=prose,
        published_text=published_text,
        tally=tally,
        value_text=value_text,
    )
    environment.tests.update(
        measured=lambda value: isinstance(value, Number), table=lambda value: isinstance(value, Table)
    )
    return environment


def _package_file(name: str) -> str:
    return files("onebasin.reporting").joinpath(name).read_text(encoding="utf-8")


def _policy(script: str) -> str:
    """What a browser may do with the page: draw it and run our script, by its hash; never the network."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def prose(text: str) -> Markup:
    """A sentence as HTML; what stands between backticks is code.

    >>> prose("`a<b` holds")
    Markup('<code>a&lt;b</code> holds')
    """
    return Markup(_CODE.sub(r"<code>\1</code>", str(escape(readable(text)))))


@dataclass(frozen=True)
class _TableView:
    """A table, its id, which columns hold numbers, which rows are best in each column, and the line below it."""

    item: Table
    id: str
    numeric: list[bool]
    best: list[set[int]]
    note: Markup


@dataclass(frozen=True)
class _FigureView:
    item: Figure
    id: str
    panels: list[Markup]


@dataclass(frozen=True)
class _SectionView:
    part: Section
    id: str
    views: list[_TableView | _FigureView]


@dataclass(frozen=True, kw_only=True)
class _Chapter:
    """A record with the ids of its parts, and its contents as (id, text)."""

    record: Record
    id: str
    summary_id: str
    claims_id: str
    settings_id: str
    glossary_id: str
    sections: list[_SectionView]
    terms: dict[str, str]
    contents: list[tuple[str, str]]


def _chapter(record: Record, names: Names) -> _Chapter:
    name = names.fresh(record.name)
    contents: list[tuple[str, str]] = []

    def listed(text: str, word: str | None = None) -> str:
        contents.append((names.fresh(f"{name}-{word or text}"), text))
        return contents[-1][0]

    summary_id = listed("Summary")
    claims_id = listed("What held, and what did not") if any(record.claims) else ""
    ids = [listed(section.title, section.name) for section in record.sections]
    columns = (column for item in record.items if isinstance(item, Table) for column in item.columns if column.help)
    terms = {column.name: column.help for column in columns} | record.terms
    return _Chapter(
        record=record,
        id=name,
        summary_id=summary_id,
        claims_id=claims_id,
        sections=[
            _SectionView(section, word, [_view(item, names.fresh(item.name)) for item in section.items])
            for section, word in zip(record.sections, ids, strict=True)
        ],
        settings_id=listed("Settings and versions"),
        glossary_id=listed("Glossary") if terms else "",
        terms=dict(sorted(terms.items(), key=lambda entry: entry[0].lower())),
        contents=contents,
    )


def _view(item: Table | Figure, name: str) -> _TableView | _FigureView:
    if isinstance(item, Figure):
        tall = max(map(height, item.panels), default=0.0)
        panels = [inline_svg(panel, f"{name}-{place}", item.title, tall) for place, panel in enumerate(item.panels)]
        return _FigureView(item, name, [Markup(panel) for panel in panels])
    cells = [[row[place] for row in item.rows] for place in range(len(item.columns))]
    best = best_of(item)
    numeric = [any(isinstance(cell, Number) for cell in column_cells) for column_cells in cells]
    return _TableView(item, name, numeric, best, _table_note(item, any(best)))


def _table_note(table: Table, has_best: bool) -> Markup:
    """What the errors, the published numbers and the bold ones of a table are."""
    published = any(isinstance(cell, Number) and cell.published is not None for row in table.rows for cell in row)
    parts = [
        table.errors,
        "“paper”: the published number" if published else "",
        "bold: the best of its column, as far as errors can tell" if has_best else "",
    ]
    line = "; ".join(part.rstrip(".") for part in parts if part)
    first = f"{line[:1].upper()}{line[1:]}." if line else ""
    return prose(" ".join(part for part in (first, table.note) if part))


def _column_tip(column: Column) -> str:
    """What a column means, shown on hover."""
    tip = " ".join(part for part in (column.help, f"{column.better} is better." if column.better else "") if part)
    return tip[:1].upper() + tip[1:]


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
    _name_points(root, panel)
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


def _name_points(root: ElementTree.Element, panel: Panel) -> None:
    """Give each labelled point its label as a title, which browsers show on hover."""
    groups = {element.attrib.get("id"): element for element in root.iter("g")}
    for number, series in enumerate(panel.series):
        if (group := groups.get(f"{POINTS}{number}")) is None:
            continue
        dots = list(group.iter("use"))
        labels = [label for label, y in zip(series.labels, series.y, strict=True) if y is not None]
        if len(dots) == len(labels):  # else some lie outside of the axes, and which is not known
            for dot, label in zip(dots, labels, strict=True):
                ElementTree.SubElement(dot, "title").text = one_line(label)


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
        target
        for element in root.iter()
        for value in element.attrib.values()
        for target in [*_REFERENCE.findall(value), *([value[1:]] if value.startswith("#") else [])]
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
                element.set(key, _REFERENCE.sub(lambda match: f"{name}-{match[0]}", value))


def _dressed(style: str) -> str:
    """A style with colours of the page, and in its font.

    >>> _dressed("font: 9px 'DejaVu Sans', 'Arial'; fill: #ffffff")
    'font: 9px var(--text); fill: var(--paper)'
    """
    return _COLOUR.sub(lambda match: as_variable(match[0]), _FONT.sub("var(--text)", style))
