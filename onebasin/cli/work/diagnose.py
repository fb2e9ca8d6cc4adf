"""Diagnose: R-hat and effective sample sizes of the chains of a population, as a table and as a record."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from onebasin.cli import data as examples
from onebasin.cli.networks import build, open_population_or_posterior
from onebasin.cli.options import Sources, check_output
from onebasin.cli.progress import progress_bar
from onebasin.cli.records import as_json as text_of_values
from onebasin.cli.records import record_of
from onebasin.errors import InputError
from onebasin.inference import MIXED, Diagnosis, chain_rows
from onebasin.inference import diagnose as judge
from onebasin.population import Population
from onebasin.reporting import write_record


def diagnose(
    *,
    model: str,
    population: Path,
    inputs: str,
    quantity: str | None,
    weights: bool,
    limit: int | None,
    sources: Sources,
    seed: int,
    output: Path | None,
    force: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Tell whether the chains of POPULATION have mixed."""
    if output is not None:
        check_output(output, force)
    network = build(model, seed)
    networks = open_population_or_posterior(population, network)
    if not isinstance(networks, Population):
        raise InputError(
            f"expected draws of chains, found a posterior in {population}, which has none: give the folder of sample"
        )
    chain_rows(networks)  # refuses chains that are too short
    every = examples.read(inputs, limit=limit, targets=False, sources=sources)
    few, taken = examples.some(every, options["examples"], seed)
    examples.check_fit(network, networks.member(0), few.inputs)
    with progress_bar(f"diagnosing {population}") as show:
        found = judge(network, networks, few.inputs, quantity=quantity, weights=weights, progress=show)
    values: dict[str, Any] = {
        "given": {"model": model, "population": str(population), "inputs": inputs},
        "chains": found.chains,
        "draws": found.draws,
        "mixed": found.mixed,
        "quantity": found.quantity,
        "functions": None if found.functions is None else asdict(found.functions),
        "weights": {name: asdict(one) for name, one in found.weights.items()},
        "notes": [taken] if taken else [],
        "reasons": list(found.reasons),
    }
    if output is not None:
        title = f"Diagnosis of {population} on {inputs}"
        write_record(record_of("diagnosis", title, [f"{_verdict(found)}.", *values["notes"]], values, found), output)
    lines = [
        str(found),
        _verdict(found),
        *([f"functions: {taken}"] if taken else []),
        *([str(output)] if output else []),
    ]
    click.echo(text_of_values(values) if as_json else "\n\n".join(lines))


def _verdict(found: Diagnosis) -> str:
    functions = found.functions
    assert functions is not None  # there are a model and inputs
    if not functions.quantities:
        return "verdict: none, because every draw computes the same"
    word = "mixed" if found.mixed else "not mixed"
    return (
        f"verdict: {word} as functions; the worst R-hat of {functions.quantities:,} outputs is "
        f"{functions.worst_rhat:.3f}, and below {MIXED} is mixed"
    )
