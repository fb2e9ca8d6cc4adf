"""What does alignment change?"""

from __future__ import annotations

from onebasin.align import barrier
from onebasin.inference import diagnose
from onebasin.metrics import accuracy
from onebasin.population import Population
from onebasin.posterior import fit
from onebasin.predict.predicting import predict
from onebasin.record import Axis, Column, Figure, Number, Panel, Section, Series, Table
from onebasin.studies.bench import Bench
from onebasin.studies.demo.plan import DemoPlan, aligned, crowd, problem, symmetry
from onebasin.studies.numbers import mean_error

TITLE = "Are the networks in one basin once symmetries are removed?"
PAIRS = 6  # pairs of ensemble members whose barrier is measured
_RAW, _MOVED = 1, 2  # shades


def part(bench: Bench[DemoPlan]) -> Section:
    """Barriers between ensemble members, means of crowds, and R-hat of weights, before and after alignment."""
    data, members = problem(bench), crowd(bench, "ensemble")
    paths = []
    for place in range(PAIRS):
        bench.show(place, PAIRS, "walking between networks")
        a, b = members.member(2 * place % len(members)), members.member((2 * place + 1) % len(members))
        paths.append(barrier(data.model, a, b, *data.test, points=21, symmetry=symmetry(bench)))
    raw = [path.max for path in paths]
    moved = [path.aligned.max for path in paths if path.aligned is not None]
    means = {
        name: (_mean_accuracy(bench, crowd(bench, name)), _mean_accuracy(bench, aligned(bench, name).population))
        for name in ("ensemble", "HMC")
    }
    first = paths[0]
    assert first.aligned is not None
    figure = Figure(
        "path",
        "Is there a hill between two networks?",
        f"Test loss on the straight line between two members of the ensemble; barrier {raw[0]:.2f} as trained and "
        f"{moved[0]:.3f} with the second one aligned to the first.",
        (
            Panel(
                "lines",
                "",
                Axis("place on the line"),
                Axis("test loss"),
                (
                    Series("as trained", tuple(first.t.tolist()), tuple(first.loss.tolist()), shade=_RAW),
                    Series("aligned", tuple(first.t.tolist()), tuple(first.aligned.loss.tolist()), shade=_MOVED),
                ),
            ),
        ),
    )
    table = Table(
        "basin",
        "Before and after alignment",
        (Column("quantity"), Column("as sampled"), Column("aligned")),
        (
            ("loss barrier between ensemble members", _number(raw), _number(moved)),
            *(
                (f"share that the mean network recognises, {name}", Number(before), Number(after))
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
    return Section("basin", TITLE, text, (table, figure))


def _number(values: list[float]) -> Number:
    return Number(*mean_error(values))


def _mean_accuracy(bench: Bench[DemoPlan], networks: Population) -> float:
    data = problem(bench)
    centre = Population.from_states([fit(networks, model=data.model).mean])
    return float(accuracy(predict(data.model, centre, data.test[0], average=True), data.test[1]))


def _mixing(bench: Bench[DemoPlan]) -> tuple[str, Number, Number]:
    """Median R-hat of the first layer's weights."""
    name = next(iter(crowd(bench, "HMC").names))
    found = [diagnose(one).weights[name].median_rhat for one in (crowd(bench, "HMC"), aligned(bench, "HMC").population)]
    return "median R-hat of first-layer weights, HMC", Number(found[0]), Number(found[1])
