"""Merge: the mean of aligned networks, as one file."""

import json
from pathlib import Path
from typing import Any

import click

from onebasin.alignment import Alignment, align, own_statistics
from onebasin.alignment import merge as average
from onebasin.cli import data as examples
from onebasin.cli.networks import Known, discovered, open_networks, prepare, reference_of
from onebasin.cli.options import Architecture, check_output, check_writable
from onebasin.cli.pretrained import check_free, write_pretrained
from onebasin.cli.progress import progress, progress_bar
from onebasin.cli.records import record_of
from onebasin.cli.tables import short
from onebasin.errors import InputError
from onebasin.population import Population, is_pretrained
from onebasin.reporting import FILE, write_record
from onebasin.storage import write_tensors
from onebasin.symmetry import Symmetry


def merge(
    *,
    networks: tuple[Path, ...],
    output: Path,
    architecture: Architecture,
    reference: str,
    shares: str | None,
    force: bool,
    **correction: Any,
) -> None:
    """Align the networks of each POPULATION and average them."""
    folder = is_pretrained(networks[0]) and output.suffix != ".safetensors"
    if folder:
        check_free(output, force)
        check_writable(output)
    else:
        check_output(output, force, suffix=".safetensors")
        check_output(output.with_suffix(".json"), force)
    # Networks that are only averaged need not be understood.
    given = reference != "none" or architecture.given
    known = Known(Symmetry(()), None, None, architecture.dtype)
    known = prepare(architecture, networks[0]) if given else known
    population = Population.concatenate([open_networks(path, known) for path in networks])
    if len(population) < 2:
        raise InputError(f"{networks[0]} holds {len(population)} network, and the mean of one is itself: give several")
    weights = _shares(shares, len(population))
    variance, data = _variance(known, **correction)
    if data is not None:
        examples.check_fit(known.runs("merge"), population.member(0), data[0])
    known = discovered(known, architecture) if given else known
    aligned = None if reference == "none" else _align(population, known, reference)
    with progress(f"averaging {len(population):,} networks"):
        networks_to_average = population if aligned is None else aligned.population
        merged = average(known.model, networks_to_average, data=data, variance=variance, weights=weights)
    facts: dict[str, Any] = {
        "networks": [str(path) for path in networks],
        "members": len(population),
        "reference": reference,
    }
    done = None if variance == "auto" else variance
    notes = [] if done or not own_statistics(population) else ["running statistics are averages, and were not measured"]
    facts |= {"shares": weights, "variance": done, "notes": notes}
    if folder:
        write_pretrained(output, merged, networks[0], facts)
    else:
        write_tensors(output, merged, {"format": "pt", "onebasin": json.dumps(facts)})  # as any reader expects it
    lines = [*_summary(len(population), aligned, done).splitlines(), *notes]
    values = dict(facts)
    if aligned is not None:
        values["overlap"] = {"before": aligned.before, "after": aligned.objective}
    title = f"Merging of {len(population):,} networks"
    record = record_of("merging", title, [f"{line}." for line in lines], values)
    write_record(record, output / FILE if folder else output.with_suffix(".json"))
    click.echo("\n".join(lines))
    click.echo(str(output))


def _shares(text: str | None, members: int) -> list[float] | None:
    if text is None:
        return None
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if len(found) != members:
        raise InputError(f"expected {members} numbers in --shares, one per network, as in 1,2,1; found {text!r}")
    return found


def _variance(known: Known, statistics: str | None, repair: str | None, **reading: Any) -> tuple[str, Any]:
    """Arguments `variance` and `data` of `ob.merge`."""
    if statistics is None and repair is None:
        return "auto", None  # warns where there are statistics
    if statistics is not None and repair is not None:
        raise InputError("--repair measures statistics too: give only one of --repair and --statistics")
    kind, source = ("repair", repair) if repair is not None else ("recalibrate", statistics)
    assert source is not None
    known.runs("--repair" if repair is not None else "--statistics")
    return kind, (examples.read(source, targets=False, **reading).inputs, None)


def _align(population: Population, known: Known, reference: str) -> Alignment:
    target = reference_of(reference, known)
    with progress_bar(f"aligning {len(population):,} networks") as show:
        return align(population, known.symmetry, reference=target, progress=show)


def _summary(members: int, aligned: Alignment | None, variance: str | None) -> str:
    lines = [f"{members:,} networks merged into one"]
    if aligned is None:
        lines.append("averaged as they are, without alignment")
    else:
        lines.append(f"mean overlap of two networks: {short(aligned.before)} -> {short(aligned.objective)}")
        lines.append(f"mean squared distance to the reference: {short(float(aligned.residual.mean()))}")
    words = {"recalibrate": "batch norms recalibrated", "repair": "units repaired, batch norms recalibrated"}
    return "\n".join(lines + ([words[variance]] if variance else []))
