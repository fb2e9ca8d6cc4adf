"""Heat maps: values on a grid as colours, with a bar that tells which colour is which value."""

from __future__ import annotations

import math
from typing import Any

from onebasin.record import Axis, Panel
from onebasin.report.axes import dress, edges_between, is_log, shown, tick_text, wrapped
from onebasin.report.palette import GRADIENT

_WRITTEN = 64  # cells at most that also show their value as text
_VECTOR = 600  # cells at most that are drawn one by one; more become a picture inside the figure
_STEPS = 48


def draw_heat(axes: Any, panel: Panel) -> list[Any]:
    """Draw the grid and its bar of colours."""
    import matplotlib
    import numpy as np
    from matplotlib.colors import LogNorm, Normalize

    flat = [value for row in panel.grid for value in row]
    colour = panel.colour or Axis("")
    log = is_log(colour, flat)
    log_x, log_y = (
        is_log(axis, places) and min(places) > 0 for axis, places in ((panel.x, panel.columns), (panel.y, panel.rows))
    )
    values = np.ma.masked_invalid(np.array([shown(row, log) for row in panel.grid], dtype=float).reshape(
        len(panel.rows), len(panel.columns)
    ))  # fmt: skip
    if values.count():
        low, high = _ends(colour, float(values.min()), float(values.max()), log)
        mesh = axes.pcolormesh(
            edges_between(panel.columns, log_x),
            edges_between(panel.rows, log_y),
            values,
            cmap=matplotlib.colormaps[GRADIENT].resampled(_STEPS),
            norm=LogNorm(low, high) if log else Normalize(low, high),
            edgecolor="face",
            linewidth=0.3,
            rasterized=values.size > _VECTOR,
        )
        _colour_bar(axes, mesh, colour, log)
        if values.size <= _WRITTEN:
            _write_values(axes, panel, mesh, values)
    dress(axes, "x", panel.x, log_x, grid=False)
    dress(axes, "y", panel.y, log_y, grid=False)
    if panel.y.names:
        axes.invert_yaxis()  # names are read from above
    return []


def _ends(colour: Axis, low: float, high: float, log: bool) -> tuple[float, float]:
    """Ends of the scale of colours: what was asked for where it can be, and never the same twice."""
    low = colour.low if colour.low is not None and not (log and colour.low <= 0) else low
    high = colour.high if colour.high is not None and colour.high > low else high
    if low < high:
        return low, high
    return (low / 2, low * 2) if log else (low - 0.5, low + 0.5)


def _colour_bar(axes: Any, mesh: Any, colour: Axis, log: bool) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

    bar = axes.figure.colorbar(mesh, ax=axes, pad=0.02, aspect=24)
    bar.solids.set(
        rasterized=False, edgecolor="face", linewidth=0.4
    )  # without edges, paper shines through between steps
    bar.outline.set_visible(False)
    bar.set_label(wrapped(colour.label, 40, 2))
    low, high = mesh.norm.vmin, mesh.norm.vmax
    if not log:
        bar.ax.yaxis.set_major_locator(MaxNLocator(5))
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, place: tick_text(value, high - low)))
    bar.ax.yaxis.set_minor_locator(NullLocator())


def _write_values(axes: Any, panel: Panel, mesh: Any, values: Any) -> None:
    """Write each value into its cell, dark on bright cells and the other way round."""
    for row, y in enumerate(panel.rows):
        for column, x in enumerate(panel.columns):
            value = values[row, column]
            if math.isfinite(float(value.filled(math.nan)) if hasattr(value, "filled") else float(value)):
                red, green, blue, _ = mesh.cmap(mesh.norm(value))
                bright = 0.3 * red + 0.59 * green + 0.11 * blue > 0.5
                axes.text(
                    x,
                    y,
                    tick_text(float(f"{value:.2g}")),
                    ha="center",
                    va="center",
                    fontsize=8,
                    color="#000000" if bright else "#fffffe",  # colours that are not of the palette stay what they are
                )
