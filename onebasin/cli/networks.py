"""The architecture, the symmetry and the networks that a verb was given: ``--model``, ``--symmetry``, and paths."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click
import torch
from torch import nn

from onebasin.alignment import REFERENCES
from onebasin.cli import inputs as example_inputs
from onebasin.cli.load import Loaded, call_user_code, load
from onebasin.cli.options import progress
from onebasin.errors import InputError, SpecError, StorageError, SymmetryError
from onebasin.functional import check_fits, global_seed
from onebasin.population import Population, is_there
from onebasin.posterior import FORMAT as POSTERIOR
from onebasin.posterior import Networks, Posterior, load_posterior
from onebasin.state import Spec, State, TensorSpec, as_spec, check_finite, check_spec
from onebasin.storage import read_header
from onebasin.symmetry import Symmetry, discover

_Command = TypeVar("_Command", bound=Callable[..., Any])


@dataclass(frozen=True)
class Architecture:
    """What the options say about the architecture."""

    reference: str | None
    texts: tuple[str, ...]
    vocabulary: int | None
    file: Path | None
    seed: int

    @property
    def given(self) -> bool:
        """Whether they say anything."""
        return self.reference is not None or self.file is not None


@dataclass(frozen=True, eq=False)
class Known:
    """A symmetry and, where ``--model`` was given, the model and its example input (which may still be missing)."""

    symmetry: Symmetry
    model: nn.Module | None
    inputs: Any

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor of a network."""
        return self.symmetry.shapes

    def runs(self, why: str) -> nn.Module:
        """The model, for what runs networks."""
        if self.model is None:
            raise InputError(f"{why} runs the networks, and a symmetry alone cannot: give --model too")
        return self.model


def example_options(command: _Command) -> _Command:
    """Add ``--input`` and ``--vocabulary``."""
    vocabulary = click.option(
        "--vocabulary",
        type=click.IntRange(min=1),
        metavar="N",
        help="Draw ids below this. Default: the size of the model's smallest embedding.",
    )
    texts = click.option(
        "--input",
        "texts",
        multiple=True,
        metavar="INPUT",
        help=f"Example input: {example_inputs.GRAMMAR}. Repeat it for several. "
        "Default: example_input() beside the factory.",
    )
    return texts(vocabulary(command))


def architecture_options(command: _Command) -> Callable[..., Any]:
    """Add the options that say what the networks are; the command receives them as one ``architecture``."""

    @wraps(command)
    def gathered(
        *,
        model: str | None,
        texts: tuple[str, ...],
        vocabulary: int | None,
        file: Path | None,
        seed: int,
        **options: Any,
    ) -> Any:
        return command(architecture=Architecture(model, texts, vocabulary, file, seed), **options)

    options = [
        click.option(
            "--model",
            metavar="MODEL",
            help="The networks' model: path/to/file.py:factory or package.module:factory, as for discover.",
        ),
        example_options,
        click.option(
            "--symmetry",
            "file",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="Their symmetry, as written by discover --output: instead of --model, or beside it to save time.",
        ),
        click.option(
            "--seed",
            type=click.IntRange(min=0),
            default=0,
            metavar="N",
            show_default=True,
            help="Seed of whatever is drawn.",
        ),
    ]
    decorated: Callable[..., Any] = gathered
    for option in reversed(options):
        decorated = option(decorated)
    return decorated


def example(loaded: Loaded, texts: tuple[str, ...], vocabulary: int | None, seed: int) -> Any:
    """The example input: drawn for the texts of ``--input``, or what stands beside the factory.

    Raises:
        InputError: there is none.
    """
    if texts:
        return example_inputs.draw(texts, loaded.model, vocabulary=vocabulary, seed=seed)
    if loaded.example_input is None:
        raise InputError(
            "Which example input runs through the model? Give --input, as in --input 2x3x32x32 or --input ids:2x16, "
            "or define example_input() beside the factory."
        )
    return call_user_code(loaded.example_input, "example_input()")


def know(architecture: Architecture) -> Known:
    """Build the model, and find its symmetry or read it from its file.

    Raises:
        InputError: neither was given.
        SymmetryError: the file holds the symmetry of another model.
    """
    stored = None if architecture.file is None else _read_symmetry(architecture.file)
    if architecture.reference is None:
        if stored is None:
            raise InputError(
                "Of which architecture are the networks? Give --model path/to/file.py:factory, or --symmetry FILE as "
                "written by onebasin discover MODEL --output FILE."
            )
        return Known(stored, None, None)
    with global_seed(architecture.seed):
        loaded = load(architecture.reference)
        inputs: Any = None
        if stored is None or architecture.texts or loaded.example_input is not None:
            inputs = example(loaded, architecture.texts, architecture.vocabulary, architecture.seed)
    if stored is None:
        with progress(f"discovering the symmetries of {architecture.reference} ..."):
            stored = discover(loaded.model, inputs, seed=architecture.seed)
    elif architecture.file is not None:
        _check_same(stored, loaded.model, architecture.file, architecture.reference)
    return Known(stored, loaded.model, inputs)


