"""``onebasin discover``: a model and an example input -> its symmetries, as a table or as JSON."""

from pathlib import Path

import click
from torch import nn

from onebasin.cli.load import load
from onebasin.cli.networks import example, example_options
from onebasin.cli.options import debug, progress, seed_option
from onebasin.errors import DiskError, InputError, SymmetryError
from onebasin.functional import global_seed
from onebasin.population import Population
from onebasin.state import as_spec, check_state
from onebasin.storage import publish
from onebasin.symmetry import discover as find
from onebasin.symmetry import verify


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
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Write the JSON to this file.")
@debug
def discover(
    *,
    reference: str,
    texts: tuple[str, ...],
    vocabulary: int | None,
    weights: Path | None,
    seed: int,
    frozen: tuple[str, ...],
    training_texts: tuple[str, ...],
    evaluation_only: bool,
    prove: bool,
    as_json: bool,
    output: Path | None,
) -> None:
    """Find and prove the symmetries of MODEL.

    MODEL is path/to/file.py:factory or package.module:factory, where the factory is a function without arguments
    that returns an nn.Module, a module class that needs no arguments, or a module.

    \b
      onebasin discover examples/digits_cnn.py:digits_cnn
      onebasin discover examples/digits_cnn.py:digits_cnn --input 4x1x8x8 --verify
      onebasin discover my_package.models:tagger --input ids:2x16 --json
    """  # noqa: D301 - click reads the backspace: keep these lines apart
    if evaluation_only and training_texts:
        raise InputError("--evaluation-only and --training-input contradict each other: leave out --training-input.")
    with global_seed(seed):
        loaded = load(reference)
        inputs = example(loaded, texts, vocabulary, seed)
        training = False if evaluation_only else None
        if training_texts:
            training = example(loaded, training_texts, vocabulary, seed)
    if weights is not None:
        _load_weights(loaded.model, weights)
    with progress(f"discovering the symmetries of {reference} ..."):
        symmetry = find(loaded.model, inputs, training=training, frozen=frozen or None, seed=seed)
        proof = verify(loaded.model, symmetry, inputs, training=training) if prove else None
    if output is not None:
        _write(output, symmetry.to_json())
    click.echo(symmetry.to_json() if as_json else str(symmetry))
    if proof is not None:
        click.echo(f"\n{proof}", err=as_json)  # stdout stays pure JSON
        if not proof.passed:
            raise SymmetryError("The proof failed: these symmetries change the function of the model.")


def _load_weights(model: nn.Module, path: Path) -> None:
    spec = as_spec(model)
    state = Population.open(path).member(0)
    # Half-precision checkpoints of float models are common; anything but precision must agree.
    state = {
        name: value.to(spec[name].dtype) if name in spec and value.dtype.is_floating_point else value
        for name, value in state.items()
    }
    check_state(state, spec, where=str(path))
    model.load_state_dict(state, strict=False)  # checked above; only extra state that is no tensor may be absent


def _write(path: Path, text: str) -> None:
    try:
        publish(path, lambda file: file.write(f"{text}\n".encode()), replace=True)
    except OSError as error:
        raise DiskError(f"{path} cannot be written ({error.strerror}); choose another --output.") from error
