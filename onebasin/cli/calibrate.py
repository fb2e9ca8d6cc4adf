"""``onebasin calibrate``: networks and held-out data -> the same networks with a scaling in their last layer."""

from pathlib import Path
from typing import Any

import click

from onebasin.cli.options import data_options, debug, dtype_option, force_option, places, statistics_option
from onebasin.cli.words import CALIBRATED, CALIBRATIONS, CLASS_LIKELIHOODS


@click.command()
@click.argument("model", metavar="MODEL")
@click.argument("population", metavar="POPULATION", type=click.Path(path_type=Path))
@click.argument("data", metavar="DATA")
@click.option(
    "--method",
    type=click.Choice(CALIBRATIONS),
    default="temperature",
    show_default=True,
    help="Logits are divided by a temperature, get a factor and a shift each (vector), are mixed (matrix); or "
    "probabilities go through ascending maps (isotonic), which no weights can hold.",
)
@click.option(
    "--per",
    type=click.Choice(CALIBRATED),
    help="One map for all networks, chosen for their average prediction; one for each member; or one for the average, "
    "which no weights can hold. Default: population, for isotonic average.",
)
@click.option(
    "--ridge",
    type=click.FloatRange(min=0, min_open=True),
    metavar="X",
    help="How strongly vector and matrix are held to the best temperature. Default: chosen by cross-validation.",
)
@click.option(
    "--folds",
    type=click.IntRange(min=2),
    default=5,
    metavar="N",
    show_default=True,
    help="Parts of the examples that are left out in turn, to judge the calibration.",
)
@click.option(
    "--likelihood", type=click.Choice(CLASS_LIKELIHOODS), help="Of the targets: bernoulli for 0 and 1 with one logit."
)
@click.option("--draws", type=click.IntRange(min=1), metavar="N", help="Networks from a posterior. Default: 100.")
@statistics_option
@click.option(
    "--n-resamples",
    type=click.IntRange(min=2),
    metavar="N",
    help="Bootstrap draws of the examples. Default: 1000.",
)
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Only the first N examples.")
@data_options
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, metavar="N", show_default=True, help="Seed of draws and parts."
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="Folder for the calibrated networks with their record.json; or, of a posterior, a .safetensors file, whose "
    "record goes beside it as .json.",
)
@force_option
@click.option("--json", "as_json", is_flag=True, help="Print the record instead of tables, and nothing else.")
@dtype_option
@places
@debug
def calibrate(**options: Any) -> None:
    """Calibrate POPULATION on the held-out examples DATA, and fold the scaling into its weights.

    MODEL is path/to/file.py:factory or package.module:factory, as for discover. POPULATION is a population or the file
    of a posterior, as for evaluate. DATA are labelled examples that training has not seen. What is read is not changed;
    what is written predicts calibrated probabilities by itself, in whatever program it is used. That it does is proved
    in float64, or refused.

    \b
      onebasin calibrate model.py:net draws/ test.npz
      onebasin calibrate model.py:net draws/ test.npz -o calibrated/
      onebasin calibrate model.py:net posterior.safetensors test.npz -o calibrated.safetensors
      onebasin calibrate model.py:net draws/ test.npz --method isotonic --json
    """  # noqa: D301 - click reads the backspace: keep these lines apart
    from onebasin.cli.work.calibrate import calibrate as work

    work(**options)
