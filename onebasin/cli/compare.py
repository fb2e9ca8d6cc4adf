"""``onebasin compare``: two networks, or populations -> how much of their difference is only a symmetry."""

from pathlib import Path
from typing import Any

import click

from onebasin.cli.options import (
    architecture_options,
    data_options,
    debug,
    examples_option,
    force_option,
    loss_option,
    places,
)
from onebasin.cli.words import DATA_GRAMMAR, FORM, MATCH_SCALES, PRESETS


@click.command()
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@architecture_options
@click.option(
    "--scale",
    type=click.Choice(MATCH_SCALES),
    default="reference",
    show_default=True,
    help="reference: B gets the scales of A; keep: it keeps its own.",
)
@click.option(
    "--restarts",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    show_default=True,
    help="Further searches from random places; the best is kept.",
)
@click.option(
    "--data",
    metavar="DATA",
    help=f"Also measure the barrier between A and B on these examples: {DATA_GRAMMAR}.",
)
@click.option("--test", metavar="DATA", help="And on these, which correct nothing.")
@examples_option(2000)
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Only the first N examples of each file.")
@data_options
@loss_option
@click.option(
    "--points", type=click.IntRange(min=3), default=25, metavar="N", show_default=True, help="On the path; odd."
)
@click.option(
    "--normal-form",
    "normal_forms",
    multiple=True,
    default=(FORM,),
    metavar="FORM",
    show_default=True,
    help="For populations: how symmetries are removed, SCALE/ORDER as in balanced/norm, or aligned; unit-norm/max is "
    "that of paper 2. Repeat it for several.",
)
@click.option(
    "--preset",
    type=click.Choice(list(PRESETS)),
    default="median",
    show_default=True,
    help="Of populations: kernels and bandwidths of the MMD.",
)
@click.option(
    "--values", is_flag=True, help="Of populations: outputs are values, as in a regression, and not scores of classes."
)
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write the JSON to this file.")
@force_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables, and nothing else.")
@places
@debug
def compare(**options: Any) -> None:
    """Compare networks, populations of networks, or posteriors A and B up to their symmetries.

    How much of their difference is only a disguise? B is moved onto A as closely as permutations, signs and scales
    allow, which does not change what it computes. A and B are files with one network each; PATH#3 is number 3 of
    several.

    The verdict is one of: already aligned; moved; partly alike; independent. The last three compare with unrelated
    networks of the same sizes: the search is repeated on three copies of B whose weights have changed places at random
    within each tensor, which takes three times as long as the comparison itself. B is moved if it has
    5 % more overlap than they have on average, and at least 4 of their spreads; partly alike if it has 3 % more and 8
    spreads. With --data the barrier counts as well: networks whose barrier falls below half when B is moved are not
    called independent.

    Where A and B hold several networks each, the two populations are compared: mean distances and the squared MMD of
    their weights, as they are and without symmetries, with a p-value; with --data also the MMD of their predictions,
    and agreement and total variation of their average predictives. Several outputs are taken for classes; --values
    compares those of a regression as they are.

    Where A and B are files of posteriors: the KL divergence of A from B and their Wasserstein-2 distance, as given and
    with B moved into the basin of A.

    \b
      onebasin compare a.pt b.pt --model examples/digits_cnn.py:digits_cnn
      onebasin compare a.pt b.pt --model path/to/file.py:factory --data train.npz --test test.npz
      onebasin compare chain/#0 chain/#999 --symmetry symmetry.json --json
      onebasin compare chain/ ensemble/ --symmetry symmetry.json --normal-form balanced/max --normal-form aligned
      onebasin compare a.posterior.safetensors b.posterior.safetensors --model path/to/file.py:factory
    """  # noqa: D301 - click reads the backspace: keep these lines apart
    from onebasin.cli.work.compare import compare as work

    work(**options)
