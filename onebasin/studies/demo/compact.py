"""How much of the posterior fits in the storage of two networks?"""

from __future__ import annotations

from onebasin.compact import refine
from onebasin.metrics import accuracy, agreement, total_variation
from onebasin.population import Population
from onebasin.posterior import Posterior, fit
from onebasin.predict.predicting import predict
from onebasin.record import Axis, Cell, Column, Figure, Number, Panel, Section, Series, Table
from onebasin.studies.bench import Bench
from onebasin.studies.demo.plan import DemoPlan, aligned, crowd, problem

TITLE = "How much of the posterior fits into the storage of two networks?"


def refined(bench: Bench[DemoPlan]) -> Posterior:
    """The posterior of the HMC networks, refined."""
    data = problem(bench)

    def made() -> Posterior:
        start = fit(aligned(bench, "HMC").population, model=data.model)
        return refine(
            start, data.model, crowd(bench, "HMC"), data.train[0], steps=bench.plan.steps, progress=bench.show
        )

    return bench.once("refined", made)


def part(bench: Bench[DemoPlan]) -> Section:
    """Compact forms of the HMC networks, and how far their predictions are from all of them."""
    data, samples = problem(bench), crowd(bench, "HMC")
    forms: dict[str, Population | Posterior] = {
        "2 of the networks": samples[:: max(1, len(samples) // 2)][:2],
        "10 of the networks": samples[:: max(1, len(samples) // 10)][:10],
        "mean and deviation, as sampled": fit(samples, model=data.model),
        "mean and deviation, aligned": fit(aligned(bench, "HMC").population, model=data.model),
        "mean and deviation, aligned and refined": refined(bench),
    }
    whole = predict(data.model, samples, data.test[0], average=True)
    rows: list[tuple[Cell, ...]] = []
    distances: list[float] = []
    for name, form in forms.items():
        seen = predict(data.model, form, data.test[0], average=True, draws=bench.plan.judged, seed=bench.seed)
        stored = form.networks if isinstance(form, Posterior) else len(form)
        distances.append(float(total_variation(seen, whole)))
        numbers = (
            float(stored),
            float(agreement(seen, whole)),
            distances[-1],
            100 * float(accuracy(seen, data.test[1])),
        )
        rows.append((name, *map(Number, numbers)))
    right = 100 * float(accuracy(whole, data.test[1]))
    rows.append((f"all {len(samples)} networks", Number(len(samples)), None, None, Number(right)))
    table = Table(
        "compact",
        f"Forms of {len(samples)} HMC networks",
        (
            Column("form"),
            Column("storage", "in networks: a mean and a deviation per weight are two", "lower", 0),
            Column("agreement", "share of held-out digits with the same answer as all networks together", "higher"),
            Column("TV", "total variation from the average prediction of all networks", "lower"),
            Column("accuracy", "share of held-out digits that are recognised", "higher", 1, "%"),
        ),
        tuple(rows),
        note=f"Posteriors are judged by {bench.plan.judged} draws.",
    )
    figure = Figure(
        "compact-forms",
        "How far is each form from all networks together?",
        "Total variation from the average prediction on held-out digits; shorter is better.",
        (
            Panel(
                "bars",
                "",
                Axis("", names=tuple(forms)),
                Axis("total variation", low=0.0),
                (Series("", tuple(map(float, range(len(forms)))), tuple(distances)),),
            ),
        ),
    )
    text = (
        f"A mean and a deviation per weight, the storage of two networks, predict what all {len(samples)} HMC networks "
        f"do to a total variation of {distances[-1]:.3f} once aligned and refined; two of the networks alone are at "
        f"{distances[0]:.3f}; without alignment the same form is at {distances[2]:.2f}.",
    )
    return Section("compact", TITLE, text, (table, figure))
