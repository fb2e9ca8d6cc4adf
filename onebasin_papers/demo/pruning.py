"""Which weights may go?"""

from __future__ import annotations

import onebasin as ob
from onebasin_papers.demo.presets import DemoPlan, aligned, problem
from onebasin_papers.study import Bench

TITLE = "How many weights can be removed?"
CRITERIA = {
    "magnitude": "largest mean",
    "snr": "largest mean / deviation",
    "sigma": "smallest deviation",
    "random": "random",
}
LEVELS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05)
_LOSS = 1.0  # percentage points of accuracy that may be lost


def part(bench: Bench[DemoPlan]) -> ob.reporting.Section:
    """Pruning curves of the mean of the aligned ensemble."""
    data = problem(bench)
    posterior = ob.fit(aligned(bench, "ensemble").population, model=data.model)
    curve = ob.pruning_curve(data.model, posterior, data.test, by=tuple(CRITERIA), levels=LEVELS, seed=bench.seed)
    series = []
    for by, words in CRITERIA.items():
        right = tuple(None if share is None else 100 * share for share in curve.accuracy(by))
        series.append(
            ob.reporting.Series(
                f"keep {words}" if by != "random" else "random", tuple(100 * level for level in LEVELS), right
            )
        )
    least = {by: _least([value or 0.0 for value in one.y]) for by, one in zip(CRITERIA, series, strict=True)}
    figure = ob.reporting.Figure(
        "pruning-curves",
        "Which weights carry the network?",
        "Accuracy on held-out digits of the mean of the aligned ensemble when only a share of its weights is kept.",
        (
            ob.reporting.Panel(
                "lines",
                "",
                ob.reporting.Axis("weights kept (%)"),
                ob.reporting.Axis("accuracy (%)", low=0.0, high=100.0),
                tuple(series),
            ),
        ),
    )
    text = (
        f"By magnitude, {100 * least['magnitude']:.0f} % of the weights are enough to stay within {_LOSS:g} point of "
        f"the whole network ({series[0].y[0]:.1f} %); by smallest deviation, as one paper proposes, "
        f"{100 * least['sigma']:.0f} %; at random {100 * least['random']:.0f} %.",
    )
    return ob.reporting.Section("pruning", TITLE, text, (figure,))


def _least(values: list[float]) -> float:
    """The smallest share that loses at most a point, with all larger ones.

    >>> _least([98.0, 97.9, 90.0, 97.5])
    0.9
    """
    kept = LEVELS[0]
    for level, value in zip(LEVELS, values, strict=False):
        if value < values[0] - _LOSS:
            break
        kept = level
    return kept
