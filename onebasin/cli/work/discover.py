"""Discover: the symmetries of a model as a table or JSON, and their proof."""

from pathlib import Path

import click
from torch import nn

from onebasin.cli.load import load
from onebasin.cli.networks import example
from onebasin.cli.options import check_output
from onebasin.cli.progress import progress
from onebasin.errors import DiskError, InputError, SymmetryError
from onebasin.functional import global_seed
from onebasin.population import Population
from onebasin.state import as_spec, check_state
from onebasin.storage import publish
from onebasin.symmetry import discover as find
from onebasin.symmetry import verify


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
    force: bool,
) -> None:
    """Find and prove the symmetries of MODEL."""
    if evaluation_only and training_texts:
        raise InputError("--evaluation-only and --training-input contradict each other: leave out --training-input.")
    if output is not None:
        check_output(output, force)
    with global_seed(seed):
        loaded = load(reference)
        inputs = example(loaded, texts, vocabulary, seed)
        training = False if evaluation_only else None
        if training_texts:
            training = example(loaded, training_texts, vocabulary, seed)
    if weights is not None:
        _load_weights(loaded.model, weights)
    with progress(f"discovering the symmetries of {reference}"):
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
