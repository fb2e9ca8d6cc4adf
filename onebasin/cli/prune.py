"""``onebasin prune``: a posterior or a network -> the same network with only its most valuable weights."""

from pathlib import Path
from typing import Any

import click

from onebasin.cli.options import data_options, debug, dtype_option, example_options, force_option, loss_option
from onebasin.cli.words import CRITERIA, DATA_GRAMMAR, SCOPES


@click.command()
@click.argument("model", metavar="MODEL")
@click.argument("source", metavar="POSTERIOR")
@click.option(
    "--keep",
    type=click.FloatRange(min=0, max=1, min_open=True),
    default=0.2,
    show_default=True,
    metavar="X",
    help="Part of the weights to keep.",
)
@click.option(
    "--by",
    type=click.Choice(CRITERIA),
    help="What decides. Default: snr; magnitude for a network, which has no standard deviations (or random).",
)
@click.option(
    "--per", type=click.Choice(SCOPES), default="global", show_default=True, help="One ranking, or one in every tensor."
)
@click.option("--names", multiple=True, metavar="NAME", help="Prune only these tensors; names or patterns. Repeat it.")
@click.option(
    "--onto",
    metavar="PATH",
    help="Prune this network instead of the mean of the posterior, whose standard deviations are moved into its basis. "
    "PATH#3 is number 3 of several.",
)
@example_options
@click.option(
    "--data",
    metavar="DATA",
    help=f"Judge on these examples, by all criteria at twelve levels: {DATA_GRAMMAR}.",
)
@click.option(
    "--statistics",
    metavar="DATA",
    help="Inputs, such as those of training, on which the running statistics of norms are measured for each pruned "
    "network.",
)
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Only the first N examples of the data.")
@data_options
@loss_option
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File for the pruned network, .safetensors; a record goes beside it as .json.",
)
@click.option(
    "--masks",
    "masks_file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="File for the masks, .safetensors: true where a weight is kept.",
)
@force_option
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, metavar="N", show_default=True, help="Seed of random orders."
)
@dtype_option
@click.option("--json", "as_json", is_flag=True, help="Print the record instead of tables.")
@debug
def prune(**options: Any) -> None:
    """Keep the most valuable weights of POSTERIOR, and set the others to zero.

    MODEL is path/to/file.py:factory or package.module:factory, as for discover. POSTERIOR is the file of a posterior,
    or of a network, which has no standard deviations and is pruned by magnitude unless --by says random. The pruned
    network is the mean of the posterior, or the network given as --onto. Nothing that is read is changed.

    \b
      onebasin prune model.py:net posterior.safetensors --keep 0.2 --by snr -o pruned.safetensors
      onebasin prune model.py:net posterior.safetensors --data test.npz
      onebasin prune model.py:net network.safetensors --by magnitude --per tensor --names '*.weight'
      onebasin prune model.py:net posterior.safetensors --onto other.safetensors --masks masks.safetensors
    """  # noqa: D301 - click reads the backspace: keep these lines apart
    from onebasin.cli.work.prune import prune as work

    work(**options)
