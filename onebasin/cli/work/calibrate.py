"""Calibrate: networks or a posterior with a scaling folded into the last layer, and scores before and after."""

from pathlib import Path
from typing import Any

import click

from onebasin.cli import data as examples
from onebasin.cli.networks import build, is_plain, open_population_or_posterior
from onebasin.cli.options import check_output, check_writable, remove_before
from onebasin.cli.progress import progress_bar
from onebasin.cli.records import as_json as text_of_values
from onebasin.cli.records import record_of
from onebasin.errors import InputError
from onebasin.evaluation import Calibration
from onebasin.evaluation import calibrate as fit
from onebasin.posterior import Networks, Posterior
from onebasin.reporting import FILE, write_record
from onebasin.storage import is_taken

_GIVEN = ("per", "ridge", "likelihood", "draws", "n_resamples")


def calibrate(
    *,
    model: str,
    population: Path,
    data: str,
    method: str,
    output: Path | None,
    force: bool,
    as_json: bool,
    places: dict[str, Any],
    **options: Any,
) -> None:
    """Calibrate POPULATION on DATA."""
    if output is not None and (method == "isotonic" or options["per"] == "average"):
        raise InputError(
            f"--output is for networks, and no weights can hold {method} per average: leave --output out, or choose "
            "--method temperature --per population"
        )
    given = {name: options[name] for name in _GIVEN if options[name] is not None}
    network = build(model, options["seed"])
    networks = open_population_or_posterior(population, network, options["dtype"])
    if isinstance(networks, Posterior) is False and options["draws"] is not None:
        raise InputError("--draws is the number of networks from a posterior, found a population: leave it out")
    if output is not None:
        _check(networks, population, output, force)
    pair = examples.read_pair(data, options["limit"], options["sources"])
    first = networks.mean if isinstance(networks, Posterior) else networks.member(0)
    examples.check_fit(network, first, *pair, loss="" if options["likelihood"] == "bernoulli" else "cross-entropy")
    if options["statistics"] is not None:
        given["statistics"] = examples.read(
            options["statistics"], limit=options["limit"], targets=False, sources=options["sources"]
        ).inputs
        examples.check_fit(network, first, given["statistics"])
    with progress_bar(f"calibrating {population}") as show:
        found = fit(
            network, networks, pair, method, folds=options["folds"], seed=options["seed"], progress=show, **places,
            **given,
        )  # fmt: skip
    facts = {"model": model, "population": str(population), "data": data, "output": output and str(output)}
    facts["statistics"] = options["statistics"]
    values = {"given": facts, **found.to_dict()}
    if output is not None:
        _write(found, output, values, f"Calibration of {population} on {data}")
    page = str(found) if output is None else f"{found}\n\n{output}"
    click.echo(text_of_values(values) if as_json else page)


def _check(networks: Networks, population: Path, output: Path, force: bool) -> None:
    """Raise before the work where the output is taken or of the wrong kind."""
    if isinstance(networks, Posterior):
        check_output(output, force, suffix=".safetensors")
        check_output(output.with_suffix(".json"), force)
        return
    if output.suffix == ".safetensors":
        raise InputError(f"{population} holds networks, found --output {output}: give the name of a folder")
    check_writable(output)
    if force:
        remove_before(output, is_plain(output), "a population", needed=[population])
    if is_taken(output):
        raise InputError(f"{output} exists: choose another --output, or give --force to replace a population")


def _write(found: Calibration, output: Path, values: dict[str, Any], title: str) -> None:
    if found.networks is None or isinstance(found.networks, dict):
        raise InputError(f"nothing was written, for {found.why}: leave --output out to see the scores")
    found.networks.save(output)
    record = output.with_suffix(".json") if isinstance(found.networks, Posterior) else output / FILE
    write_record(record_of("calibration", title, [], values, found), record)
