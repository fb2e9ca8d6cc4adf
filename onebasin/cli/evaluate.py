"""``onebasin evaluate``: a population and data -> what its predictions are worth, each number with its interval."""

from pathlib import Path
from typing import Any

import click

from onebasin.cli.options import (
    data_options,
    debug,
    dtype_option,
    force_option,
    likelihood_options,
    places,
    statistics_option,
)
from onebasin.cli.words import CORRUPTIONS, INPUT_GRAMMAR, LINEARISED


@click.command()
@click.argument("model", metavar="MODEL")
@click.argument("population", metavar="POPULATION", type=click.Path(path_type=Path))
@click.argument("data", metavar="DATA")
@click.option(
    "--ood",
    metavar="DATA",
    help=f"Out-of-distribution inputs, to be told from those of DATA: {INPUT_GRAMMAR}.",
)
@click.option(
    "--ood-mask",
    "ood_mask",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Of inputs with pixels: an .npz file with mask (images, height, width), 1 where a pixel of --ood is out of "
    "distribution.",
)
@click.option(
    "--reference",
    type=click.Path(path_type=Path),
    metavar="POPULATION",
    help="Another population of the same model: also measure agreement and total variation with its predictions.",
)
@click.option(
    "--shift",
    multiple=True,
    metavar="NAME[:SEVERITY]",
    help=f"Also score on corrupted images: {', '.join(CORRUPTIONS)}, or all; :1 to :5 takes one severity. Repeat it.",
)
@click.option(
    "--image-size",
    metavar="HxW",
    help="Height and width of images that DATA holds as rows of pixels, as 8x8. For --shift.",
)
@click.option(
    "--pixel-range", metavar="LOW,HIGH", help="What black and white are in DATA, as -1,1. For --shift. Default: 0,1."
)
@likelihood_options
@click.option("--draws", type=click.IntRange(min=1), metavar="N", help="Networks from a posterior. Default: 100.")
@statistics_option
@click.option(
    "--linearised",
    type=click.Choice(LINEARISED),
    metavar="FORM",
    help=f"For a posterior: networks that are linear in their weights, {' or '.join(LINEARISED)} (of classes).",
)
@click.option(
    "--n-resamples",
    "n_resamples",
    type=click.IntRange(min=2),
    metavar="N",
    help="Bootstrap draws of the examples. Default: 1000.",
)
@click.option(
    "--confidence-level",
    type=click.FloatRange(min=0, max=1, min_open=True, max_open=True),
    metavar="X",
    help="Confidence level of the bootstrap intervals. Default: 0.95.",
)
@click.option("--bins", type=click.IntRange(min=1), metavar="N", help="Bins of calibration errors. Default: 15.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Only the first N examples of each file.")
@data_options
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, metavar="N", show_default=True, help="Seed of draws and intervals."
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="File for the record, as JSON text."
)
@force_option
@click.option("--json", "as_json", is_flag=True, help="Print the record instead of tables, and nothing else.")
@dtype_option
@places
@debug
def evaluate(**options: Any) -> None:
    """Evaluate the average prediction of POPULATION on DATA.

    MODEL is path/to/file.py:factory or package.module:factory, as for discover. POPULATION is a population: a folder of
    sample or align, a folder of files with a network each, or one file; or the file of a posterior, from which
    networks are drawn. DATA is a word, a file, a folder or a function, as for sample: digits, mnist:test, test.npz.

    For classes: accuracy, negative log-likelihood (NLL), Brier score, calibration errors, mutual information, areas
    under risk-coverage curves (AURC, AUGRC) with the errors that are left when the least confident are not answered,
    and NLL and the calibration error again with a temperature that was fitted on half of the examples. For values:
    RMSE, NLL, and coverage and width of predictive intervals. Targets with pixels, class numbers or values (images,
    height, width), are judged pixel by pixel, with intersection over union or relative errors, and intervals over
    images. Brackets hold bootstrap intervals. The record has null where a number is infinite, for JSON has no infinity.

    \b
      onebasin evaluate onebasin.examples:digits_mlp draws/ digits:test
      onebasin evaluate model.py:net draws/ test.npz --ood ood.npz -o record.json
      onebasin evaluate model.py:net posterior.safetensors test.npz --reference draws/ --json
      onebasin evaluate model.py:net posterior.safetensors test.npz --statistics train.npz
      onebasin evaluate model.py:net posterior.safetensors test.npz --linearised probit
      onebasin evaluate onebasin.examples:digits_mlp draws/ digits:test --shift all --image-size 8x8
    """  # noqa: D301 - click reads the backspace: keep these lines apart
    from onebasin.cli.work.evaluate import evaluate as work

    work(**options)
