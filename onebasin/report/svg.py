"""A panel as SVG inside the page: colours follow the page's light or dark paper, and nothing in it can act."""

from __future__ import annotations

import io
import re
from xml.etree import ElementTree

from onebasin.record import Panel
from onebasin.report.drawing import WIDTH, draw, height, house_style
from onebasin.report.escape import one_line
from onebasin.report.palette import as_variable

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
