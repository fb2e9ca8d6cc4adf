"""What is each way of sampling worth?"""

from __future__ import annotations

import onebasin as ob
from onebasin_papers.demo.presets import METHODS, DemoPlan, population, problem
from onebasin_papers.numbers import estimated
from onebasin_papers.study import Bench

TITLE = "What is each way of sampling networks worth?"
RESAMPLES = 200  # of the examples: enough for a standard error


def part(bench: Bench[DemoPlan]) -> ob.reporting.Section:
    """Sample by four methods, and judge their average predictives on held-out digits."""
    data = problem(bench)
    populations = {name: population(bench, name) for name in METHODS}
    found = {}
    for place, (name, networks) in enumerate(populations.items()):
        bench.show(place, len(populations), f"evaluating {name}")
        found[name] = ob.evaluate(
            data.model, networks, data.test, ood=data.outside, reference=populations["HMC"], n_resamples=RESAMPLES
        )
    table = ob.reporting.Table(
        "methods",
        "Four ways to many networks, on held-out digits",
        (
            ob.reporting.Column("method"),
            ob.reporting.Column("networks", digits=0),
            ob.reporting.Column("accuracy", "share of held-out digits that are recognised", "higher", 1, "%"),
            ob.reporting.Column("NLL", "negative log likelihood per digit, in nats", "lower"),
            ob.reporting.Column(
                "ECE", "expected calibration error: how far confidence is from accuracy", "lower", 1, "%"
            ),
            ob.reporting.Column("AUROC", f"telling {data.outside_name} from digits by mutual information", "higher"),
            ob.reporting.Column(
                "TV to HMC", "total variation: half the sum of differences of predicted probabilities", "lower"
            ),
        ),
        tuple(_row(name, populations[name], found[name]) for name in populations),
        errors="± one standard error over held-out examples (bootstrap)",
    )
    mixing = ob.diagnose(data.model, populations["HMC"], data.test[0][:200], weights=False).functions
    accuracy = {name: 100 * one.in_distribution["accuracy"].value for name, one in found.items()}
    best = max(accuracy, key=lambda name: accuracy[name])
    nearest = min((name for name in found if name != "HMC"), key=lambda n: found[n].reference["total_variation"].value)
    text = [
        f"{sum(map(len, populations.values()))} networks by four methods: {best} recognises most held-out digits "
        f"({accuracy[best]:.1f} %), and {nearest} predicts most like HMC "
        f"(total variation {found[nearest].reference['total_variation'].value:.3f}).",
    ]
    if mixing is not None:
        text.append(
            f"HMC, the reference: {bench.plan.chains} chains of {bench.plan.draws} draws; R-hat of what the networks "
            f"predict is {mixing.median_rhat:.3f} in the median and {mixing.worst_rhat:.2f} at worst."
        )
    return ob.reporting.Section("methods", TITLE, tuple(text), (table,))


def _row(name: str, networks: object, found: ob.Evaluation) -> tuple[ob.reporting.Cell, ...]:
    inside = found.in_distribution
    return (
        name,
        ob.reporting.Number(found.members),
        estimated(inside["accuracy"], 100),
        estimated(inside["nll"]),
        estimated(inside["ece"], 100),
        estimated(found.detection["mutual_information"]["auroc"]),
        estimated(found.reference["total_variation"]) if name != "HMC" else None,
    )
