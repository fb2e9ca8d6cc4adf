"""``onebasin compare``: two networks, or populations -> how much of their difference is only a symmetry."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import click
import torch
from click.core import ParameterSource
from torch import Tensor

from onebasin.alignment import (
    FORM,
    MATCH_SCALES,
    BarrierReport,
    BlockLayout,
    Match,
    Transpositions,
    barrier_report,
    match,
    transpositions,
    weights_of,
)
from onebasin.cli import data as examples
from onebasin.cli.data import Examples, loss_option
from onebasin.cli.networks import Architecture, Known, architecture_options, know, numbered, one_network, open_networks
from onebasin.cli.options import PLACES, debug, progress
from onebasin.cli.options import places as where_it_runs
from onebasin.cli.tables import chance, short, swaps
from onebasin.errors import InputError, StorageError
from onebasin.evaluation import PRESETS, Discrepancy, discrepancy
from onebasin.functional import Bound, answers, call_arguments, examples_in, loss_of_targets
from onebasin.metrics import agreement, total_variation
from onebasin.population import Population, is_there
from onebasin.posterior import predict
from onebasin.reporting import table
from onebasin.state import State, flatten
from onebasin.symmetry import Element, Space, Symmetry


@dataclass(frozen=True, eq=False)
class PopulationComparison:
    """Two populations, compared.

    Attributes:
        report: distances and MMD of weights and, with data, of functions.
        examples: number of examples; 0 without data.
        agreement: share of examples for which the average predictives have the same class; None without classes.
        total_variation: mean total variation of the average predictives; None without classes.
    """

    report: Discrepancy
    examples: int = 0
    agreement: float | None = None
    total_variation: float | None = None

    def told(self) -> dict[str, Any]:
        """Plain numbers for JSON."""
        predictive = {"agreement": self.agreement, "total_variation": self.total_variation}
        return {"discrepancy": self.report.as_dict(), "examples": self.examples, **predictive}

    def __str__(self) -> str:
        """Tables for people."""
        rows = [("mean squared distance", "within A", "within B", "A to B")]
        rows += [
            (form, short(found.within_first), short(found.within_second), short(found.across))
            for form, found in {"raw": self.report.raw, **self.report.normal_forms}.items()
        ]
        parts = [table(rows), str(self.report)]
        if self.agreement is not None and self.total_variation is not None:
            parts.append(
                f"average predictives on {self.examples:,} examples: agreement {self.agreement:.4f}, "
                f"total variation {self.total_variation:.4f}"
            )
        return "\n\n".join(parts)


def several(text: str, known: Known) -> Population | None:
    """The networks under a path that holds more than one; None for one network, or for PATH#3.

    Raises:
        StorageError: there is no such path.
    """
    path, number = numbered(text)
    if not is_there(path):
        raise StorageError(f"expected networks at {text}, found no such file or folder: correct the path")
    if number is not None:
        return None
    networks = open_networks(path, known)
    return networks if len(networks) > 1 else None


def compare_populations(
    known: Known, a: Population, b: Population, data: Examples | None = None, **options: Any
) -> PopulationComparison:
    """Compare two populations.

    Args:
        known: their symmetry and, where it was given, their model.
        a: one population.
        b: the other.
        data: inputs on which to compare what they compute; targets are not looked at.
        **options: of `discrepancy`: `normal_forms`, `preset`, `output`, `permutations`, `seed`, `workers`, ...
    """
    if data is None:
        return PopulationComparison(discrepancy(a, b, symmetry=known.symmetry, **options))
    model, inputs = known.runs("--data"), data.inputs
    report = discrepancy(a, b, symmetry=known.symmetry, model=model, inputs=inputs, **options)
    found = PopulationComparison(report, examples_in(inputs))
    answer = answers(model, a.member(0), inputs)
    if options.get("output") == "values" or answer.dim() != 2 or answer.shape[1] < 2:
        return found
    execution = {name: options[name] for name in ("workers", "executor") if name in options}
    first, second = (predict(model, population, inputs, average=True, **execution) for population in (a, b))
    return PopulationComparison(
        report, found.examples, float(agreement(first, second)), float(total_variation(first, second))
    )


_OF_PAIRS = {name: f"--{name}" for name in ("scale", "restarts", "test", "loss", "points")}
_OF_POPULATIONS = {"normal_forms": "--form", "preset": "--preset", "values": "--values"}
_OF_PLACES = {name: f"--{name}" for name in PLACES}
_OF_DATA = {name: f"--{name}" for name in ("test", "limit", "loss", "points", "values")}
_MEANING = {
    "already aligned": "No order or sign of its units brings B closer to A",
    "moved": "In another disguise B has clearly more overlap with A than unrelated networks",
    "partly alike": "B is not A in another disguise, and not unrelated to it either",
    "independent": "In its best disguise B has no more overlap with A than unrelated networks may have by chance",
}


@click.command()
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@architecture_options
@click.option(
    "--scale",
    type=click.Choice(MATCH_SCALES),
    default="reference",
    show_default=True,
    help="reference: B gets the scales of A; keep: it keeps its own.",
)
@click.option(
    "--restarts",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    show_default=True,
    help="Further searches from random places; the best is kept.",
)
@click.option(
    "--data",
    metavar="DATA",
    help=f"Also measure the barrier between A and B on these examples: {examples.GRAMMAR}.",
)
@click.option("--test", metavar="DATA", help="And on these, which correct nothing.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Only the first N examples of each file.")
@examples.data_options
@loss_option
@click.option(
    "--points", type=click.IntRange(min=3), default=25, metavar="N", show_default=True, help="On the path; odd."
)
@click.option(
    "--form",
    "normal_forms",
    multiple=True,
    default=(FORM,),
    metavar="FORM",
    show_default=True,
    help="For populations: how symmetries are removed, SCALE/ORDER as in balanced/norm, or aligned; unit-norm/max is "
    "that of paper 2. Repeat it for several.",
)
@click.option(
    "--preset",
    type=click.Choice(list(PRESETS)),
    default="median",
    show_default=True,
    help="Of populations: kernels and bandwidths of the MMD.",
)
@click.option(
    "--values", is_flag=True, help="Of populations: outputs are values, as in a regression, and not scores of classes."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables, and nothing else.")
@where_it_runs
@debug
def compare(
    *,
    first: str,
    second: str,
    architecture: Architecture,
    scale: str,
    restarts: int,
    as_json: bool,
    **measured: Any,
) -> None:
    """Compare networks, or two populations of networks, A and B up to their symmetries.

    How much of their difference is only a disguise? B is moved onto A as closely as permutations, signs and scales
    allow, which does not change what it computes. A and B are files with one network each; PATH#3 is number 3 of
    several.

    The verdict is one of: already aligned; moved; partly alike; independent. The last three compare with unrelated
    networks of the same sizes: the search is repeated on three copies of B whose weights have changed places at random
    within each tensor, which takes three times as long as the comparison itself. B is moved if it has
    5 % more overlap than they have on average, and at least 4 of their spreads; partly alike if it has 3 % more and 8
    spreads. With --data the barrier counts as well: networks whose barrier falls below half when B is moved are not
    called independent.

    Where A and B hold several networks each, the two populations are compared: mean distances and the squared MMD of
    their weights, as they are and without symmetries, with a p-value; with --data also the MMD of their predictions,
    and agreement and total variation of their average predictives. Several outputs are taken for classes; --values
    compares those of a regression as they are.

    \b
      onebasin compare a.pt b.pt --model examples/digits_cnn.py:digits_cnn
      onebasin compare a.pt b.pt --model path/to/file.py:factory --data train.npz --test test.npz
      onebasin compare chain/#0 chain/#999 --symmetry symmetry.json --json
      onebasin compare chain/ ensemble/ --symmetry symmetry.json --form balanced/max --form aligned
    """  # noqa: D301 - click reads the backspace: keep these lines apart
    known = know(architecture)
    populations = [several(text, known) for text in (first, second)]
    if measured["data"] is None:
        _check_not_given(_OF_DATA, "goes with --data, which is not given")
    if populations[0] is not None and populations[1] is not None:
        _check_not_given(_OF_PAIRS, "is for two networks, and A and B are populations")
        _compare_populations(
            known, (first, second), (populations[0], populations[1]), as_json, architecture.seed, measured
        )
        return
    a, b = one_network(first, known), one_network(second, known)
    _check_not_given({**_OF_POPULATIONS, **_OF_PLACES}, "is for two populations, and A and B are single networks")
    measured = {name: value for name, value in measured.items() if name not in (*_OF_POPULATIONS, "places")}
    with progress(f"comparing {first} with {second} ..."):
        barrier = _barrier(known, a, b, **measured)
        result = match(a, b, known.symmetry, restarts=restarts, seed=architecture.seed, scale=scale)
        fall = None if barrier is None else barrier.moved
        numbers = {"a": first, "b": second, "scale": scale, **_numbers(result, known, a, b, fall)}
    if barrier is not None:
        numbers["barrier"] = json.loads(barrier.to_json())
    if as_json:
        click.echo(json.dumps(numbers, indent=1))
        return
    click.echo(_page(numbers, result.element, known.symmetry))
    if barrier is not None:
        click.echo(f"\nbarrier on the straight path from A to B, with one more correction in each row\n\n{barrier}")


def _check_not_given(options: Mapping[str, str], why: str) -> None:
    """Refuse those of the options (name -> flag) that were given."""
    context = click.get_current_context()
    given = [
        flag for name, flag in options.items() if context.get_parameter_source(name) is not ParameterSource.DEFAULT
    ]
    if given:
        raise InputError(f"{given[0]} {why}: leave {given[0]} out")


def _compare_populations(
    known: Known,
    names: tuple[str, str],
    populations: tuple[Population, Population],
    as_json: bool,
    seed: int,
    measured: dict[str, Any],
) -> None:
    source = measured["data"]
    data = None
    if source is not None:
        data = examples.read(source, limit=measured["limit"], targets=False, sources=measured["sources"])
    with progress(f"comparing {names[0]} with {names[1]} ..."):
        options: dict[str, Any] = {
            "normal_forms": list(measured["normal_forms"]),
            "preset": measured["preset"],
            "seed": seed,
        }
        options |= measured["places"]
        if measured["values"]:
            options["output"] = "values"
        found = compare_populations(known, *populations, data, **options)
    told = {"a": names[0], "b": names[1], **found.told()}
    click.echo(json.dumps(told, indent=1) if as_json else f"A  {names[0]}\nB  {names[1]}\n\n{found}")


def _barrier(
    known: Known, a: State, b: State, data: str | None, test: str | None, **measured: Any
) -> BarrierReport | None:
    limit, loss, points, sources = (measured[name] for name in ("limit", "loss", "points", "sources"))
    if data is None:
        return None
    if points % 2 == 0:
        raise InputError(f"expected an odd number of --points, found {points}: one of them must be in the middle")
    model = known.runs("--data")
    train = examples.read_pair(data, limit, sources)
    held_out = None if test is None else examples.read_pair(test, limit, sources)
    loss = loss or loss_of_targets(train[1])
    return barrier_report(model, a, b, known.symmetry, train, held_out, points=points, loss=loss)


def _numbers(result: Match, known: Known, a: State, b: State, fall: tuple[float, float] | None) -> dict[str, Any]:
    """Everything but the barrier, for JSON; `fall` is what moving B makes of it."""
    symmetry = known.symmetry
    names = weights_of(BlockLayout.of(symmetry))
    still, before, after = (
        flatten({name: state[name] for name in names}).double() for state in (a, b, symmetry.apply(result.element, b))
    )
    moved = transpositions(result.element, symmetry)
    verdict = result.judged(fall)
    limits = verdict.thresholds
    unrelated = None if limits is None else {"mean": result.null[0], "spread": result.null[1]}
    error, trouble = _function_error(known, b, result.element)
    return {
        "verdict": verdict.word,
        "meaning": _MEANING[verdict.word],
        "reason": verdict.reason,
        "unrelated_overlap": unrelated,
        "thresholds": None if limits is None else dict(zip(("partly alike", "moved"), limits, strict=True)),
        "squared_distance": {"before": result.distance_before, "after": result.distance_after},
        "overlap": {"before": float(still @ before), "after": float(still @ after)},
        "cosine": {"before": _cosine(still, before), "after": _cosine(still, after)},
        "objective": {"before": result.before, "after": result.after},
        "search": {"iterations": result.iterations, "sweeps": result.sweeps, "gap": result.gap, "exact": result.exact},
        "transpositions": {
            **{"total": int(moved.total), "maximum": moved.maximum},
            **{"expected": moved.expected, "spread": moved.spread},
            "spaces": {space.name: _counts(space, moved) for space in symmetry.spaces},
        },
        "function_error": error,
        "function_not_checked": trouble,
    }


def _counts(space: Space, moved: Transpositions) -> dict[str, float | None]:
    """How far the units of one space were moved, beside what chance gives."""
    mean, spread = chance(space) if space.permutable else (None, None)
    swapped, flipped = moved.spaces.get(space.name), moved.flips.get(space.name)
    return {
        **{"units": space.size, "copies": space.copies, "expected": mean, "spread": spread},
        "swaps": None if swapped is None else int(swapped),
        "flips": None if flipped is None else int(flipped),
    }


def _cosine(a: Tensor, b: Tensor) -> float:
    norms = float(a.norm() * b.norm())
    return float(a @ b) / norms if norms else 0.0


def _function_error(known: Known, b: State, element: Element) -> tuple[float | None, str | None]:
    """Largest change of an output of B relative to the largest output, in float64; or why it was not looked at."""
    if known.model is None or known.inputs is None:
        return None, "there is no model with an example input; give --model and --input"
    wide = {name: value.double() if value.is_floating_point() else value for name, value in b.items()}
    call = call_arguments(known.inputs)
    try:
        before = Bound(known.model, wide)(call)
        after = Bound(known.model, known.symmetry.apply(element, wide))(call)
    except InputError as error:  # a model with several outputs, or one that insists on its own precision
        return None, str(error)
    if not bool(torch.isfinite(before).all()):
        return None, "outputs for the example input are not finite; give another --input"
    return float((after - before).abs().max() / before.abs().max().clamp_min(1e-300)), None


def _page(numbers: dict[str, Any], element: Element, symmetry: Symmetry) -> str:
    keys = [("squared distance", "squared_distance"), ("overlap", "overlap"), ("cosine", "cosine")]
    if symmetry.dimensions and numbers["scale"] == "reference":
        keys.append(("overlap, lightest scales", "objective"))
    rows = [(name, short(numbers[key]["before"]), short(numbers[key]["after"])) for name, key in keys]
    error = numbers["function_error"]
    function = (
        f"not checked: {numbers['function_not_checked']}"
        if error is None
        else f"largest relative change {error:.1e}, in float64 on the example input"
    )
    return "\n\n".join(
        [
            f"A  {numbers['a']}\nB  {numbers['b']}",
            table([("", "as given", "B moved"), *rows]),
            swaps(transpositions(element, symmetry), symmetry),
            f"verdict: {numbers['verdict']}. {numbers['meaning']}\nbecause: {numbers['reason']}\n"
            f"function of B: {function}",
        ]
    )
