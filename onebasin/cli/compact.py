"""``onebasin compact``: many networks -> one posterior in the space of a few, and a record of what it keeps."""

import json
from pathlib import Path
from typing import Any

import click

from onebasin import metrics
from onebasin.alignment import align
from onebasin.cli import data as examples
from onebasin.cli.networks import Architecture, Known, architecture_options, know, open_networks
from onebasin.cli.options import check_absent, debug, progress_bar
from onebasin.cli.options import places as where_it_runs
from onebasin.cli.tables import short
from onebasin.errors import InputError
from onebasin.functional import Inputs
from onebasin.parallel import executor_for
from onebasin.population import Population
from onebasin.posterior import (
    EXAMPLES,
    FAMILIES,
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
from onebasin.reporting import table
from onebasin.storage import make_folder, publish, real_path

FORMAT = "onebasin compact 1"
_MOVES = {"refine": refine, "fit_scales": fit_scales}


@click.command()
@click.argument("networks", metavar="POPULATION", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="File of the posterior, .safetensors; the record goes beside it, with .json for its ending.",
)
@architecture_options
@click.option(
    "--family", type=click.Choice(FAMILIES), default="diagonal", show_default=True, help="Family of densities."
)
@click.option("--rank", type=click.IntRange(min=1), metavar="N", help="Directions of a low-rank family.")
@click.option("--components", metavar="N", help="Of a mixture: a number, or chains for one component per chain.")
@click.option("--raw", is_flag=True, help="Take the networks as they are, without moving them into one basin first.")
@click.option(
    "--data",
    metavar="DATA",
    help="Unlabelled inputs, such as those of training: for --refine and --fit-scales, for running statistics, and to "
    f"measure the agreement on if there are no others: {examples.INPUT_GRAMMAR}.",
)
@click.option(
    "--test",
    metavar="DATA",
    help="Held-out inputs: compare the predictions of the posterior with those of the networks on them, not on --data.",
)
@click.option(
    "--statistics",
    metavar="DATA",
    help="Inputs on which the running statistics of norms are measured for each draw. Default: those of --data. The "
    "word none leaves them at the averages of the networks; refined like this, a posterior is drawn without data.",
)
@click.option(
    "--refine",
    is_flag=True,
    help="Move means and deviations until draws predict what the networks predict on --data.",
)
@click.option("--fit-scales", is_flag=True, help="The same with only one width and one gain for each tensor.")
@click.option("--values", is_flag=True, help="The model gives values, not logits of classes.")
@click.option(
    "--steps", type=click.IntRange(min=1), metavar="N", help="Steps of --refine (3000) or --fit-scales (300)."
)
@click.option(
    "--draws", type=click.IntRange(min=2), default=100, metavar="N", show_default=True, help="Networks to compare."
)
@click.option(
    "--prior",
    type=click.FloatRange(min=0, min_open=True),
    metavar="X",
    help="Standard deviation of the prior: also tell which share of the weights is still at it.",
)
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Only the first N examples of each file.")
@examples.data_options
@click.option("--force", is_flag=True, help="Replace the files if they exist.")
@click.option("--json", "as_json", is_flag=True, help="Print the record instead of tables, and nothing else.")
@where_it_runs
@debug
def compact(
    *, networks: Path, output: Path, architecture: Architecture, force: bool, as_json: bool, **options: Any
) -> None:
    """Keep the networks of POPULATION as one posterior.

    POPULATION is a folder of checkpoints, a population folder, or a file with several networks. They are moved into
    one basin, and a mean and a standard deviation of every weight are fitted (diagonal: the storage of 2 networks), or
    --rank directions more (low-rank), or one such Gaussian for each of several --components (mixture).

    Draws of a diagonal posterior of HMC samples predict badly, because weights are not independent. --refine moves it
    until draws predict what the networks predict; the deviations are then no longer those of the networks' weights, and
    the record says so.

    With --data or --test the posterior is always compared with the networks, on these inputs and on noise around them,
    and a warning tells when its draws are further from the average of the networks than a single network is. Draws of
    networks with batch norm need statistics of their own: give --data or --statistics, here and to evaluate.

    \b
      onebasin compact draws/ -o q.safetensors --model onebasin.examples:digits_mlp --input 2x64
      onebasin compact draws/ -o q.safetensors --model model.py:net --refine --data train.npz --test test.npz
      onebasin compact aligned/ -o q.safetensors --raw --family low-rank --rank 20 --symmetry symmetry.json
    """  # noqa: D301 - click reads the backspace: keep these lines apart
    options["move"] = _move(options)
    _check(networks, output, force, options)
    known = know(architecture)
    population = open_networks(networks, known)
    with progress_bar(f"compacting {len(population):,} networks") as show, executor_for(options["places"]) as executor:
        options["places"] = {"executor": executor}
        aligned = population
        if not options["raw"]:
            aligned = align(population, known.symmetry, progress=show, executor=executor).population
        fitted = _fitted(aligned, known, options)
        found = _moved(fitted, known, population, options, seed=architecture.seed, show=show)
        close = _fidelity(found, known, population, options, architecture.seed)
        told = {
            "format": FORMAT,
            "population": str(networks),
            "posterior": str(output),
            "networks": len(population),
            "storage": found.storage,
            "aligned": not options["raw"],
            "provenance": dict(found.provenance),
            "deviations": _deviations(found),
            "predictions": _compared(fitted, found, known, population, options, architecture.seed),
            "fidelity": {name: own.to_json() for name, own in close.items()} if close else None,
            "prior": None if options["prior"] is None else prior_shares(fitted, options["prior"]).to_json(),
            "notes": [*_notes(found, bool(close), options), *warnings_of(close)],
        }
        for text in warnings_of(close):
            click.echo(f"warning: {text}", err=True)
    record = output.with_suffix(".json")
    text = json.dumps(told, indent=1, default=str) + "\n"
    found.save(output)
    publish(record, lambda file: file.write(text.encode()), replace=True)
    click.echo(
        text.rstrip("\n") if as_json else f"{_page(told, found)}\n\n{output}: the posterior; {record}: this record"
    )


def _move(options: dict[str, Any]) -> str | None:
    chosen = [name for name in _MOVES if options[name]]
    if len(chosen) > 1:
        raise InputError("--refine and --fit-scales were both given: leave --fit-scales out")
    return chosen[0] if chosen else None


def _flag(move: str) -> str:
    return move.replace("_", "-")


def _check(networks: Path, output: Path, force: bool, options: dict[str, Any]) -> None:
    """Refuse before the work, not after it."""
    if real_path(networks) in (real_path(output), real_path(output).parent):
        raise InputError(
            f"{output} would lie among the networks and be taken for one: choose an --output outside of {networks}"
        )
    if output.suffix != ".safetensors":
        raise InputError(f"a posterior is a .safetensors file, found {output}: give --output such a name")
    for path in (output, output.with_suffix(".json")):
        check_absent(path, force)
    make_folder(output.parent)
    move = options["move"]
    if move is not None and options["data"] is None:
        raise InputError(f"--{_flag(move)} goes with --data: give both, or neither")
    if options["steps"] is not None and move is None:
        raise InputError("--steps are those of --refine or --fit-scales: give --refine too")


def _fitted(aligned: Population, known: Known, options: dict[str, Any]) -> Posterior:
    components = options["components"]
    if components is not None and components != "chains":
        if not components.isdecimal():
            raise InputError(f"expected --components to be a number or chains, found {components!r}: give chains")
        components = int(components)
    return fit(
        aligned, options["family"], rank=options["rank"], components=components, model=known.model, **options["places"]
    )


def _moved(
    fitted: Posterior, known: Known, population: Population, options: dict[str, Any], *, seed: int, show: Any
) -> Posterior:
    if options["move"] is None:
        return fitted
    model = known.runs(f"--{_flag(options['move'])}")
    given: dict[str, Any] = {"seed": seed, "progress": show, "output": _output(options), **options["places"]}
    if options["steps"] is not None:
        given["steps"] = options["steps"]
    if options["statistics"] is not None:
        given["statistics"] = _statistics(options)
    return _MOVES[options["move"]](model, fitted, population, _inputs(options["data"], options), **given)


def _inputs(source: str, options: dict[str, Any]) -> Inputs:
    return examples.read(source, limit=options["limit"], targets=False, sources=options["sources"]).inputs


def _output(options: dict[str, Any]) -> Any:
    return "values" if options["values"] else "probabilities"


def _deviations(found: Posterior) -> dict[str, float]:
    """Tensor -> root mean square of its standard deviations."""
    return {name: float(found.std[name].double().square().mean().sqrt()) for name in found.layout.names}


def _compared(
    fitted: Posterior, found: Posterior, known: Known, population: Population, options: dict[str, Any], seed: int
) -> dict[str, Any] | None:
    """Predictions of the posterior beside those of the networks, and beside as many networks as its storage holds."""
    source = options["test"] or options["data"]
    if source is None:
        return None
    model, inputs = known.runs("--test" if options["test"] else "--data"), _inputs(source, options)
    if options["test"] is None:
        inputs = some_of(inputs, EXAMPLES, seed)
    count = max(1, round(found.storage))
    populations: dict[str, Networks] = {
        "posterior": found,
        f"{count} of the networks": population[:: max(1, len(population) // count)][:count],
    }
    if found is not fitted:
        populations = {"before": fitted, **populations}
    given: dict[str, Any] = {"output": _output(options), "average": True, **options["places"]}
    goal = predict(model, population, inputs, **given)
    rows = {}
    for name, one in populations.items():
        own = predict(model, one, inputs, draws=options["draws"], seed=seed, statistics=_statistics(options), **given)
        rows[name] = (
            {"rms_difference": float((own - goal).square().mean().sqrt())}
            if options["values"]
            else {
                "agreement": float(metrics.agreement(own, goal)),
                "total_variation": float(metrics.total_variation(own, goal)),
            }
        )
    return rows


def _statistics(options: dict[str, Any]) -> Any:
    """Inputs for running statistics; False without any, because `_notes` says so."""
    source = options["statistics"] or options["data"]
    return False if source in (None, "none") else _inputs(source, options)


def _fidelity(
    found: Posterior, known: Known, population: Population, options: dict[str, Any], seed: int
) -> dict[str, Fidelity]:
    """How well draws predict what the networks predict, on the inputs that there are and around them."""
    source = options["test"] or options["data"]
    if source is None:
        return {}
    return fidelity(
        known.runs("--test" if options["test"] else "--data"),
        found,
        population,
        _inputs(source, options),
        statistics=_statistics(options),
        output=_output(options),
        draws=options["draws"],
        seed=seed,
        **options["places"],
    )


def _notes(found: Posterior, measured: bool, options: dict[str, Any]) -> list[str]:
    """What the numbers do not say."""
    notes = []
    if not measured:
        notes.append(
            "nothing was measured: give --data or --test to see whether draws predict what the networks predict"
        )
    if found.own_statistics:
        norms = f"the running statistics of {len(found.own_statistics)} norms"
        notes.append(
            f"{norms} were measured for each draw here; whoever draws from the posterior must do the same: give "
            "evaluate --statistics, or predict statistics="
            if measured and (options["statistics"] or options["data"] or "none") != "none"
            else f"{norms} are averages of the networks, and draws with them may be worthless: give --data or "
            "--statistics here, and --statistics to evaluate"
        )
    return notes


def _page(told: dict[str, Any], found: Posterior) -> str:
    parts = [f"{told['networks']:,} networks -> {str(found).removeprefix('Posterior: ')}"]
    parts.append(table([("tensor", "deviation"), *((name, short(x)) for name, x in told["deviations"].items())]))
    if rows := told["predictions"]:
        columns = list(next(iter(rows.values())))
        head = ("predictions against those of all networks", *(name.replace("_", " ") for name in columns))
        parts.append(table([head, *((name, *(f"{row[c]:.4f}" for c in columns)) for name, row in rows.items())]))
    if told["fidelity"]:
        rows = {name: {key: x for key, x in own.items() if x is not None} for name, own in told["fidelity"].items()}
        columns = [key for key in next(iter(rows.values())) if key not in ("examples", "low")]
        head = ("the posterior against all networks on", *(name.replace("_", " ") for name in columns))
        head = tuple("one network" if name == "single" else name for name in head)
        parts.append(table([head, *((name, *(f"{row[c]:.4f}" for c in columns)) for name, row in rows.items())]))
    for form in ("refined", "scaled"):
        if form in found.provenance:
            narrowing = found.provenance[form]["narrowing"]
            aim = "moved towards the predictions of the networks, so its deviations are no longer theirs"
            parts.append(f"{form}: {aim}; their median is {narrowing:.2f} of the fit's")
    if told["prior"]:
        here, chance = (100 * told["prior"][name] for name in ("total", "expected"))
        parts.append(
            f"still at the prior: {here:.1f} % of the weights; as many networks drawn from it would show {chance:.1f} %"
        )
    return "\n\n".join([*parts, *told["notes"]])
