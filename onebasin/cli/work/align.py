"""Align: the networks of a population in one basin, their companions, and a record of how far each was moved."""

import json
from pathlib import Path
from typing import Any

import click

from onebasin.alignment import Alignment, journal_of
from onebasin.alignment import align as move
from onebasin.cli import data as examples
from onebasin.cli.networks import Known, discovered, is_plain, numbered, open_networks, prepare, reference_of
from onebasin.cli.options import Architecture, check_writable, remove_before
from onebasin.cli.progress import progress_bar
from onebasin.cli.records import record_of
from onebasin.cli.tables import short, swaps
from onebasin.cli.words import COMPANIONS, INPUT_GRAMMAR
from onebasin.errors import InputError, SpecError
from onebasin.population import MANIFEST, Population, missing_shards
from onebasin.reporting import FILE, write_record
from onebasin.storage import is_taken, real_path


def align(
    *,
    networks: Path,
    output: Path,
    architecture: Architecture,
    reference: str,
    data: str | None,
    limit: int | None,
    companions: tuple[str, ...],
    force: bool,
    places: dict[str, Any],
    **options: Any,
) -> None:
    """Move the networks of POPULATION into one basin."""
    output = output if output.name not in ("", "..") else real_path(output)  # its journal and companions need a name
    check_writable(output)
    known = prepare(architecture)
    population = open_networks(networks, known)
    target = reference_of(reference, known)
    if isinstance(target, str) and len(population) < 2:
        raise InputError(
            f"{networks} holds {len(population)} network, and nothing to align it with: "
            "give more, or a --reference network"
        )
    options = {name: value for name, value in options.items() if value is not None}
    options |= _activations(known, population, data, options["by"], limit=limit, sources=options.pop("sources"))
    journal = journal_of(output)
    carried = _companions(companions, population, known, output)
    if force:
        needed = [networks, numbered(reference)[0], *(Path(text.partition("=")[2]) for text in companions)]
        for folder in (output, *(folder for _, _, folder in carried)):
            remove_before(folder, is_plain(folder), "a population", needed=needed)
        journal.unlink(missing_ok=True)
    if not journal.exists() and missing_shards(population, output) is None:
        _check_free(output, carried)
    known = discovered(known, architecture)
    _check_companions(carried, known)
    if journal.exists():
        click.echo(f"going on with the run that left {journal}", err=True)
    plain = {name: value for name, value in options.items() if isinstance(value, str | int | float)}
    facts = {"population": str(networks), "reference": reference, **plain}
    record = output / FILE

    def finish(alignment: Alignment) -> None:
        values = _values(alignment, facts)
        title = f"Alignment of {len(population):,} networks of {networks}"
        write_record(record_of("alignment", title, [], values, alignment), record)
        for kind, companion, folder in carried:
            if not folder.exists():  # else it was written before an interruption, and is whole
                alignment.carry(companion, kind).save(folder)

    try:
        with progress_bar(f"aligning {len(population):,} networks") as show:
            options |= {**places, "progress": show, "finish": finish}
            alignment = move(population, known.symmetry, reference=target, path=output, **options)
    except KeyboardInterrupt:
        click.echo(_after_interrupt(output, journal), err=True)
        raise
    click.echo(_summary(alignment, reference))
    click.echo(f"\n{output}: the aligned networks; {record}: what was done to each")


def _after_interrupt(output: Path, journal: Path) -> str:
    """A sentence about the files that an interrupted run leaves."""
    if journal.exists():
        return f"{journal} keeps what was reached; give the same command again to go on"
    if (output / MANIFEST).exists():
        return f"the aligned networks are in {output}; only {FILE} is missing"
    return "too early to have kept anything; nothing was written"


