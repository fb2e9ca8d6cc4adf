"""The demo on embedded digits, three minutes: discover, sample, align, compact, evaluate, prune."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onebasin as ob
from onebasin_papers.numbers import estimate_number, mean_error
from onebasin_papers.problems import Problem, digits_problem
from onebasin_papers.study import Part, Settings, Study, Workspace

report = ob.reporting


@dataclass(frozen=True)
class DemoSettings(Settings):
    """Sizes and budgets.

    Attributes:
        hidden: units of the hidden layer.
        prior: standard deviation of the Gaussian prior of all methods.
        members: networks of the ensemble.
        epochs: of its training, and of the training that VI and SWAG begin with.
        chains, draws, warmup, leapfrog: of HMC.
        steps: of the refinement.
        judged: networks drawn from a posterior when it is judged.
        workers: processes of HMC.
    """

    hidden: int = 32
    prior: float = 0.6
    members: int = 20
    epochs: int = 60
    chains: int = 4
    draws: int = 100
    warmup: int = 200
    leapfrog: int = 60
    steps: int = 1200
    judged: int = 300
    workers: int = 2


METHODS = ("HMC", "ensemble", "VI", "SWAG")


def problem(workspace: Workspace[DemoSettings]) -> Problem:
    """The digits and the architecture."""
    return workspace.cached("problem", lambda: digits_problem(workspace.settings.hidden))


def symmetry(workspace: Workspace[DemoSettings]) -> ob.Symmetry:
    """What leaves the function of the architecture unchanged."""
    data = problem(workspace)
    return workspace.cached("symmetry", lambda: ob.discover(data.model, data.train[0][:4]))


def population(workspace: Workspace[DemoSettings], method: str) -> ob.Population:
    """The networks of one method, by its name in `METHODS`."""
    settings, data = workspace.settings, problem(workspace)
    methods: dict[str, ob.Method] = {
        "HMC": ob.HMC(draws=settings.draws, warmup=settings.warmup, leapfrog=settings.leapfrog, epochs=20),
        "ensemble": ob.Ensemble(epochs=settings.epochs, batch=100, lr=5e-3),
        "VI": ob.VI(draws=settings.draws, epochs=2 * settings.epochs, batch=100, lr=1e-2),
        "SWAG": ob.SWAG(draws=settings.draws, epochs=settings.epochs, batch=100, lr=5e-3),
    }
    chains = {"HMC": settings.chains, "ensemble": settings.members}.get(method, 1)
    workers = settings.workers if method == "HMC" else None
    return workspace.sample(
        method.lower(), data.model, data.train, methods[method], chains=chains, prior=settings.prior, workers=workers
    )


def aligned(workspace: Workspace[DemoSettings], method: str) -> ob.Alignment:
    """The networks of one method in one basin."""
    return workspace.cached(f"aligned/{method}", lambda: ob.align(population(workspace, method), symmetry(workspace)))


_SYMMETRIES_TITLE = "How many networks are the same function?"


def symmetries_part(workspace: Workspace[DemoSettings]) -> report.Section:
    """Discover and prove the symmetries of the digits network, and of models with more structure."""
    data, digits_symmetry = problem(workspace), symmetry(workspace)
    rows = [
        _symmetries_row(
            f"{data.name}: one hidden layer",
            digits_symmetry,
            ob.verify(data.model, digits_symmetry, data.train[0][:4]).max_error,
        )
    ]
    for place, example in enumerate(ob.examples.EXAMPLES):
        workspace.progress(place, len(ob.examples.EXAMPLES), f"discovering the symmetries of {example.name}")
        with ob.global_seed(workspace.seed):
            model, inputs = example.build(), example.inputs()
        symmetries = ob.discover(model, inputs, seed=workspace.seed)
        rows.append(_symmetries_row(example.summary, symmetries, ob.verify(model, symmetries, inputs).max_error))
    worst = max(
        cell.value for row in rows for cell in row[-1:] if isinstance(cell, report.Number) and cell.value is not None
    )
    table = report.Table(
        "symmetries",
        "Symmetries that were found and proved",
        (
            report.Column("model"),
            report.Column("spaces", "sets of hidden units that can be exchanged", digits=0),
            report.Column(
                "disguises, powers of ten", "networks with the same function, by orders and signs of units", digits=1
            ),
            report.Column("scales", "units that can also be rescaled without changing the function", digits=0),
            report.Column(
                "proof error", "largest relative change of an output under random elements, in float64", digits=1
            ),
        ),
        tuple(rows),
        note="Nobody wrote these symmetries down: each model was traced, and each symmetry was checked by running it.",
    )
    text = (
        f"The digits network has 10^{digits_symmetry.log10_order:.1f} disguises by reordering its hidden units, and "
        f"{digits_symmetry.dimensions} units can be rescaled besides: proved by running it, relative error at most "
        f"{worst:.0e}.",
        "Two networks can hold completely different weights and be one function. Averages, deviations and distances of "
        "weights mean nothing until that is taken out.",
    )
    return report.Section("symmetries", _SYMMETRIES_TITLE, text, (table,))


def _symmetries_row(name: str, symmetry: ob.Symmetry, error: float) -> tuple[str | report.Number, ...]:
    return (
        name,
        report.Number(len(symmetry.spaces)),
        report.Number(symmetry.log10_order),
        report.Number(symmetry.dimensions),
        report.Number(error),
    )


_METHODS_TITLE = "What is each way of sampling networks worth?"
_RESAMPLES = 200  # of the examples: enough for a standard error


def methods_part(workspace: Workspace[DemoSettings]) -> report.Section:
    """Sample by four methods, and judge their average predictives on held-out digits."""
    data = problem(workspace)
    populations = {name: population(workspace, name) for name in METHODS}
    evaluations = {}
    for place, (name, networks) in enumerate(populations.items()):
        workspace.progress(place, len(populations), f"evaluating {name}")
        evaluations[name] = ob.evaluate(
            data.model, networks, data.test, ood=data.outside, reference=populations["HMC"], n_resamples=_RESAMPLES
        )
    table = report.Table(
        "methods",
        "Four ways to many networks, on held-out digits",
        (
            report.Column("method"),
            report.Column("networks", digits=0),
            report.Column("accuracy", "share of held-out digits that are recognised", "higher", 1, "%"),
            report.Column("NLL", "negative log likelihood per digit, in nats", "lower"),
            report.Column("ECE", "expected calibration error: how far confidence is from accuracy", "lower", 1, "%"),
            report.Column("AUROC", f"telling {data.outside_name} from digits by mutual information", "higher"),
            report.Column(
                "TV to HMC", "total variation: half the sum of differences of predicted probabilities", "lower"
            ),
        ),
        tuple(_methods_row(name, populations[name], evaluations[name]) for name in populations),
        errors="± one standard error over held-out examples (bootstrap)",
    )
    mixing = ob.diagnose(data.model, populations["HMC"], data.test[0][:200], weights=False).functions
    accuracy = {name: 100 * one.in_distribution["accuracy"].value for name, one in evaluations.items()}
    best = max(accuracy, key=lambda name: accuracy[name])
    nearest = min(
        (name for name in evaluations if name != "HMC"), key=lambda n: evaluations[n].reference["total_variation"].value
    )
    text = [
        f"{sum(map(len, populations.values()))} networks by four methods: {best} recognises most held-out digits "
        f"({accuracy[best]:.1f} %), and {nearest} predicts most like HMC "
        f"(total variation {evaluations[nearest].reference['total_variation'].value:.3f})."
    ]
    if mixing is not None:
        text.append(
            f"HMC, the reference: {workspace.settings.chains} chains of {workspace.settings.draws} draws; R-hat of "
            "what the networks "
            f"predict is {mixing.median_rhat:.3f} in the median and {mixing.worst_rhat:.2f} at worst."
        )
    return report.Section("methods", _METHODS_TITLE, tuple(text), (table,))


def _methods_row(name: str, networks: object, evaluation: ob.Evaluation) -> tuple[report.Cell, ...]:
    inside = evaluation.in_distribution
    return (
        name,
        report.Number(evaluation.members),
        estimate_number(inside["accuracy"], 100),
        estimate_number(inside["nll"]),
        estimate_number(inside["ece"], 100),
        estimate_number(evaluation.detection["mutual_information"]["auroc"]),
        estimate_number(evaluation.reference["total_variation"]) if name != "HMC" else None,
    )


_BASIN_TITLE = "Are the networks in one basin once symmetries are removed?"
_PAIRS = 6  # pairs of ensemble members whose barrier is measured
_SHADE_RAW, _SHADE_ALIGNED = 1, 2  # shades


def basin_part(workspace: Workspace[DemoSettings]) -> report.Section:
    """Barriers between ensemble members, means of populations, and R-hat of weights, before and after alignment."""
    data, members = problem(workspace), population(workspace, "ensemble")
    paths = []
    for place in range(_PAIRS):
        workspace.progress(place, _PAIRS, "walking between networks")
        a, b = members.member(2 * place % len(members)), members.member((2 * place + 1) % len(members))
        paths.append(ob.barrier(data.model, a, b, data.test, points=21, symmetry=symmetry(workspace)))
    raw = [path.max for path in paths]
    moved = [path.aligned.max for path in paths if path.aligned is not None]
    means = {
        name: (
            _mean_accuracy(workspace, population(workspace, name)),
            _mean_accuracy(workspace, aligned(workspace, name).population),
        )
        for name in ("ensemble", "HMC")
    }
    first = paths[0]
    assert first.aligned is not None
    figure = report.Figure(
        "path",
        "Is there a hill between two networks?",
        f"Test loss on the straight line between two members of the ensemble; barrier {raw[0]:.2f} as trained and "
        f"{moved[0]:.3f} with the second one aligned to the first.",
        (
            report.Panel(
                "lines",
                "",
                report.Axis("place on the line"),
                report.Axis("test loss"),
                (
                    report.Series("as trained", tuple(first.t.tolist()), tuple(first.loss.tolist()), shade=_SHADE_RAW),
                    report.Series(
                        "aligned", tuple(first.t.tolist()), tuple(first.aligned.loss.tolist()), shade=_SHADE_ALIGNED
                    ),
                ),
            ),
        ),
    )
    table = report.Table(
        "basin",
        "Before and after alignment",
        (report.Column("quantity"), report.Column("as sampled"), report.Column("aligned")),
        (
            ("loss barrier between ensemble members", _number(raw), _number(moved)),
            *(
                (f"share that the mean network recognises, {name}", report.Number(before), report.Number(after))
                for name, (before, after) in means.items()
            ),
            _mixing_row(workspace),
        ),
        errors=f"± one standard error over {_PAIRS} pairs of networks",
    )
    text = (
        f"The loss barrier between networks of the ensemble falls from {mean_error(raw)[0]:.2f} to "
        f"{mean_error(moved)[0]:.3f}, and their mean network goes from {100 * means['ensemble'][0]:.1f} to "
        f"{100 * means['ensemble'][1]:.1f} % right.",
        "Alignment reorders and rescales hidden units. It changes no function: whatever became better was hidden by "
        "disguises.",
    )
    return report.Section("basin", _BASIN_TITLE, text, (table, figure))


def _number(values: list[float]) -> report.Number:
    return report.Number(*mean_error(values))


def _mean_accuracy(workspace: Workspace[DemoSettings], networks: ob.Population) -> float:
    data = problem(workspace)
    centre = ob.Population.from_states([ob.fit(networks, model=data.model).mean])
    return float(ob.metrics.accuracy(ob.predict(data.model, centre, data.test[0], average=True), data.test[1]))


def _mixing_row(workspace: Workspace[DemoSettings]) -> tuple[str, report.Number, report.Number]:
    """Median R-hat of the first layer's weights."""
    name = next(iter(population(workspace, "HMC").names))
    medians = [
        ob.diagnose(None, one).weights[name].median_rhat
        for one in (population(workspace, "HMC"), aligned(workspace, "HMC").population)
    ]
    return "median R-hat of first-layer weights, HMC", report.Number(medians[0]), report.Number(medians[1])


