"""Which networks are the same function?"""

from __future__ import annotations

import onebasin as ob
from onebasin_papers.demo.presets import DemoPlan, problem, symmetry
from onebasin_papers.study import Bench

TITLE = "How many networks are the same function?"


def part(bench: Bench[DemoPlan]) -> ob.reporting.Section:
    """Discover and prove the symmetries of the digits network, and of models with more structure."""
    data, own = problem(bench), symmetry(bench)
    rows = [_row(f"{data.name}: one hidden layer", own, ob.verify(data.model, own, data.train[0][:4]).max_error)]
    for place, example in enumerate(ob.examples.EXAMPLES):
        bench.show(place, len(ob.examples.EXAMPLES), f"discovering the symmetries of {example.name}")
        with ob.global_seed(bench.seed):
            model, inputs = example.build(), example.inputs()
        found = ob.discover(model, inputs, seed=bench.seed)
        rows.append(_row(example.summary, found, ob.verify(model, found, inputs).max_error))
    worst = max(
        cell.value
        for row in rows
        for cell in row[-1:]
        if isinstance(cell, ob.reporting.Number) and cell.value is not None
    )
    table = ob.reporting.Table(
        "symmetries",
        "Symmetries that were found and proved",
        (
            ob.reporting.Column("model"),
            ob.reporting.Column("spaces", "sets of hidden units that can be exchanged", digits=0),
            ob.reporting.Column(
                "disguises, powers of ten", "networks with the same function, by orders and signs of units", digits=1
            ),
            ob.reporting.Column("scales", "units that can also be rescaled without changing the function", digits=0),
            ob.reporting.Column(
                "proof error", "largest relative change of an output under random elements, in float64", digits=1
            ),
        ),
        tuple(rows),
        note="Nobody wrote these symmetries down: each model was traced, and each symmetry was checked by running it.",
    )
    text = (
        f"The digits network has 10^{own.log10_order:.1f} disguises by reordering its hidden units, and "
        f"{own.dimensions} units can be rescaled besides: proved by running it, relative error at most {worst:.0e}.",
        "Two networks can hold completely different weights and be one function. Averages, deviations and distances of "
        "weights mean nothing until that is taken out.",
    )
    return ob.reporting.Section("symmetries", TITLE, text, (table,))


def _row(name: str, found: ob.Symmetry, error: float) -> tuple[str | ob.reporting.Number, ...]:
    return (
        name,
        ob.reporting.Number(len(found.spaces)),
        ob.reporting.Number(found.log10_order),
        ob.reporting.Number(found.dimensions),
        ob.reporting.Number(error),
    )
