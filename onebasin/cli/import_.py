"""``onebasin import``: networks from wherever they are -> a population folder."""

from pathlib import Path
from typing import Any

import click

from onebasin.cli.options import debug, dtype_option, seed_option


@click.command("import")
@click.argument("source")
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="New folder for the population.",
)
@click.option(
    "--model",
    metavar="MODEL",
    help="Refuse networks of another architecture, strip a prefix from their names, and unroll the file of an implicit "
    "ensemble (packed, BatchEnsemble, ...) into networks of this one: path/to/file.py:factory or "
    "package.module:factory.",
)
@click.option(
    "--draws",
    type=click.IntRange(min=1),
    metavar="N",
    help="Draws of each member of an implicit ensemble with LPBNN layers. Default: one, latents at their means.",
)
@seed_option
@dtype_option
@click.option("--force", is_flag=True, help="Begin anew: remove the population that FOLDER holds, finished or not.")
@debug
def import_(**options: Any) -> None:
    """Stream the networks of SOURCE into a population folder, which opens at once and stays on the disk.

    SOURCE is a folder of checkpoints, a file, a .tgz or .tar archive of safetensors files or a folder of them, a
    pattern in quotes, or a name on the Hugging Face hub. Networks are in natural order of their names, as stored.
    Memory is bounded; an interrupted import goes on when the same command is given again.

    \b
      onebasin import models/mnist-optunet -o optunet/
      onebasin import 'runs/*/best.safetensors' -o population/
      onebasin import hf://datasets/torch-uncertainty/Checkpoints/models/mnist-optunet -o optunet/
      onebasin import hf://OWNER/MODEL@revision/folder -o networks/ --model path/to/file.py:factory
      onebasin import packed.ckpt -o networks/ --model path/to/file.py:narrow
    """  # noqa: D301 - click reads the backspace: keep these lines apart
    from onebasin.cli.work.import_ import import_ as work

    work(**options)
