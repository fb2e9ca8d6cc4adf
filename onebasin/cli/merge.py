"""``onebasin merge``: many networks -> one, the mean of what was aligned first."""

from pathlib import Path
from typing import Any

import click

from onebasin.cli.options import architecture_options, data_options, debug, force_option
from onebasin.cli.words import INPUT_GRAMMAR


@click.command()
@click.argument("networks", metavar="POPULATION...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    help="File for the merged network, .safetensors; the record goes beside it, with .json for its ending. Of folders "
    "of transformers it may be a folder of the same kind, with record.json inside.",
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
    help=f"Measure the running statistics of norms on these examples: {INPUT_GRAMMAR}. Without them the "
    "merged network has the averages of the networks, and may be worthless.",
)
@click.option(
    "--repair",
    metavar="DATA",
    help="Recalibrate, and give all other units the spread that they have in the networks on these examples.",
)
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Only the first N examples.")
@data_options
@force_option
@debug
def merge(**options: Any) -> None:
    """Align the networks of each POPULATION and average them.

    POPULATION is what align takes; give several, or one file per network. All become one network in one file, and
    nothing in them is changed. Folders that save_pretrained of transformers wrote need no --model, and become a folder
    that from_pretrained opens, with the configuration and the tokenizer of the first.

    \b
      onebasin merge a.pt b.pt -o merged.safetensors --model examples/digits_cnn.py:digits_cnn
      onebasin merge checkpoints/ -o merged.safetensors --model path/to/file.py:factory --repair train.npz
      onebasin merge checkpoints/ -o merged.safetensors --model path/to/file.py:factory --statistics train.npz
      onebasin merge aligned/ -o merged.safetensors --reference none
      onebasin merge bert-a/ bert-b/ -o bert-merged/
    """  # noqa: D301 - click reads the backspace: keep these lines apart
    from onebasin.cli.work.merge import merge as work

    work(**options)
