"""``onebasin discover``: a model and an example input -> its symmetries, as a table or as JSON."""

from pathlib import Path
from typing import Any

import click

from onebasin.cli.options import debug, example_options, force_option, seed_option


@click.command()
@click.argument("reference", metavar="MODEL")
@example_options
@click.option("--weights", type=click.Path(path_type=Path), help="Checkpoint to load into the model first.")
@seed_option
@click.option(
    "--frozen",
    multiple=True,
    metavar="NAME",
    help="Parameter that is a constant, or module whose parameters all are. Repeat it for several. Default: "
    "parameters that require no gradient.",
)
@click.option(
    "--training-input",
    "training_texts",
    multiple=True,
    metavar="INPUT",
    help="Input of a call in training mode, where it differs from --input. Repeat it for several.",
)
@click.option(
    "--evaluation-only",
    is_flag=True,
    help="Do not try training mode: the symmetries of evaluation may be more than those of what was trained.",
)
@click.option("--verify", "prove", is_flag=True, help="Also print the proof, one row per space and freedom.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the table, and nothing else.")
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write the JSON to this file.")
@force_option
@debug
def discover(**options: Any) -> None:
    """Find and prove the symmetries of MODEL.

    MODEL is path/to/file.py:factory or package.module:factory, where the factory is a function without arguments
    that returns an nn.Module, a module class that needs no arguments, or a module; or a folder that save_pretrained of
    transformers wrote, which needs no --input.

    \b
      onebasin discover examples/digits_cnn.py:digits_cnn
      onebasin discover examples/digits_cnn.py:digits_cnn --input 4x1x8x8 --verify
      onebasin discover my_package.models:tagger --input ids:2x16 --json
      onebasin discover bert-tiny/ --verify
    """  # noqa: D301 - click reads the backspace: keep these lines apart
    from onebasin.cli.work.discover import discover as work

    work(**options)