_COMPACT_TITLE = "How much of the posterior fits into the storage of two networks?"


def refined(workspace: Workspace[DemoSettings]) -> ob.Posterior:
    """The posterior of the HMC networks, refined."""
    data = problem(workspace)

    def make() -> ob.Posterior:
        start = ob.fit(aligned(workspace, "HMC").population, model=data.model)
        return ob.refine(
            data.model,
            start,
            population(workspace, "HMC"),
            data.train[0],
            steps=workspace.settings.steps,
            progress=workspace.progress,
        )

    return workspace.cached("refined", make)


def compact_part(workspace: Workspace[DemoSettings]) -> report.Section:
    """Compact forms of the HMC networks, and how far their predictions are from all of them."""
    data, samples = problem(workspace), population(workspace, "HMC")
    forms: dict[str, ob.Population | ob.Posterior] = {
        "2 of the networks": samples[:: max(1, len(samples) // 2)][:2],
        "10 of the networks": samples[:: max(1, len(samples) // 10)][:10],
        "mean and deviation, as sampled": ob.fit(samples, model=data.model),
        "mean and deviation, aligned": ob.fit(aligned(workspace, "HMC").population, model=data.model),
        "mean and deviation, aligned and refined": refined(workspace),
    }
    whole = ob.predict(data.model, samples, data.test[0], average=True)
    rows: list[tuple[report.Cell, ...]] = []
    distances: list[float] = []
    for name, form in forms.items():
        seen = ob.predict(
            data.model, form, data.test[0], average=True, draws=workspace.settings.judged, seed=workspace.seed
        )
        stored = form.storage if isinstance(form, ob.Posterior) else len(form)
        distances.append(float(ob.metrics.total_variation(seen, whole)))
        numbers = (
            float(stored),
            float(ob.metrics.agreement(seen, whole)),
            distances[-1],
            100 * float(ob.metrics.accuracy(seen, data.test[1])),
        )
        rows.append((name, *map(report.Number, numbers)))
    right = 100 * float(ob.metrics.accuracy(whole, data.test[1]))
    rows.append((f"all {len(samples)} networks", report.Number(len(samples)), None, None, report.Number(right)))
    table = report.Table(
        "compact",
        f"Forms of {len(samples)} HMC networks",
        (
            report.Column("form"),
            report.Column("storage", "in networks: a mean and a deviation per weight are two", "lower", 0),
            report.Column(
                "agreement", "share of held-out digits with the same answer as all networks together", "higher"
            ),
            report.Column("TV", "total variation from the average prediction of all networks", "lower"),
            report.Column("accuracy", "share of held-out digits that are recognised", "higher", 1, "%"),
        ),
        tuple(rows),
        note=f"Posteriors are judged by {workspace.settings.judged} draws.",
    )
    figure = report.Figure(
        "compact-forms",
        "How far is each form from all networks together?",
        "Total variation from the average prediction on held-out digits; shorter is better.",
        (
            report.Panel(
                "bars",
                "",
                report.Axis("", names=tuple(forms)),
                report.Axis("total variation", low=0.0),
                (report.Series("", tuple(map(float, range(len(forms)))), tuple(distances)),),
            ),
        ),
    )
    text = (
        f"A mean and a deviation per weight, the storage of two networks, predict what all {len(samples)} HMC networks "
        f"do to a total variation of {distances[-1]:.3f} once aligned and refined; two of the networks alone are at "
        f"{distances[0]:.3f}; without alignment the same form is at {distances[2]:.2f}.",
    )
    return report.Section("compact", _COMPACT_TITLE, text, (table, figure))


_PRUNING_TITLE = "How many weights can be removed?"
_CRITERIA = {
    "magnitude": "largest mean",
    "snr": "largest mean / deviation",
    "sigma": "smallest deviation",
    "random": "random",
}
_LEVELS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05)
_LOSS = 1.0  # percentage points of accuracy that may be lost


def pruning_part(workspace: Workspace[DemoSettings]) -> report.Section:
    """Pruning curves of the mean of the aligned ensemble."""
    data = problem(workspace)
    posterior = ob.fit(aligned(workspace, "ensemble").population, model=data.model)
    curve = ob.pruning_curve(data.model, posterior, data.test, by=tuple(_CRITERIA), levels=_LEVELS, seed=workspace.seed)
    series = []
    for by, words in _CRITERIA.items():
        right = tuple(None if share is None else 100 * share for share in curve.accuracy(by))
        series.append(
            report.Series(
                f"keep {words}" if by != "random" else "random", tuple(100 * level for level in _LEVELS), right
            )
        )
    least = {by: _least([value or 0.0 for value in one.y]) for by, one in zip(_CRITERIA, series, strict=True)}
    figure = report.Figure(
        "pruning-curves",
        "Which weights carry the network?",
        "Accuracy on held-out digits of the mean of the aligned ensemble when only a share of its weights is kept.",
        (
            report.Panel(
                "lines",
                "",
                report.Axis("weights kept (%)"),
                report.Axis("accuracy (%)", low=0.0, high=100.0),
                tuple(series),
            ),
        ),
    )
    text = (
        f"By magnitude, {100 * least['magnitude']:.0f} % of the weights are enough to stay within {_LOSS:g} point of "
        f"the whole network ({series[0].y[0]:.1f} %); by smallest deviation, as one paper proposes, "
        f"{100 * least['sigma']:.0f} %; at random {100 * least['random']:.0f} %.",
    )
    return report.Section("pruning", _PRUNING_TITLE, text, (figure,))


def _least(values: list[float]) -> float:
    """The smallest share that loses at most a point, with all larger ones.

    >>> _least([98.0, 97.9, 90.0, 97.5])
    0.9
    """
    least = _LEVELS[0]
    for level, value in zip(_LEVELS, values, strict=False):
        if value < values[0] - _LOSS:
            break
        least = level
    return least


def preset_settings(preset: str = "quick", data_dir: str | None = None) -> DemoSettings:
    """The settings; there is one preset, and it needs no data."""
    return DemoSettings(preset, data_dir)


def summarise(sections: Sequence[report.Section]) -> list[str]:
    """The first paragraph of every section: each opens with its answer."""
    return [section.text[0] for section in sections]


STUDY = Study(
    name="demo",
    title="One basin: what a population of networks looks like without its symmetries",
    parts=(
        Part("symmetries", _SYMMETRIES_TITLE, symmetries_part),
        Part("methods", _METHODS_TITLE, methods_part),
        Part("basin", _BASIN_TITLE, basin_part),
        Part("compact", _COMPACT_TITLE, compact_part),
        Part("pruning", _PRUNING_TITLE, pruning_part),
    ),
    summarise=summarise,
    terms={
        "HMC": "Hamiltonian Monte Carlo: Markov chains of draws from the posterior. The reference here.",
        "ensemble": "Networks trained independently, from different starts.",
        "VI": "Variational inference: one Gaussian with a mean and a deviation per weight, fitted to the posterior.",
        "SWAG": "A Gaussian through the late steps of stochastic gradient descent.",
        "aligned": "Moved into one basin: hidden units reordered and rescaled, so that no function changes.",
        "refined": "A mean and a deviation per weight, moved until its draws predict what the samples predict.",
        "barrier": "How far the loss rises on the straight line between two networks.",
    },
)
