"""Evaluate: scores of networks on data, each with its interval, as tables and as a record."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from torch import Tensor

from onebasin.cli import data as examples
from onebasin.cli.networks import build, open_population_or_posterior
from onebasin.cli.options import check_output
from onebasin.cli.progress import progress_bar
from onebasin.cli.records import as_json as text_of_values
from onebasin.cli.records import record_of
from onebasin.data import CORRUPTIONS, SEVERITIES, read_arrays, shifts
from onebasin.errors import InputError
from onebasin.evaluation import evaluate as assess
from onebasin.functional import IGNORED, kind_of_targets, without
from onebasin.posterior import Posterior
from onebasin.reporting import write_record

_GIVEN = ("likelihood", "noise", "ignore_index", "draws", "linearised", "n_resamples", "confidence_level", "bins")


def evaluate(
    *,
    model: str,
    population: Path,
    data: str,
    output: Path | None,
    force: bool,
    as_json: bool,
    places: dict[str, Any],
    **options: Any,
) -> None:
    """Evaluate the average prediction of POPULATION on DATA."""
    if output is not None:
        check_output(output, force)
    ood, reference, limit, seed = (options[name] for name in ("ood", "reference", "limit", "seed"))
    given = {name: options[name] for name in _GIVEN if options[name] is not None}
    if "noise" in given:
        given["noise"] = _noise(given["noise"])
    network = build(model, seed)
    networks = open_population_or_posterior(population, network, options["dtype"])
    other = None if reference is None else open_population_or_posterior(reference, network, options["dtype"])
    pair = examples.read_pair(data, limit, options["sources"])
    if options["statistics"] is not None:
        given["statistics"] = examples.read(
            options["statistics"], limit=limit, targets=False, sources=options["sources"]
        ).inputs
    far = None
    if ood is not None:
        far = examples.read(ood, limit=limit, targets=False, sources=options["sources"]).inputs
    given |= _shifts(options, pair[0], seed)
    if options["ood_mask"] is not None:
        given["ood_mask"] = _mask(options["ood_mask"])
    kind = kind_of_targets(pair[1], given.get("likelihood"), given.get("noise"))
    goals = without(pair[1], given.get("ignore_index"))
    first = networks.mean if isinstance(networks, Posterior) else networks.member(0)
    checked = kind == "categorical" and not bool((goals == IGNORED).any())
    examples.check_fit(network, first, *pair, loss="cross-entropy" if checked else "")
    for inputs in (far, given.get("statistics")):
        if inputs is not None:
            examples.check_fit(network, first, inputs)
    with progress_bar(f"evaluating {population}") as show:
        evaluation = assess(
            network,
            networks,
            pair,
            ood=far,
            reference=other,
            seed=seed,
            progress=show,
            **places,
            **given,
        )
    facts = {"model": model, "population": population, "data": data, "outside": ood, "reference": reference}
    facts["statistics"] = options["statistics"]
    facts |= {"shift": " ".join(options["shift"])} if options["shift"] else {}
    facts["ood_mask"] = options["ood_mask"]
    given_text = {name: None if value is None else str(value) for name, value in facts.items()}
    values = {"given": given_text, **evaluation.to_dict()}
    if output is not None:
        title = f"Evaluation of {population} on {data}"
        write_record(record_of("evaluation", title, [], values, evaluation), output)
    page = str(evaluation) if output is None else f"{evaluation}\n\n{output}"
    click.echo(text_of_values(values) if as_json else page)


def _shifts(options: dict[str, Any], inputs: Any, seed: int) -> dict[str, Any]:
    """The argument `shifted` of `evaluate`, where --shift was given."""
    if not options["shift"]:
        for name in ("image_size", "pixel_range"):
            if options[name] is not None:
                flag = name.replace("_", "-")
                raise InputError(f"--{flag} says how --shift corrupts images, found no --shift: give --shift all")
        return {}
    if not isinstance(inputs, Tensor):
        raise InputError("--shift corrupts images, found several inputs: evaluate data of one tensor")
    size = None if options["image_size"] is None else _two(options["image_size"], "x", int, "--image-size", "8x8")
    numbers = inputs[0].numel()
    if size is not None and (min(size) < 1 or numbers % (size[0] * size[1])):
        raise InputError(
            f"expected --image-size to divide the {numbers} numbers of an example, found {options['image_size']}: give "
            "the height and the width of the images, as --image-size 28x28 of 784 numbers"
        )
    ends = (0.0, 1.0)
    if options["pixel_range"] is not None:
        ends = _two(options["pixel_range"], ",", float, "--pixel-range", "0,1")
    result: dict[str, dict[int, Any]] = {}
    for text in options["shift"]:
        name, colon, level = text.partition(":")
        if colon and level not in map(str, SEVERITIES):
            raise InputError(f"expected a severity from 1 to 5 in --shift, found {text!r}: give {name}:3")
        levels = [int(level)] if colon else SEVERITIES
        names = list(CORRUPTIONS) if name == "all" else [name]
        for own, sources in shifts(inputs, names, levels, seed=seed, range=ends, size=size).items():
            result.setdefault(own, {}).update(sources)
    return {"shifted": result}


def _two(text: str, between: str, kind: Callable[[str], Any], option: str, example: str) -> Any:
    """Two numbers.

    >>> _two("8x9", "x", int, "--image-size", "8x8")
    (8, 9)
    """
    try:
        first, second = map(kind, text.split(between))
    except ValueError as error:
        raise InputError(f"expected two numbers in {option}, as {example}, found {text!r}") from error
    return first, second


def _mask(path: Path) -> Tensor:
    """The array called mask of a file."""
    found = read_arrays(path, ("mask",).__contains__)
    if "mask" not in found:
        raise InputError(f"expected an array called mask in {path}, found none: save it as numpy.savez(path, mask=...)")
    return found["mask"].bool()


def _noise(text: str) -> float | str:
    """A standard deviation, or the word learned.

    >>> _noise("0.5"), _noise("learned")
    (0.5, 'learned')
    """
    try:
        return "learned" if text == "learned" else float(text)
    except ValueError as error:
        raise InputError(f"expected --noise to be a number or learned, found {text!r}: give 0.1") from error
