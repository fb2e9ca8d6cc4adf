"""A figure as files for papers and talks: SVG, PDF and PNG on white paper, the same bytes from the same record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from onebasin.record import Figure
from onebasin.report.drawing import WIDTH, draw, height, house_style

FORMATS = ("svg", "pdf", "png")
_SIDE_BY_SIDE = 3  # panels
_NO_DATES: dict[str, dict[str, Any]] = {
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "ModDate": None, "Creator": None, "Producer": None},
    "png": {"Software": None},
}


def save_figure(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write a figure, its panels side by side.

    Args:
        figure: what to draw.
        folder: exists already.
        name: of the files, without their ending.

    Returns:
        The files, in the order of `FORMATS`.
    """
    from matplotlib.figure import Figure as Canvas

    columns = min(len(figure.panels), _SIDE_BY_SIDE)
    rows = -(-len(figure.panels) // columns) if columns else 0
    if not rows:
        return []
    files = [folder / f"{name}.{ending}" for ending in FORMATS]
    with house_style():
        heights = [max(map(height, figure.panels[row * columns : (row + 1) * columns])) for row in range(rows)]
        canvas = Canvas(figsize=(WIDTH * columns, sum(heights)), layout="constrained", facecolor="white")
        places = canvas.subfigures(rows, columns, squeeze=False, height_ratios=heights)
        for panel, place in zip(figure.panels, places.flat, strict=False):
            draw(place, panel)
        canvas.draw_without_rendering()
        canvas.set_layout_engine("none")  # all files get the places that were found once
        for file, ending in zip(files, FORMATS, strict=True):
            file.unlink(missing_ok=True)  # a link that somebody left there would be followed
            canvas.savefig(file, format=ending, dpi=200, metadata=_NO_DATES[ending])
    return files
