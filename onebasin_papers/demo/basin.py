"""What does alignment change?"""

from __future__ import annotations

import onebasin as ob
from onebasin_papers.demo.presets import DemoPlan, aligned, population, problem, symmetry
from onebasin_papers.numbers import mean_error
from onebasin_papers.study import Bench

TITLE = "Are the networks in one basin once symmetries are removed?"
PAIRS = 6  # pairs of ensemble members whose barrier is measured
_RAW, _MOVED = 1, 2  # shades


def part(bench: Bench[DemoPlan]) -> ob.reporting.Section:
    """Barriers between ensemble members, means of populations, and R-hat of weights, before and after alignment."""
    data, members = problem(bench), population(bench, "ensemble")
    paths = []
    for place in range(PAIRS):
        bench.show(place, PAIRS, "walking between networks")
        a, b = members.member(2 * place % len(members)), members.member((2 * place + 1) % len(members))
        paths.append(ob.barrier(data.model, a, b, data.test, points=21, symmetry=symmetry(bench)))
    raw = [path.max for path in paths]
    moved = [path.aligned.max for path in paths if path.aligned is not None]
    means = {
        name: (_mean_accuracy(bench, population(bench, name)), _mean_accuracy(bench, aligned(bench, name).population))
        for name in ("ensemble", "HMC")
    }
    first = paths[0]
    assert first.aligned is not None
    figure = ob.reporting.Figure(
        "path",
        "Is there a hill between two networks?",
        f"Test loss on the straight line between two members of the ensemble; barrier {raw[0]:.2f} as trained and "
        f"{moved[0]:.3f} with the second one aligned to the first.",
        (
            ob.reporting.Panel(
                "lines",
                "",
                ob.reporting.Axis("place on the line"),
                ob.reporting.Axis("test loss"),
                (
                    ob.reporting.Series("as trained", tuple(first.t.tolist()), tuple(first.loss.tolist()), shade=_RAW),
                    ob.reporting.Series(
                        "aligned", tuple(first.t.tolist()), tuple(first.aligned.loss.tolist()), shade=_MOVED
                    ),
                ),
            ),
        ),
    )
    table = ob.reporting.Table(
        "basin",
        "Before and after alignment",
        (ob.reporting.Column("quantity"), ob.reporting.Column("as sampled"), ob.reporting.Column("aligned")),
        (
            ("loss barrier between ensemble members", _number(raw), _number(moved)),
            *(
                (
                    f"share that the mean network recognises, {name}",
                    ob.reporting.Number(before),
                    ob.reporting.Number(after),
                )
                for name, (before, after) in means.items()
            ),
            _mixing(bench),
        ),
        errors=f"± one standard error over {PAIRS} pairs of networks",
    )
    text = (
        f"The loss barrier between networks of the ensemble falls from {mean_error(raw)[0]:.2f} to "
        f"{mean_error(moved)[0]:.3f}, and their mean network goes from {100 * means['ensemble'][0]:.1f} to "
        f"{100 * means['ensemble'][1]:.1f} % right.",
        "Alignment reorders and rescales hidden units. It changes no function: whatever became better was hidden by "
        "disguises.",
    )
    return ob.reporting.Section("basin", TITLE, text, (table, figure))


def _number(values: list[float]) -> ob.reporting.Number:
    return ob.reporting.Number(*mean_error(values))


def _mean_accuracy(bench: Bench[DemoPlan], networks: ob.Population) -> float:
    data = problem(bench)
    centre = ob.Population.from_states([ob.fit(networks, model=data.model).mean])
    return float(ob.metrics.accuracy(ob.predict(data.model, centre, data.test[0], average=True), data.test[1]))


def _mixing(bench: Bench[DemoPlan]) -> tuple[str, ob.reporting.Number, ob.reporting.Number]:
    """Median R-hat of the first layer's weights."""
    name = next(iter(population(bench, "HMC").names))
    found = [
        ob.diagnose(None, one).weights[name].median_rhat
        for one in (population(bench, "HMC"), aligned(bench, "HMC").population)
    ]
    return "median R-hat of first-layer weights, HMC", ob.reporting.Number(found[0]), ob.reporting.Number(found[1])