def _activations(known: Known, population: Population, data: str | None, by: str, **reading: Any) -> dict[str, Any]:
    if by == "weights":
        if data is not None:
            raise InputError("--data are examples for --by activations; weights are compared without any")
        return {}
    model = known.runs("--by activations")
    if data is None:
        raise InputError(f"--by activations runs the networks on examples: give --data, {INPUT_GRAMMAR}")
    inputs = examples.read(data, targets=False, **reading).inputs
    examples.check_fit(model, population.member(0), inputs)
    return {"model": model, "inputs": inputs}


def _companions(
    texts: tuple[str, ...], population: Population, known: Known, output: Path
) -> list[tuple[str, Population, Path]]:
    """Kind, population and folder of each companion, checked before the work: all fit, and no two share a folder."""
    companions = [_companion(text, population, known, output) for text in texts]
    kinds = [kind for kind, _, _ in companions]
    if twice := [kind for kind in dict.fromkeys(kinds) if kinds.count(kind) > 1]:
        raise InputError(
            f"found a --companion of kind {twice[0]} twice, and both would go to {output.name}-{twice[0]}: give one "
            "of each kind"
        )
    return companions


def _companion(text: str, population: Population, known: Known, output: Path) -> tuple[str, Population, Path]:
    kind, equals, path = text.partition("=")
    if not equals or kind not in COMPANIONS:
        raise InputError(f"{text!r} is no companion; expected KIND=PATH with a kind of {', '.join(COMPANIONS)}.")
    companion = open_networks(Path(path), known, finite=False)
    if len(companion) != len(population):
        raise SpecError(f"{path} holds {len(companion)} members for {len(population)} networks: give one per network")
    return kind, companion, output.with_name(f"{output.name}-{kind}")


def _check_companions(carried: list[tuple[str, Population, Path]], known: Known) -> None:
    for kind, companion, _ in carried:
        try:  # the neutral element moves nothing, but it looks at names and shapes
            known.symmetry.apply(known.symmetry.identity(), companion.member(0), kind=kind)
        except SpecError as error:
            raise SpecError(f"the companion of kind {kind} does not fit the networks: {error}") from error


def _check_free(output: Path, carried: list[tuple[str, Population, Path]]) -> None:
    """Raise where a folder exists already; called only where no interrupted run can have written it."""
    for what, folder in [("aligned networks", output), *(("companion", folder) for _, _, folder in carried)]:
        if is_taken(folder):
            raise InputError(
                f"the {what} would go to {folder}, which exists: choose another --output, or give --force to replace "
                "what an earlier align left there"
            )


def _values(alignment: Alignment, facts: dict[str, Any]) -> dict[str, Any]:
    moved = alignment.transpositions
    return {
        **facts,
        "members": len(alignment.population),
        "overlap": {"before": alignment.before, "after": alignment.objective},
        "sweeps": alignment.sweeps,
        "history": list(alignment.history),
        "residual": alignment.residual.tolist(),
        "transpositions": {
            "total": moved.total.tolist(),
            "maximum": moved.maximum,
            "expected": moved.expected,
            "spread": moved.spread,
            "spaces": _listed(moved.spaces),
            "flips": _listed(moved.flips),
        },
        "symmetry": json.loads(alignment.symmetry.to_json()),
    }


def _listed(counts: Any) -> dict[str, list[int]]:
    return {name: count.tolist() for name, count in counts.items()}


def _summary(alignment: Alignment, reference: str) -> str:
    words = {"consensus": "their consensus", "first": "the first", "medoid": "their medoid"}
    sweeps = f" in {alignment.sweeps} sweeps" if alignment.history else ""
    distances = alignment.residual
    lines = [
        f"{len(alignment.population):,} networks aligned to {words.get(reference, reference)}{sweeps}",
        f"mean overlap of two networks: {short(alignment.before)} -> {short(alignment.objective)}",
        f"squared distance to the reference: {short(float(distances.mean()))} on average, "
        f"{short(float(distances.min()))} to {short(float(distances.max()))}",
    ]
    return "\n".join([*lines, "", swaps(alignment.transpositions, alignment.symmetry)])
