"""Compact: one posterior of many networks, its comparison with them, and a record of what it keeps."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from onebasin import metrics
from onebasin.alignment import align
from onebasin.cli import data as examples
from onebasin.cli.networks import Known, discovered, open_networks, prepare
from onebasin.cli.options import Architecture, check_output
from onebasin.cli.progress import progress_bar
from onebasin.cli.records import as_json as text_of_values
from onebasin.cli.records import record_of
from onebasin.cli.tables import short
from onebasin.errors import InputError
from onebasin.functional import Inputs, answers
from onebasin.parallel import Progress, duration, executor_for
from onebasin.population import Population
from onebasin.posterior import (
    EXAMPLES,
    Fidelities,
    Fidelity,
    Networks,
    Posterior,
    fidelity,
    fit,
    fit_scales,
    predict,
    prior_shares,
    refine,
    some_of,
    warnings_of,
)
from onebasin.reporting import table, write_record
from onebasin.storage import real_path

_MOVES = {"refine": refine, "fit_scales": fit_scales}
_OF_MOVES = {"steps": "steps", "draws_per_step": "draws", "batch": "batch"}  # option -> keyword of both


def compact(
    *, networks: Path, output: Path, architecture: Architecture, force: bool, as_json: bool, **options: Any
) -> None:
    """Keep the networks of POPULATION as one posterior."""
    options["move"] = _move(options)
    _check(networks, output, force, options)
    known = prepare(architecture)
    population = open_networks(networks, known)
    options["components"] = _components(options["components"])
    options["inputs"], options["taken"] = _read(known, population, options, architecture.seed)
    known = discovered(known, architecture)
    with (
        progress_bar(f"compacting {len(population):,} networks") as show,
        executor_for(**options["places"]) as executor,
    ):
        options["places"] = {"executor": executor}
        aligned = population
        if not options["raw"]:
            aligned = align(population, known.symmetry, progress=show, executor=executor).population
        fitted = _fitted(aligned, known, options)
        posterior = _moved(fitted, known, population, options, seed=architecture.seed, show=show)
        fidelities = _fidelity(posterior, known, population, options, seed=architecture.seed, show=show)
        compared = architecture.seed if fidelities.seed is None else fidelities.seed
        content = {
            "population": str(networks),
            "posterior": str(output),
            "networks": len(population),
            "storage": posterior.storage,
            "aligned": not options["raw"],
            "provenance": json.loads(json.dumps(dict(posterior.provenance), default=str)),
            "deviations": _deviations(posterior),
            "predictions": _compared(fitted, posterior, known, population, options, seed=compared, show=show),
            "fidelity": fidelities.to_dict() if fidelities else None,
            "fidelity_draws": fidelities.draws,
            "fidelity_seed": fidelities.seed,
            "prior": None if options["prior"] is None else prior_shares(fitted, options["prior"]).to_dict(),
            "notes": [*options["taken"], *_notes(posterior, bool(fidelities), options), *warnings_of(fidelities)],
        }
        for text in warnings_of(fidelities):
            click.echo(f"warning: {text}", err=True)
    record = output.with_suffix(".json")
    posterior.save(output)
    answer = f"{len(population):,} networks -> {posterior.description}".splitlines()[0]
    paragraphs = [answer, *content["notes"]]
    shown = [posterior, fidelities] if fidelities and not _is_of_descent(options) else [posterior]
    write_record(record_of("posterior", f"Posterior of {networks}", paragraphs, content, *shown), record)
    click.echo(
        text_of_values(content)
        if as_json
        else f"{_page(content, posterior)}\n\n{output}: the posterior; {record}: this record"
    )


def _move(options: dict[str, Any]) -> str | None:
    chosen = [name for name in _MOVES if options[name]]
    if len(chosen) > 1:
        raise InputError("--refine and --fit-scales were both given: leave --fit-scales out")
    return chosen[0] if chosen else None


def _flag(move: str) -> str:
    return move.replace("_", "-")


def _check(networks: Path, output: Path, force: bool, options: dict[str, Any]) -> None:
    """Raise before the work where options or files do not go together."""
    if real_path(networks) in (real_path(output), real_path(output).parent):
        raise InputError(
            f"{output} would lie among the networks and be taken for one: choose an --output outside of {networks}"
        )
    if output.suffix != ".safetensors":
        raise InputError(f"a posterior is a .safetensors file, found {output}: give --output such a name")
    for path in (output, output.with_suffix(".json")):
        check_output(path, force)
    move = options["move"]
    if move is not None and options["data"] is None:
        raise InputError(f"--{_flag(move)} goes with --data: give both, or neither")
    for name in _OF_MOVES:
        if options[name] is not None and move is None:
            raise InputError(f"--{_flag(name)} is one of --refine or --fit-scales: give --refine too")


def _components(text: str | None) -> str | int | None:
    if text is None or text == "chains":
        return text
    if not text.isdecimal():
        raise InputError(f"expected --components to be a number or chains, found {text!r}: give chains")
    return int(text)


def _read(
    known: Known, population: Population, options: dict[str, Any], seed: int
) -> tuple[dict[str, Inputs], list[str]]:
    """The inputs of each option that names some, and sentences about those that are only a part; checked."""
    found, sentences = dict[str, Inputs](), list[str]()
    for name in ("data", "test", "statistics"):
        if options[name] in (None, "none"):
            continue
        every = examples.read(options[name], limit=options["limit"], targets=False, sources=options["sources"])
        few, sentence = examples.some(every, options["examples"], seed)
        model, first = known.runs(f"--{name}"), population.member(0)
        examples.check_fit(model, first, few.inputs)
        if name != "statistics" and not options["values"] and answers(model, first, few.inputs).shape[-1] < 2:
            raise InputError(
                f"expected logits of several classes from the model on --{name}, found a single number: give --values, "
                "for a model of values"
            )
        found[name] = few.inputs
        sentences += [f"--{name}: {sentence}"] if sentence else []
    return found, sentences


def _fitted(aligned: Population, known: Known, options: dict[str, Any]) -> Posterior:
    return fit(
        aligned,
        options["family"],
        rank=options["rank"],
        components=options["components"],
        model=known.model,
        **options["places"],
    )


def _moved(
    fitted: Posterior, known: Known, population: Population, options: dict[str, Any], *, seed: int, show: Any
) -> Posterior:
    if options["move"] is None:
        return fitted
    model = known.runs(f"--{_flag(options['move'])}")
    given: dict[str, Any] = {"seed": seed, "quantity": _quantity(options), **options["places"]}
    given |= {"progress": Estimate(show, options, _MOVES[options["move"]]), "fidelity_draws": options["draws"]}
    given |= {key: options[name] for name, key in _OF_MOVES.items() if options[name] is not None}
    if options["statistics"] is not None:
        given["statistics"] = _statistics(options)
    return _MOVES[options["move"]](model, fitted, population, options["inputs"]["data"], **given)


PATIENCE = 120.0  # seconds of a descent that are worth a sentence before they pass
_QUICKER = {"draws_per_step": 16, "batch": 100, "steps": 1000}  # in the order in which they are taken


class Estimate:
    """Progress that tells once, on stderr, how long a descent will take, and quicker settings where it takes long.

    The time of a step is about in proportion to networks times examples; the first step, which also prepares, is left
    out.
    """

    def __init__(
        self, show: Progress, options: dict[str, Any], move: Any, clock: Callable[[], float] = time.monotonic
    ) -> None:
        defaults = {name: move.__kwdefaults__[key] for name, key in _OF_MOVES.items()}
        self._settings: dict[str, int] = {name: options[name] or own for name, own in defaults.items()}
        self._show, self._clock, self._flag = show, clock, _flag(options["move"])
        self._first: tuple[int, float] | None = None
        self._done = False

    def __call__(self, done: int, total: int, doing: str) -> None:
        """Pass the news on, and tell the estimate after a few steps of the descent."""
        self._show(done, total, doing)
        if self._done or not doing.startswith("distance"):
            return
        if self._first is None:
            self._first = (done, self._clock())
            return
        first, began = self._first
        passed = self._clock() - began
        if passed >= 2 or done - first >= 10:
            self._done = True
            seconds = passed / (done - first) * total
            if seconds > PATIENCE:
                click.echo(f"note: {self._sentence(seconds)}", err=True)

    def _sentence(self, seconds: float) -> str:
        settings, changed, quicker = self._settings, [], seconds
        for name, few in _QUICKER.items():
            if quicker > PATIENCE and settings[name] > few:
                quicker *= few / settings[name]
                changed.append(f"--{_flag(name)} {few}")
        steps, draws, batch = (f"{settings[name]:,}" for name in ("steps", "draws_per_step", "batch"))
        text = (
            f"--{self._flag} will take about {duration(seconds)}: {steps} steps of {draws} networks on {batch} examples"
        )
        if not changed:
            return f"{text}; fewer --steps are quicker"
        return f"{text}; {' '.join(changed)} would take about {duration(quicker)}, with noisier steps"


def _quantity(options: dict[str, Any]) -> Any:
    return "values" if options["values"] else "probabilities"


def _deviations(posterior: Posterior) -> dict[str, float]:
    """Tensor -> root mean square of its standard deviations."""
    return {name: float(posterior.std[name].double().square().mean().sqrt()) for name in posterior.layout.names}


def _compared(
    fitted: Posterior,
    posterior: Posterior,
    known: Known,
    population: Population,
    options: dict[str, Any],
    *,
    seed: int,
    show: Progress,
) -> dict[str, Any] | None:
    """Predictions of the posterior beside those of the networks, and beside as many networks as its storage holds."""
    inputs = options["inputs"].get("test", options["inputs"].get("data"))
    if inputs is None:
        return None
    model = known.runs("--test" if options["test"] else "--data")
    if options["test"] is None:
        inputs = some_of(inputs, EXAMPLES, seed)
    count = max(1, round(posterior.storage))
    populations: dict[str, Networks] = {
        "posterior": posterior,
        f"{count} of the networks": population[:: max(1, len(population) // count)][:count],
    }
    if posterior is not fitted:
        populations = {"before": fitted, **populations}
    given: dict[str, Any] = {"quantity": _quantity(options), "average": True, "progress": show, **options["places"]}
    goal = predict(model, population, inputs, **given)
    rows = {}
    for name, one in populations.items():
        numbers = predict(
            model, one, inputs, draws=options["draws"], seed=seed, statistics=_statistics(options), **given
        )
        rows[name] = (
            {"rms_difference": float((numbers - goal).square().mean().sqrt())}
            if options["values"]
            else {
                "agreement": float(metrics.agreement(numbers, goal)),
                "total_variation": float(metrics.total_variation(numbers, goal)),
            }
        )
    return rows


def _statistics(options: dict[str, Any]) -> Any:
    """Inputs for running statistics; False without any, because `_notes` says so."""
    if options["statistics"] == "none":
        return False
    return options["inputs"].get("statistics", options["inputs"].get("data", False))


def _fidelity(
    posterior: Posterior, known: Known, population: Population, options: dict[str, Any], *, seed: int, show: Progress
) -> Fidelities:
    """How well draws predict what the networks predict, on the inputs that there are and around them."""
    inputs = options["inputs"].get("test", options["inputs"].get("data"))
    if inputs is None:
        return Fidelities({})
    if _is_of_descent(options):
        facts: Any = posterior.provenance[{"refine": "refined", "fit_scales": "scaled"}[options["move"]]]
        kinds = {name: Fidelity(**numbers) for name, numbers in facts["fidelity"].items()}
        return Fidelities(kinds, facts["fidelity_draws"], facts["fidelity_seed"])
    return fidelity(
        known.runs("--test" if options["test"] else "--data"),
        posterior,
        population,
        inputs,
        statistics=_statistics(options),
        quantity=_quantity(options),
        draws=options["draws"],
        seed=seed,
        progress=show,
        **options["places"],
    )


def _is_of_descent(options: dict[str, Any]) -> bool:
    """Whether the comparison that ends the descent is the one to show: it was made on the only inputs there are."""
    return options["move"] is not None and options["test"] is None


def _notes(posterior: Posterior, measured: bool, options: dict[str, Any]) -> list[str]:
    """What the numbers do not say."""
    notes = []
    if not measured:
        notes.append(
            "nothing was measured: give --data or --test to see whether draws predict what the networks predict"
        )
    if posterior.own_statistics:
        norms = f"the running statistics of {len(posterior.own_statistics)} norms"
        notes.append(
            f"{norms} were measured for each draw here; draws elsewhere need the same: give "
            "evaluate --statistics, or predict statistics="
            if measured and (options["statistics"] or options["data"] or "none") != "none"
            else f"{norms} are averages of the networks, and draws with them may be worthless: give --data or "
            "--statistics here, and --statistics to evaluate"
        )
    return notes


def _page(content: dict[str, Any], posterior: Posterior) -> str:
    parts = [f"{content['networks']:,} networks -> {posterior.description}"]
    parts.append(table([("tensor", "deviation"), *((name, short(x)) for name, x in content["deviations"].items())]))
    if rows := content["predictions"]:
        columns = list(next(iter(rows.values())))
        head = ("predictions against those of all networks", *(name.replace("_", " ") for name in columns))
        parts.append(table([head, *((name, *(f"{row[c]:.4f}" for c in columns)) for name, row in rows.items())]))
    if content["fidelity"]:
        rows = {
            name: {key: x for key, x in numbers.items() if x is not None}
            for name, numbers in content["fidelity"].items()
        }
        columns = [key for key in next(iter(rows.values())) if key not in ("examples", "low")]
        head = ("the posterior against all networks on", *(name.replace("_", " ") for name in columns))
        head = tuple("one network" if name == "single" else name for name in head)
        parts.append(table([head, *((name, *(f"{row[c]:.4f}" for c in columns)) for name, row in rows.items())]))
        parts[-1] += f"\n{content['fidelity_draws']:,} draws, seed {content['fidelity_seed']}"
    for form in ("refined", "scaled"):
        if form in posterior.provenance:
            narrowing = posterior.provenance[form]["narrowing"]
            aim = "moved towards the predictions of the networks, so its deviations are no longer theirs"
            parts.append(f"{form}: {aim}; their median is {narrowing:.2f} of the fit's")
    if content["prior"]:
        here, chance = (100 * content["prior"][name] for name in ("total", "expected"))
        parts.append(
            f"still at the prior: {here:.1f} % of the weights; as many networks drawn from it would show {chance:.1f} %"
        )
    return "\n\n".join([*parts, *content["notes"]])