def _read_symmetry(path: Path) -> Symmetry:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(
            f"the symmetry {path} cannot be read ({getattr(error, 'strerror', None) or 'it is not text'}): write it "
            "with onebasin discover MODEL --output FILE"
        ) from error
    try:
        return Symmetry.from_json(text)
    except SymmetryError as error:
        raise SymmetryError(f"{path} holds no symmetry: {error}") from error


def _check_same(symmetry: Symmetry, model: nn.Module, path: Path, reference: str) -> None:
    expected = as_spec(model)
    spec = {
        name: TensorSpec(tuple(shape), expected[name].dtype if name in expected else torch.float32)
        for name, shape in symmetry.shapes.items()
    }
    try:
        check_spec(spec, expected, where=f"the symmetry {path}, compared with {reference},")
    except SpecError as error:
        raise SymmetryError(f"{error} (it belongs to another model)") from error


def open_networks(path: Path, known: Known, *, finite: bool = True) -> Population:
    """Open what lies under a path, and refuse it unless it holds networks of the architecture.

    Floating-point tensors may have another precision than the model's: half-precision files are common.
    """
    stored = Population.open(path).spec
    spec = None
    if known.model is not None or not known.shapes.keys() <= stored.keys():
        spec = {name: TensorSpec(tuple(shape), _dtype(stored, name)) for name, shape in known.shapes.items()}
    return Population.open(path, spec=spec, finite=finite)


def _dtype(stored: Spec, name: str) -> torch.dtype:
    """The dtype under a name, which may carry a prefix in the file."""
    if name in stored:
        return stored[name].dtype
    return next((spec.dtype for stored_name, spec in stored.items() if stored_name.endswith(f".{name}")), torch.float32)


def numbered(text: str) -> tuple[Path, int | None]:
    """Divide ``PATH#3``; a path that exists as it stands has no number.

    >>> numbered("runs/*/best.pt#3")
    (PosixPath('runs/*/best.pt'), 3)
    """
    path, _, number = text.rpartition("#")
    if Path(text).exists() or not number.isdecimal() or not path:
        return Path(text), None
    return Path(path), int(number)


def one_network(text: str, known: Known) -> State:
    """The network under ``PATH``, or under ``PATH#3`` where a path holds several."""
    path, number = numbered(text)
    networks = open_networks(path, known, finite=False)
    if number is None and len(networks) != 1:
        raise InputError(f"{text} holds {len(networks)} networks, expected one: choose it by number, as in {text}#0")
    state = networks.member(number or 0)
    check_finite(state, where=text)
    return state


def reference_of(text: str, known: Known) -> str | State:
    """What ``--reference`` names: one of the words that `align` knows, or a network."""
    return text if text in REFERENCES else one_network(text, known)


def build(reference: str, seed: int) -> nn.Module:
    """The model behind ``path/to/file.py:factory`` or ``package.module:factory``, with weights drawn from the seed."""
    with global_seed(seed):
        return load(reference).model


def open_population_or_posterior(path: Path, model: nn.Module) -> Networks:
    """The posterior in a file, or the networks that a word stands for, as for `Population.open`.

    Raises:
        StorageError: there is no such path, or it holds neither.
        SpecError: the networks are of another architecture than the model.
    """
    if not is_there(path):
        raise StorageError(f"there is no {path}: give a population folder, files of networks, or a posterior's file")
    posterior = posterior_in(path, model)
    return open_networks(path, shapes_of(model), finite=False) if posterior is None else posterior


def posterior_in(path: Path, model: nn.Module) -> Posterior | None:
    """The posterior in a file, refused if it is one of another architecture; None where the path holds none."""
    if path.suffix != ".safetensors" or not path.is_file() or read_header(path).metadata.get("onebasin") != POSTERIOR:
        return None
    posterior = load_posterior(path)
    check_fits(model, posterior.mean)
    return posterior


def shapes_of(model: nn.Module) -> Known:
    """A model without its symmetries."""
    return Known(Symmetry((), {name: spec.shape for name, spec in as_spec(model).items()}), model, None)
