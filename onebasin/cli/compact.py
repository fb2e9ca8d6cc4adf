"""``onebasin compact``: many networks -> one posterior in the space of a few, and a record of what it keeps."""

from pathlib import Path
from typing import Any

import click

from onebasin.cli.options import architecture_options, data_options, debug, examples_option, force_option, places
from onebasin.cli.words import FAMILIES, INPUT_GRAMMAR


@click.command()
@click.argument("networks", metavar="POPULATION", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="File of the posterior, .safetensors; the record goes beside it, with .json for its ending.",
)
@architecture_options
@click.option(
    "--family", type=click.Choice(FAMILIES), default="diagonal", show_default=True, help="Family of densities."
)
@click.option("--rank", type=click.IntRange(min=1), metavar="N", help="Directions of a low-rank family.")
@click.option("--components", metavar="N", help="Of a mixture: a number, or chains for one component per chain.")
@click.option("--raw", is_flag=True, help="Take the networks as they are, without moving them into one basin first.")
@click.option(
    "--data",
    metavar="DATA",
    help="Unlabelled inputs, such as those of training: for --refine and --fit-scales, for running statistics, and to "
    f"measure the agreement on if there are no others: {INPUT_GRAMMAR}.",
)
@click.option(
    "--test",
    metavar="DATA",
    help="Held-out inputs: compare the predictions of the posterior with those of the networks on them, not on --data.",
)
@click.option(
    "--statistics",
    metavar="DATA",
    help="Inputs on which the running statistics of norms are measured for each draw. Default: those of --data. The "
    "word none leaves them at the averages of the networks; refined like this, a posterior is drawn without data.",
)
@click.option(
    "--refine",
    is_flag=True,
    help="Move means and deviations until draws predict what the networks predict on --data. Where that takes more "
    "than two minutes, a note tells how long, and quicker settings.",
)
@click.option("--fit-scales", is_flag=True, help="The same with only one width and one gain for each tensor.")
@click.option("--values", is_flag=True, help="The model gives values, not logits of classes.")
@click.option(
    "--steps", type=click.IntRange(min=1), metavar="N", help="Steps of --refine (3000) or --fit-scales (300)."
)
@click.option(
    "--draws-per-step",
    type=click.IntRange(min=2),
    metavar="N",
    help="Networks in a step of --refine or --fit-scales (64); its time is in proportion, fewer are noisier.",
)
@click.option("--batch", type=click.IntRange(min=1), metavar="N", help="Examples in a step (250); as --draws-per-step.")
@click.option(
    "--draws",
    type=click.IntRange(min=2),
    default=100,
    metavar="N",
    show_default=True,
    help="Networks to compare, also at the end of --refine.",
)
@click.option(
    "--prior",
    type=click.FloatRange(min=0, min_open=True),
    metavar="X",
    help="Standard deviation of the prior: also tell which share of the weights is still at it.",
)
@examples_option(2000)
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Only the first N examples of each file.")
@data_options
@force_option
@click.option("--json", "as_json", is_flag=True, help="Print the record instead of tables, and nothing else.")
@places
@debug
def compact(**options: Any) -> None:
    """Keep the networks of POPULATION as one posterior.

    POPULATION is a folder of checkpoints, a population folder, or a file with several networks. They are moved into
    one basin, and a mean and a standard deviation of every weight are fitted (diagonal: the storage of 2 networks), or
    --rank directions more (low-rank), or one such Gaussian for each of several --components (mixture).

    Draws of a diagonal posterior of HMC samples predict badly, because weights are not independent. --refine moves it
    until draws predict what the networks predict; the deviations are then no longer those of the networks' weights, and
    the record says so.

    With --data or --test the posterior is always compared with the networks, on these inputs and on noise around them,
    and a warning tells when its draws are further from the average of the networks than a single network is. Draws of
    networks with batch norm need statistics of their own: give --data or --statistics, here and to evaluate.

    \b
      onebasin compact draws/ -o q.safetensors --model onebasin.examples:digits_mlp --input 2x64
      onebasin compact draws/ -o q.safetensors --model model.py:net --refine --data train.npz --test test.npz
      onebasin compact aligned/ -o q.safetensors --raw --family low-rank --rank 20 --symmetry symmetry.json
    """  # noqa: D301 - click reads the backspace: keep these lines apart
    from onebasin.cli.work.compact import compact as work

    work(**options)
