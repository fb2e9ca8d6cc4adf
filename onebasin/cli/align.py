"""``onebasin align``: many networks -> the same networks in one basin, and a record of how far each was moved."""

import json
from pathlib import Path
from typing import Any

import click

from onebasin.alignment import ALIGN_SCALES, Alignment, journal_of
from onebasin.alignment import KINDS as STATISTICS
from onebasin.alignment import align as move
from onebasin.cli import data as examples
from onebasin.cli.networks import Architecture, Known, architecture_options, know, open_networks, reference_of
from onebasin.cli.options import debug, progress_bar
from onebasin.cli.options import places as where_it_runs
from onebasin.cli.tables import short, swaps
from onebasin.errors import InputError, SpecError
from onebasin.population import MANIFEST, Population, missing_shards
from onebasin.storage import is_taken, make_folder, publish, real_path
from onebasin.symmetry import KINDS

FORMAT = "onebasin alignment 1"
RECORD = "alignment.json"
COMPANIONS = tuple(kind for kind in KINDS if kind != "value")


@click.command()
@click.argument("networks", metavar="POPULATION", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    help="New folder for the aligned population, with alignment.json inside.",
)
@architecture_options
@click.option(
    "--reference",
    default="consensus",
    show_default=True,
    metavar="WHICH",
    help="What all are matched to. consensus: one frame for all; first: the first network; medoid: the most central "
    "one; or the path of a network, with #3 behind it for number 3 of several.",
)
@click.option(
    "--by",
    type=click.Choice(["weights", "activations"]),
    default="weights",
    show_default=True,
    help="What is compared. Activations need --model and --data.",
)
@click.option("--data", metavar="DATA", help=f"For activations: {examples.INPUT_GRAMMAR}.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Only the first N examples of the data.")
@examples.data_options
@click.option(
    "--statistic", "kind", type=click.Choice(STATISTICS), help="How activations are compared. Default: uncentred."
)
@click.option(
    "--companion",
    "companions",
    multiple=True,
    metavar="KIND=PATH",
    help=f"Move what belongs to the networks along with them, into OUTPUT-KIND. Kinds: {', '.join(COMPANIONS)}.",
)
@click.option(
    "--scale",
    type=click.Choice(ALIGN_SCALES),
    help="Scales of the result. balanced: the lightest of each; reference: those of the reference; keep: as they are. "
    "Default: reference for a network given as --reference, else balanced.",
)
@click.option(
    "--sweeps", type=click.IntRange(min=1), metavar="N", help="Largest number of sweeps of a consensus. Default: 50."
)
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    metavar="X",
    help="End when a sweep gains less than this part of the overlap. Default: 1e-3.",
)
@where_it_runs
@debug
def align(
    *,
    networks: Path,
    output: Path,
    architecture: Architecture,
    reference: str,
    data: str | None,
    limit: int | None,
    companions: tuple[str, ...],
    places: dict[str, Any],
    **options: Any,
) -> None:
    """Move the networks of POPULATION into one basin.

    POPULATION is a folder of checkpoints, a population folder, or a file with several networks. Nothing in it is
    changed, and each network computes afterwards what it did before. An interrupted run goes on where it was when the
    same command is given again.

    \b
      onebasin align checkpoints/ -o aligned/ --model examples/digits_cnn.py:digits_cnn
      onebasin align chain/ -o aligned/ --symmetry symmetry.json --workers 2
      onebasin align means/ -o aligned/ --symmetry symmetry.json --companion std=stds/
    """  # noqa: D301 - click reads the backspace: keep these lines apart
    output = output if output.name not in ("", "..") else real_path(output)  # its journal and companions need a name
    known = know(architecture)
    population = open_networks(networks, known)
    target = reference_of(reference, known)
    if isinstance(target, str) and len(population) < 2:
        raise InputError(
            f"{networks} holds {len(population)} network, and nothing to align it with: "
            "give more, or a --reference network"
        )
    options = {name: value for name, value in options.items() if value is not None}
    options |= _activations(known, data, options["by"], limit=limit, sources=options.pop("sources"))
    journal = journal_of(output)
    carried = _companions(companions, population, known, output)
    if not journal.exists() and missing_shards(population, output) is None:
        _check_free(carried)
    make_folder(output.parent)
    if journal.exists():
        click.echo(f"going on with the run that left {journal}", err=True)
    plain = {name: value for name, value in options.items() if isinstance(value, str | int | float)}
    facts = {"population": str(networks), "reference": reference, **plain}
    record = output / RECORD

    def finish(alignment: Alignment) -> None:
        text = _record(alignment, facts)
        publish(record, lambda file: file.write(text.encode()), replace=True)
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
        return f"the aligned networks are in {output}; only {RECORD} is missing"
    return "too early to have kept anything; nothing was written"


def _activations(known: Known, data: str | None, by: str, **reading: Any) -> dict[str, Any]:
    if by == "weights":
        if data is not None:
            raise InputError("--data are examples for --by activations; weights are compared without any")
        return {}
    model = known.runs("--by activations")
    if data is None:
        raise InputError(f"--by activations runs the networks on examples: give --data, {examples.INPUT_GRAMMAR}")
    return {"model": model, "inputs": examples.read(data, targets=False, **reading).inputs}


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
    try:  # the neutral element moves nothing, but it looks at names and shapes
        known.symmetry.apply(known.symmetry.identity(), companion.member(0), kind=kind)
    except SpecError as error:
        raise SpecError(f"the companion {path} does not fit the networks: {error}") from error
    return kind, companion, output.with_name(f"{output.name}-{kind}")


def _check_free(carried: list[tuple[str, Population, Path]]) -> None:
    """Raise where a companion's folder exists already; called only where no interrupted run can have written it."""
    for _, _, folder in carried:
        if is_taken(folder):
            raise InputError(
                f"the companion would go to {folder}, which exists: move it away or choose another --output"
            )


def _record(alignment: Alignment, facts: dict[str, Any]) -> str:
    moved = alignment.transpositions
    content = {
        "format": FORMAT,
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
    return json.dumps(content, indent=1) + "\n"


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
