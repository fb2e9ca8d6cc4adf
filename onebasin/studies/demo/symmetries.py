"""Which networks are the same function?"""

from __future__ import annotations

from onebasin.calling import global_seed
from onebasin.examples import EXAMPLES
from onebasin.record import Column, Number, Section, Table
from onebasin.studies.bench import Bench
from onebasin.studies.demo.plan import DemoPlan, problem, symmetry
from onebasin.symmetry import Symmetry, discover, verify

TITLE = "How many networks are the same function?"


def part(bench: Bench[DemoPlan]) -> Section:
    """Discover and prove the symmetries of the digits network, and of models with more structure."""
    data, own = problem(bench), symmetry(bench)
    rows = [_row(f"{data.name}: one hidden layer", own, verify(data.model, own, data.train[0][:4]).max_error)]
    for place, example in enumerate(EXAMPLES):
        bench.show(place, len(EXAMPLES), f"discovering the symmetries of {example.name}")
        with global_seed(bench.seed):
            model, inputs = example.build(), example.inputs()
        found = discover(model, inputs, seed=bench.seed)
        rows.append(_row(example.summary, found, verify(model, found, inputs).max_error))
    worst = max(cell.value for row in rows for cell in row[-1:] if isinstance(cell, Number) and cell.value is not None)
    table = Table(
        "symmetries",
        "Symmetries that were found and proved",
        (
            Column("model"),
            Column("spaces", "sets of hidden units that can be exchanged", digits=0),
            Column(
                "disguises, powers of ten", "networks with the same function, by orders and signs of units", digits=1
            ),
            Column("scales", "units that can also be rescaled without changing the function", digits=0),
            Column("proof error", "largest relative change of an output under random elements, in float64", digits=1),
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
    return Section("symmetries", TITLE, text, (table,))


def _row(name: str, found: Symmetry, error: float) -> tuple[str | Number, ...]:
    return name, Number(len(found.spaces)), Number(found.log10_order), Number(found.dimensions), Number(error)
