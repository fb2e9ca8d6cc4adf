"""What are approximate posteriors worth, and how far are they from a reference? The paper's table."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from onebasin.inference import diagnose
from onebasin.record import Axis, Column, Figure, Panel, Rule, Section, Series, Table
from onebasin.studies.symmetry.claims import claims
from onebasin.studies.symmetry.crowds import Desk, hmc, problem
from onebasin.studies.symmetry.distances import distance_table, form_table, pairs, run_share, run_table
from onebasin.studies.symmetry.measure import FORM
from onebasin.studies.symmetry.networks import words
from onebasin.studies.symmetry.published import MULTI, ONE
from onebasin.studies.symmetry.rows import Row, rows

TITLE = "What are approximate posteriors worth, and how far are they from independent trainings and from HMC?"

COLUMNS = {
    "mmd": Column("MMD", "10 x squared MMD of raw weights to the reference of independent trainings", "lower", 2),
    "ns": Column("NS", "the same after symmetries were removed (no symmetry)", "lower", 2),
    "accuracy": Column("Acc", "share of test examples whose most probable class is right", "higher", 2, "%"),
    "ece": Column("ECE", "expected calibration error: confidence against accuracy in 15 bins", "lower", 2, "%"),
    "ace": Column("ACE", "adaptive calibration error: class-wise, 15 bins of equal mass", "lower", 2, "per mille"),
    "brier": Column("Brier", "squared distance of probabilities to the truth, summed over classes, x 100", "lower", 2),
    "nll": Column("NLL", "negative log likelihood of an example", "lower", 3, "nats"),
    "aupr": Column("AUPR", "area under precision and recall, familiar against foreign inputs", "higher", 1, "%"),
    "auroc": Column("AUROC", "chance that a foreign input looks more foreign than a familiar one", "higher", 1, "%"),
    "fpr95": Column("FPR95", "foreign inputs accepted where 95 % of the familiar ones are", "lower", 1, "%"),
    "id_mi": Column("ID MI", "mutual information of the networks on test inputs, x 100 nats", "lower", 2),
    "ood_mi": Column("OOD MI", "the same on foreign inputs", "higher", 1),
}
HIGHER = {name for name, column in COLUMNS.items() if column.better == "higher"}


def part(bench: Desk) -> Section:
    """Measure every method in both forms, and compare with what was published."""
    found = rows(bench)
    items = (
        _main(bench, found),
        _scatter(found),
        run_table(bench, found),
        distance_table(bench, found),
        form_table(bench),
    )
    text = (*_answer(bench, found), *_sureness(found), _setting(bench), _mixing(bench))
    return Section("table", TITLE, text, items, tuple(claims(bench, found)))


def _main(bench: Desk, found: Sequence[Row]) -> Table:
    plan, own = bench.plan, problem(bench)
    head = (Column("method"), Column("form"), Column("networks", "independent runs x networks of each"))
    errors = (
        f"± one standard error over independent repetitions: {plan.groups * plan.singles} runs for one-mode rows, "
        f"{plan.groups} groups of {plan.runs} runs for multi-mode rows and ensembles, chains for HMC; test examples "
        "are the same for all, so that differences between rows are surer than single numbers"
    )
    return Table(
        "methods",
        f"Methods on {own.name}, beside what the paper found on CIFAR-100",
        (*head, *COLUMNS.values()),
        tuple((row.method, row.form, row.design, *(row.number(name) for name in COLUMNS)) for row in found),
        errors,
        f"Published values are for ResNet-18 on CIFAR-100 against SVHN, so only patterns can agree. MMD: mean of 20 "
        f"kernels. NS: symmetries removed in the form {FORM}. Foreign inputs are {own.outside_name}, told by the "
        "largest probability. SWAG, Laplace and SGHMC begin at the networks of the deep ensemble.",
    )


def _scatter(found: Sequence[Row]) -> Figure:
    """Distance against what a crowd is worth."""
    label = {name: f"{own.name} ({own.unit})" if own.unit else own.name for name, own in COLUMNS.items()}
    panels = [
        Panel("points", COLUMNS[name].name, Axis("MMD to trainings"), Axis(label[name]), _points(found, name))
        for name in ("accuracy", "brier", "ece", "ood_mi")
    ]
    equal = (Rule("NS = MMD", direction="diagonal"),)
    panels.append(Panel("points", "NS against MMD", Axis("MMD"), Axis("NS"), _points(found, "ns"), equal))
    above = sum(row.mean("ns") > row.mean("mmd") for row in found)
    return Figure(
        "distance-and-worth",
        "Is a crowd that is close to independent trainings better?",
        f"Each point is a row of the table, with one standard error. Removing symmetries raises the distance in "
        f"{above} of {len(found)} rows.",
        tuple(panels),
    )


def _points(found: Sequence[Row], measure: str) -> tuple[Series, ...]:
    """A measure against MMD, one series for each form."""
    series = []
    for shade, form in enumerate((ONE, MULTI)):
        own = [row for row in found if row.form == form]
        ends = [(row.mean(measure), row.number(measure).error or 0.0) for row in own]
        series.append(
            Series(
                form,
                tuple(row.mean("mmd") for row in own),
                tuple(mean for mean, _ in ends),
                tuple(mean - error for mean, error in ends),
                tuple(mean + error for mean, error in ends),
                shade=shade,
            )
        )
    return tuple(series)


def _answer(bench: Desk, found: Sequence[Row]) -> tuple[str, ...]:
    best = max(found, key=lambda row: row.mean("accuracy"))
    nearest = min(found, key=lambda row: row.mean("mmd"))
    like = min((row for row in found if row.method != "HMC"), key=lambda row: row.mean("tv"))
    share = run_share(bench)
    return (
        f"{best.method} ({best.form}) is right most often, {best.mean('accuracy'):.1f} % of the test examples. "
        f"Nearest to independent trainings by MMD is {nearest.method} ({nearest.form}, {nearest.mean('mmd'):.2f}), and "
        f"{like.method} ({like.form}) predicts most like HMC (total variation {like.mean('tv'):.1f} %).",
        f"One-mode rows take all networks from one run, multi-mode rows take as many from {bench.plan.runs} runs. That "
        f"alone divides the part of MMD that comes from runs by {1 / share if share else float('inf'):.0f}.",
    )


def _sureness(found: Sequence[Row]) -> tuple[str, ...]:
    """Why averaging helps calibration or does not; nothing where no temperature is best."""
    forms = [
        [value for pair in pairs(found) for row in pair if row.form == form for value in row.values("temperature")]
        for form in (ONE, MULTI)
    ]
    if not all(forms):
        return ()
    one, many = (median(values) for values in forms)
    effect = "does not make them less sure here"
    if many < one:
        effect = "makes them less sure, which helps " + ("here too" if many >= 1 else "only those that are too sure")
    return (
        f"Calibration: predictions would be best at a temperature of {one:.2f} in one mode and {many:.2f} in many "
        "(medians over all repetitions); above 1 they are too sure of themselves, below 1 not sure enough. "
        f"Averaging over runs {effect}.",
    )


def _setting(bench: Desk) -> str:
    plan, own = bench.plan, problem(bench)
    weights = sum(value.numel() for value in own.model.parameters())
    return (
        f"The networks: {words(plan.architecture)}, {weights:,} weights, on {len(own.train[0]):,} examples of "
        f"{own.name}. Each training is {plan.epochs} epochs of SGD with momentum; its weight decay is a Gaussian prior "
        f"of standard deviation {plan.prior:g}, the same for all methods. The reference has "
        f"{plan.reference_networks:,} independent trainings."
    )


def _mixing(bench: Desk) -> str:
    own, plan = problem(bench), bench.plan
    found = diagnose(hmc(bench), own.model, own.test[0][:200], weights=False).functions
    told = f"HMC: {plan.chains} chains of {plan.chain_draws} draws after {plan.warmup} of warm-up, {plan.leapfrog} "
    told += "leapfrog steps each"
    if found is None:
        return f"{told}; too short to tell whether they have mixed."
    return (
        f"{told}; R-hat of predictions is {found.median_rhat:.3f} in the median and {found.worst_rhat:.2f} at worst "
        "(1 is perfect)."
    )
