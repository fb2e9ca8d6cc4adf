"""``onebasin diagnose``: chains of a population -> whether they have mixed, as functions and as weights."""

from pathlib import Path
from typing import Any

import click

from onebasin.cli.options import data_options, debug, examples_option, force_option, seed_option


@click.command()
@click.argument("model", metavar="MODEL")
@click.argument("population", metavar="POPULATION", type=click.Path(path_type=Path))
@click.argument("inputs", metavar="INPUTS")
@click.option(
    "--quantity",
    type=click.Choice(["probabilities", "values"]),
    help="Compare softmax probabilities, or outputs as they are. Default: probabilities for draws of a classifier.",
)
@click.option("--weights/--no-weights", default=True, show_default=True, help="Also look at every tensor of weights.")
@examples_option(500)
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Only the first N examples of the data.")
@data_options
@seed_option
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="File for the record, as JSON text."
)
@force_option
@click.option("--json", "as_json", is_flag=True, help="Print the record instead of tables, and nothing else.")
@debug
def diagnose(**options: Any) -> None:
    """Tell whether the chains of POPULATION have mixed: R-hat and effective sample sizes.

    MODEL is path/to/file.py:factory or package.module:factory, as for discover. POPULATION is a folder of sample, or
    any population whose members know their chain; it needs 4 draws of each chain. INPUTS is where functions are
    compared: a word, a file, a folder or a function, as for evaluate; targets are not needed.

    The verdict is about functions. Weights of chains that agree as functions may differ by the order of their units:
    look at them before and after align.

    \b
      onebasin diagnose onebasin.examples:digits_mlp chains/ digits:test
      onebasin diagnose model.py:net chains/ test.npz -o diagnosis.json
      onebasin diagnose model.py:net aligned/ test.npz --json
    """  # noqa: D301 - click reads the backspace: keep these lines apart
    from onebasin.cli.work.diagnose import diagnose as work

    work(**options)
