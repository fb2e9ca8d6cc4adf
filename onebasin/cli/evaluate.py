"""``onebasin evaluate``: a population and data -> what its predictions are worth, each number with its interval."""

import json
from pathlib import Path
from typing import Any

import click

from onebasin.cli import data as examples
from onebasin.cli.data import likelihood_options
from onebasin.cli.networks import build, open_population_or_posterior
from onebasin.cli.options import check_absent, debug, progress_bar
from onebasin.cli.options import places as where_it_runs
from onebasin.errors import InputError
from onebasin.evaluation import evaluate as assess
from onebasin.storage import make_folder, publish

FORMAT = "onebasin evaluation 1"
_GIVEN = ("likelihood", "noise", "draws", "n_resamples", "confidence_level", "bins")


@click.command()
@click.argument("model", metavar="MODEL")
@click.argument("population", metavar="POPULATION", type=click.Path(path_type=Path))
@click.argument("data", metavar="DATA")
@click.option(
    "--ood",
    metavar="DATA",
    help=f"Out-of-distribution inputs, to be told from those of DATA: {examples.INPUT_GRAMMAR}.",
)
@click.option(
    "--reference",
    type=click.Path(path_type=Path),
    metavar="POPULATION",
    help="Another population of the same model: also measure agreement and total variation with its predictions.",
)
@likelihood_options
@click.option("--draws", type=click.IntRange(min=1), metavar="N", help="Networks from a posterior. Default: 100.")
@click.option(
    "--statistics",
    metavar="DATA",
    help="Inputs, such as those of training, on which the running statistics of norms are measured for each network "
    f"from a posterior: {examples.INPUT_GRAMMAR}.",
)
@click.option(
    "--resamples",
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
@examples.data_options
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, metavar="N", show_default=True, help="Seed of draws and intervals."
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="File for the record, as JSON text."
)
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
@click.option("--json", "as_json", is_flag=True, help="Print the record instead of tables, and nothing else.")
@where_it_runs
@debug
def evaluate(
    *,
    model: str,
    population: Path,
    data: str,
    output: Path | None,
    force: bool,
    as_json: bool,
    places: dict[str, Any],
    **options: Any,
) -> None:
    """Evaluate the average prediction of POPULATION on DATA.

    MODEL is path/to/file.py:factory or package.module:factory, as for discover. POPULATION is a population: a folder of
    sample or align, a folder of files with a network each, or one file; or the file of a posterior, from which
    networks are drawn. DATA is a word, a file, a folder or a function, as for sample: digits, mnist:test, test.npz.

    For classes: accuracy, negative log-likelihood (NLL), Brier score, calibration errors, mutual information, and NLL
    and the calibration error again with a temperature that was fitted on half of the examples. For values: RMSE, NLL,
    and coverage and width of predictive intervals. Brackets hold bootstrap intervals. The record has null where a
    number is infinite, for JSON has no infinity.

    \b
      onebasin evaluate onebasin.examples:digits_mlp draws/ digits:test
      onebasin evaluate model.py:net draws/ test.npz --ood ood.npz -o record.json
      onebasin evaluate model.py:net posterior.safetensors test.npz --reference draws/ --json
      onebasin evaluate model.py:net posterior.safetensors test.npz --statistics train.npz
    """  # noqa: D301 - click reads the backspace: keep these lines apart
    _check_output(output, force)
    ood, reference, limit, seed = (options[name] for name in ("ood", "reference", "limit", "seed"))
    given = {name: options[name] for name in _GIVEN if options[name] is not None}
    if "noise" in given:
        given["noise"] = _noise(given["noise"])
    network = build(model, seed)
    networks = open_population_or_posterior(population, network)
    other = None if reference is None else open_population_or_posterior(reference, network)
    pair = examples.read_pair(data, limit, options["sources"])
    if options["statistics"] is not None:
        given["statistics"] = examples.read(
            options["statistics"], limit=limit, targets=False, sources=options["sources"]
        ).inputs
    far = None
    if ood is not None:
        far = examples.read(ood, limit=limit, targets=False, sources=options["sources"]).inputs
    with progress_bar(f"evaluating {population}") as show:
        evaluation = assess(
            network,
            networks,
            pair,
            ood=far,
            reference=other,
            seed=seed,
            progress=show,
            **places,
            **given,
        )
    facts = {"model": model, "population": population, "data": data, "outside": ood, "reference": reference}
    facts["statistics"] = options["statistics"]
    given_text = {name: None if value is None else str(value) for name, value in facts.items()}
    record = json.dumps({"format": FORMAT, "given": given_text, **evaluation.record()}, indent=1, allow_nan=False)
    if output is not None:
        publish(output, lambda file: file.write(f"{record}\n".encode()), replace=True)
    click.echo(record if as_json else f"{evaluation}" + ("" if output is None else f"\n\n{output}"))


def _check_output(output: Path | None, force: bool) -> None:
    """Raise before the work where the record cannot be written."""
    if output is None:
        return
    check_absent(output, force)
    make_folder(output.parent)


def _noise(text: str) -> float | str:
    """A standard deviation, or the word learned.

    >>> _noise("0.5"), _noise("learned")
    (0.5, 'learned')
    """
    try:
        return "learned" if text == "learned" else float(text)
    except ValueError as error:
        raise InputError(f"expected --noise to be a number or learned, found {text!r}: give 0.1") from error
