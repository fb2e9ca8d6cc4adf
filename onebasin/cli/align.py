"""``onebasin align``: many networks -> the same networks in one basin, and a record of how far each was moved."""

from pathlib import Path
from typing import Any

import click

from onebasin.cli.options import architecture_options, data_options, debug, places
from onebasin.cli.words import ALIGN_SCALES, COMPANIONS, INPUT_GRAMMAR, STATISTICS


@click.command()
@click.argument("networks", metavar="POPULATION", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    help="New folder for the aligned population, with record.json inside.",
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
@click.option("--data", metavar="DATA", help=f"For activations: {INPUT_GRAMMAR}.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Only the first N examples of the data.")
@data_options
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
@click.option(
    "--force", is_flag=True, help="Begin anew: remove OUTPUT, its companions and the journal of an interrupted run."
)
@places
@debug
def align(**options: Any) -> None:
    """Move the networks of POPULATION into one basin.

    POPULATION is a folder of checkpoints, a population folder, or a file with several networks. Nothing in it is
    changed, and each network computes afterwards what it did before. An interrupted run goes on where it was when the
    same command is given again.

    \b
      onebasin align checkpoints/ -o aligned/ --model examples/digits_cnn.py:digits_cnn
      onebasin align chain/ -o aligned/ --symmetry symmetry.json --workers 2
      onebasin align means/ -o aligned/ --symmetry symmetry.json --companion std=stds/
    """  # noqa: D301 - click reads the backspace: keep these lines apart
    from onebasin.cli.work.align import align as work

    work(**options)
