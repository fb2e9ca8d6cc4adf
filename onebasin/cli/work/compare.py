"""Compare: distances and barriers of two networks, discrepancies of two populations, up to their symmetries."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from click.core import ParameterSource
from torch import Tensor

from onebasin.alignment import (
    BlockLayout,
    Match,
    Transpositions,
    barrier_report,
    match,
    transpositions,
    weights_of,
)
from onebasin.cli import data as examples
from onebasin.cli.data import Examples
from onebasin.cli.networks import Known, discovered, numbered, one_network, open_networks, posterior_in, prepare
from onebasin.cli.options import PLACES, Architecture, check_output
from onebasin.cli.progress import progress, progress_bar
from onebasin.cli.records import as_json as text_of_values
from onebasin.cli.records import record_of
from onebasin.cli.tables import chance, short, swaps
from onebasin.errors import InputError, StorageError
from onebasin.evaluation import Discrepancy, discrepancy
from onebasin.functional import Bound, answers, call_arguments, examples_in, loss_of_targets
from onebasin.metrics import agreement, total_variation
from onebasin.population import Population, is_there
from onebasin.posterior import Posterior, distance, predict
from onebasin.reporting import table, write_record
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
        return {"discrepancy": self.report.to_dict(), "examples": self.examples, **predictive}

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
    if options.get("quantity") == "values" or answer.dim() != 2 or answer.shape[1] < 2:
        return found
    execution = {name: options[name] for name in ("workers", "executor", "progress") if name in options}
    first, second = (predict(model, population, inputs, average=True, **execution) for population in (a, b))
    return PopulationComparison(
        report, found.examples, float(agreement(first, second)), float(total_variation(first, second))
    )


_OF_PAIRS = {name: f"--{name}" for name in ("scale", "restarts", "test", "loss", "points")}
_OF_POPULATIONS = {"normal_forms": "--normal-form", "preset": "--preset", "values": "--values"}
_OF_PLACES = {name: f"--{name}" for name in PLACES}
_OF_DATA = {name: f"--{name}" for name in ("test", "limit", "examples", "loss", "points", "values")}
_MEANING = {
    "already aligned": "No order or sign of its units brings B closer to A",
    "moved": "In another disguise B has clearly more overlap with A than unrelated networks",
    "partly alike": "B is not A in another disguise, and not unrelated to it either",
    "independent": "In its best disguise B has no more overlap with A than unrelated networks may have by chance",
}


def compare(
    *,
    first: str,
    second: str,
    architecture: Architecture,
    output: Path | None,
    force: bool,
    as_json: bool,
    **measured: Any,
) -> None:
    """Compare networks, or two populations of networks, A and B up to their symmetries."""
    if output is not None:
        check_output(output, force)
    if measured["data"] is None:
        _check_not_given(_OF_DATA, "goes with --data, which is not given")
    if measured["points"] % 2 == 0:
        raise InputError(
            f"expected an odd number of --points, found {measured['points']}: one of them must be in the middle"
        )
    known = prepare(architecture, Path(first))
    names = (first, second)
    posteriors = [posterior_in(Path(text), known) for text in names]
    populations = [None, None] if any(posteriors) else [several(text, known) for text in names]
    if any(posteriors):
        numbers, page, results = _posteriors(known, names, posteriors, architecture)
    elif populations[0] is not None and populations[1] is not None:
        _check_not_given(_OF_PAIRS, "is for two networks, and A and B are populations")
        numbers, page, results = _populations(known, names, (populations[0], populations[1]), architecture, measured)
    else:
        a, b = (one_network(name, known) for name in names)
        _check_not_given({**_OF_POPULATIONS, **_OF_PLACES}, "is for two populations, and A and B are single networks")
        numbers, page, results = _networks(known, names, (a, b), architecture, measured)
    if output is not None:
        answer = f"{numbers['meaning']}." if "meaning" in numbers else f"{first} was compared with {second}."
        write_record(record_of("comparison", f"Comparison of {first} with {second}", answer, numbers, *results), output)
    click.echo(text_of_values(numbers) if as_json else page + ("" if output is None else f"\n\n{output}"))


def _check_not_given(options: Mapping[str, str], why: str) -> None:
    """Refuse those of the options (name -> flag) that were given."""
    context = click.get_current_context()
    given = [
        flag for name, flag in options.items() if context.get_parameter_source(name) is not ParameterSource.DEFAULT
    ]
    if given:
        raise InputError(f"{given[0]} {why}: leave {given[0]} out")


def _posteriors(
    known: Known, names: tuple[str, str], posteriors: Sequence[Posterior | None], architecture: Architecture
) -> tuple[dict[str, Any], str, list[object]]:
    """Numbers for JSON, a page for people, and results of the library."""
    options = {**_OF_PAIRS, **_OF_POPULATIONS, **_OF_PLACES, **_OF_DATA, "data": "--data"}
    _check_not_given(options, "is for networks, and A or B is a posterior")
    p, q = posteriors
    if p is None or q is None:
        one, other = names if q is None else names[::-1]
        raise InputError(
            f"expected two posteriors or two of networks, found the posterior {one} and networks {other}: fit a "
            f"posterior to {other} with onebasin compact"
        )
    known = discovered(known, architecture)
    with progress(f"comparing {names[0]} with {names[1]}"):
        found = distance(p, q, known.symmetry, generator=torch.Generator().manual_seed(architecture.seed))
    numbers = {"a": names[0], "b": names[1], "distance": found.to_dict()}
    return numbers, f"A  {names[0]}\nB  {names[1]}\n\n{found}", [found]


def _populations(
    known: Known,
    names: tuple[str, str],
    populations: tuple[Population, Population],
    architecture: Architecture,
    measured: dict[str, Any],
) -> tuple[dict[str, Any], str, list[object]]:
    """Numbers for JSON, a page for people, and results of the library."""
    data, taken = _read("--data", measured["data"], known, populations[0].member(0), architecture.seed, measured)
    options: dict[str, Any] = {
        "normal_forms": list(measured["normal_forms"]),
        "preset": measured["preset"],
        "seed": architecture.seed,
        **measured["places"],
    }
    if measured["values"]:
        options["quantity"] = "values"
    known = discovered(known, architecture)
    with progress_bar(f"comparing {names[0]} with {names[1]}") as show:
        found = compare_populations(known, *populations, data, progress=show, **options)
    numbers = {"a": names[0], "b": names[1], **found.told(), "notes": taken}
    return numbers, "\n\n".join([f"A  {names[0]}\nB  {names[1]}", str(found), *taken]), [found.report]


def _networks(
    known: Known,
    names: tuple[str, str],
    networks: tuple[State, State],
    architecture: Architecture,
    measured: dict[str, Any],
) -> tuple[dict[str, Any], str, list[object]]:
    """Numbers for JSON, a page for people, and results of the library."""
    a, b = networks
    train, taken = _read("--data", measured["data"], known, a, architecture.seed, measured, targets=True)
    test, more = _read("--test", measured["test"], known, a, architecture.seed, measured, targets=True)
    notes = [*taken, *more]
    known = discovered(known, architecture)
    with progress_bar(f"comparing {names[0]} with {names[1]}") as show:
        barrier = None
        if train is not None:
            barrier = barrier_report(
                known.runs("--data"),
                a,
                b,
                known.symmetry,
                train.pair,
                None if test is None else test.pair,
                points=measured["points"],
                loss=measured["loss"] or loss_of_targets(train.pair[1]),
                progress=show,
            )
        show(0, 2, "moving B onto A")
        scale, restarts = measured["scale"], measured["restarts"]
        result = match(a, b, known.symmetry, restarts=restarts, seed=architecture.seed, scale=scale)
        show(1, 2, "moving unrelated networks")
        fall = None if barrier is None else barrier.moved
        numbers = {"a": names[0], "b": names[1], "scale": scale, **_numbers(result, known, a, b, fall)}
    page = [_page(numbers, result.element, known.symmetry)]
    if barrier is not None:
        numbers["barrier"] = {**json.loads(barrier.to_json()), "notes": notes}
        page += [f"barrier on the straight path from A to B, with one more correction in each row\n\n{barrier}", *notes]
    return numbers, "\n\n".join(page), [result, barrier]


def _read(
    option: str,
    source: str | None,
    known: Known,
    network: State,
    seed: int,
    measured: dict[str, Any],
    *,
    targets: bool = False,
) -> tuple[Examples | None, list[str]]:
    """The examples that an option names, which fit the network, and a sentence if they are only a part."""
    if source is None:
        return None, []
    every = examples.read(source, limit=measured["limit"], targets=targets, sources=measured["sources"])
    few, taken = examples.some(every, measured["examples"], seed)
    loss = "" if few.targets is None else measured["loss"] or loss_of_targets(few.targets)
    examples.check_fit(known.runs(option), network, few.inputs, few.targets, loss)
    return few, [f"{option}: {taken}"] if taken else []


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
