"""How much of the posterior fits in the storage of two networks?"""

from __future__ import annotations

import onebasin as ob
from onebasin_papers.demo.presets import DemoPlan, aligned, population, problem
from onebasin_papers.study import Bench

TITLE = "How much of the posterior fits into the storage of two networks?"


def refined(bench: Bench[DemoPlan]) -> ob.Posterior:
    """The posterior of the HMC networks, refined."""
    data = problem(bench)

    def made() -> ob.Posterior:
        start = ob.fit(aligned(bench, "HMC").population, model=data.model)
        return ob.refine(
            data.model, start, population(bench, "HMC"), data.train[0], steps=bench.plan.steps, progress=bench.show
        )

    return bench.once("refined", made)


def part(bench: Bench[DemoPlan]) -> ob.reporting.Section:
    """Compact forms of the HMC networks, and how far their predictions are from all of them."""
    data, samples = problem(bench), population(bench, "HMC")
    forms: dict[str, ob.Population | ob.Posterior] = {
        "2 of the networks": samples[:: max(1, len(samples) // 2)][:2],
        "10 of the networks": samples[:: max(1, len(samples) // 10)][:10],
        "mean and deviation, as sampled": ob.fit(samples, model=data.model),
        "mean and deviation, aligned": ob.fit(aligned(bench, "HMC").population, model=data.model),
        "mean and deviation, aligned and refined": refined(bench),
    }
    whole = ob.predict(data.model, samples, data.test[0], average=True)
    rows: list[tuple[ob.reporting.Cell, ...]] = []
    distances: list[float] = []
    for name, form in forms.items():
        seen = ob.predict(data.model, form, data.test[0], average=True, draws=bench.plan.judged, seed=bench.seed)
        stored = form.storage if isinstance(form, ob.Posterior) else len(form)
        distances.append(float(ob.metrics.total_variation(seen, whole)))
        numbers = (
            float(stored),
            float(ob.metrics.agreement(seen, whole)),
            distances[-1],
            100 * float(ob.metrics.accuracy(seen, data.test[1])),
        )
        rows.append((name, *map(ob.reporting.Number, numbers)))
    right = 100 * float(ob.metrics.accuracy(whole, data.test[1]))
    rows.append(
        (f"all {len(samples)} networks", ob.reporting.Number(len(samples)), None, None, ob.reporting.Number(right))
    )
    table = ob.reporting.Table(
        "compact",
        f"Forms of {len(samples)} HMC networks",
        (
            ob.reporting.Column("form"),
            ob.reporting.Column("storage", "in networks: a mean and a deviation per weight are two", "lower", 0),
            ob.reporting.Column(
                "agreement", "share of held-out digits with the same answer as all networks together", "higher"
            ),
            ob.reporting.Column("TV", "total variation from the average prediction of all networks", "lower"),
            ob.reporting.Column("accuracy", "share of held-out digits that are recognised", "higher", 1, "%"),
        ),
        tuple(rows),
        note=f"Posteriors are judged by {bench.plan.judged} draws.",
    )
    figure = ob.reporting.Figure(
        "compact-forms",
        "How far is each form from all networks together?",
        "Total variation from the average prediction on held-out digits; shorter is better.",
        (
            ob.reporting.Panel(
                "bars",
                "",
                ob.reporting.Axis("", names=tuple(forms)),
                ob.reporting.Axis("total variation", low=0.0),
                (ob.reporting.Series("", tuple(map(float, range(len(forms)))), tuple(distances)),),
            ),
        ),
    )
    text = (
        f"A mean and a deviation per weight, the storage of two networks, predict what all {len(samples)} HMC networks "
        f"do to a total variation of {distances[-1]:.3f} once aligned and refined; two of the networks alone are at "
        f"{distances[0]:.3f}; without alignment the same form is at {distances[2]:.2f}.",
    )
    return ob.reporting.Section("compact", TITLE, text, (table, figure))
