"""``onebasin merge``: many networks -> one, the mean of what was aligned first."""

import json
from pathlib import Path
from typing import Any

import click

from onebasin.alignment import Alignment, align, own_statistics
from onebasin.alignment import merge as average
from onebasin.cli import data as examples
from onebasin.cli.networks import Architecture, Known, architecture_options, know, open_networks, reference_of
from onebasin.cli.options import check_absent, debug, progress, progress_bar
from onebasin.cli.tables import short
from onebasin.errors import InputError
from onebasin.population import Population
from onebasin.state import State
from onebasin.storage import make_folder, write_tensors
from onebasin.symmetry import Symmetry


@click.command()
@click.argument("networks", metavar="POPULATION...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="File for the merged network, .safetensors.",
)
@architecture_options
@click.option(
    "--reference",
    default="consensus",
    show_default=True,
    metavar="WHICH",
    help="consensus, first, medoid or the path of a network, as for align; none if they are aligned already.",
)
@click.option("--shares", metavar="X,Y,...", help="Share of each network in the mean. Default: equal shares.")
@click.option(
    "--statistics",
    "--recalibrate",
    "statistics",
    metavar="DATA",
    help=f"Measure the running statistics of norms on these examples: {examples.INPUT_GRAMMAR}. Without them the "
    "merged network has the averages of the networks, and may be worthless.",
)
@click.option(
    "--repair",
    metavar="DATA",
    help="Recalibrate, and give all other units the spread that they have in the networks on these examples.",
)
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Only the first N examples.")
@examples.data_options
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
@debug
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
    """Align the networks of each POPULATION and average them.

    POPULATION is what align takes; give several, or one file per network. All become one network in one file, and
    nothing in them is changed.

    \b
      onebasin merge a.pt b.pt -o merged.safetensors --model examples/digits_cnn.py:digits_cnn
      onebasin merge checkpoints/ -o merged.safetensors --model path/to/file.py:factory --repair train.npz
      onebasin merge checkpoints/ -o merged.safetensors --model path/to/file.py:factory --statistics train.npz
      onebasin merge aligned/ -o merged.safetensors --reference none
    """  # noqa: D301 - click reads the backspace: keep these lines apart
    _check_output(output, force)
    # Networks that are only averaged need not be understood.
    known = know(architecture) if reference != "none" or architecture.given else Known(Symmetry(()), None, None)
    population = Population.concatenate([open_networks(path, known) for path in networks])
    if len(population) < 2:
        raise InputError(f"{networks[0]} holds {len(population)} network, and the mean of one is itself: give several")
    weights = _shares(shares, len(population))
    variance, data = _variance(known, **correction)
    aligned = None if reference == "none" else _align(population, known, reference)
    with progress(f"averaging {len(population):,} networks ..."):
        networks_to_average = population if aligned is None else aligned.population
        merged = average(known.model, networks_to_average, data=data, variance=variance, weights=weights)
    facts = {"networks": [str(path) for path in networks], "members": len(population), "reference": reference}
    done = None if variance == "auto" else variance
    notes = [] if done or not own_statistics(population) else ["running statistics are averages, and were not measured"]
    _write(output, merged, {**facts, "shares": weights, "variance": done, "notes": notes})
    click.echo("\n".join([_summary(len(population), aligned, done), *notes]))
    click.echo(str(output))


def _check_output(output: Path, force: bool) -> None:
    """Refuse before the work, not after it."""
    if output.suffix != ".safetensors":
        raise InputError(f"the merged network is written as .safetensors, found --output {output}: name it so")
    check_absent(output, force)
    make_folder(output.parent)


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


def _write(path: Path, state: State, facts: dict[str, Any]) -> None:
    """One network under its own names, as any reader of safetensors expects it."""
    write_tensors(path, state, {"format": "pt", "onebasin": json.dumps(facts)})


def _summary(members: int, aligned: Alignment | None, variance: str | None) -> str:
    lines = [f"{members:,} networks merged into one"]
    if aligned is None:
        lines.append("averaged as they are, without alignment")
    else:
        lines.append(f"mean overlap of two networks: {short(aligned.before)} -> {short(aligned.objective)}")
        lines.append(f"mean squared distance to the reference: {short(float(aligned.residual.mean()))}")
    words = {"recalibrate": "batch norms recalibrated", "repair": "units repaired, batch norms recalibrated"}
    return "\n".join(lines + ([words[variance]] if variance else []))
