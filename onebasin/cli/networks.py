"""The architecture, the symmetry and the networks that a verb was given: ``--model``, ``--symmetry``, and paths."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onebasin.alignment import REFERENCES
from onebasin.cli import inputs as example_inputs
from onebasin.cli.load import Loaded, call_user_code, load
from onebasin.cli.options import Architecture
from onebasin.cli.progress import progress
from onebasin.errors import InputError, SpecError, StorageError, SymmetryError
from onebasin.functional import check_fits, global_seed
from onebasin.inference import is_run
from onebasin.population import MANIFEST, Population, is_draws, is_pretrained, is_there
from onebasin.posterior import Networks, Posterior, is_posterior, load_posterior
from onebasin.state import State, TensorSpec, as_spec, check_finite, check_spec, shared_names
from onebasin.symmetry import Symmetry, discover


@dataclass(frozen=True, eq=False)
class Known:
    """A symmetry and, where ``--model`` was given, the model and its example input (which may still be missing).

    Networks are opened in `dtype`, or in that of their files where there is none.
    """

    symmetry: Symmetry
    model: nn.Module | None
    inputs: Any
    dtype: str | None = None

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor of a network."""
        return self.symmetry.shapes

    def runs(self, why: str) -> nn.Module:
        """The model, for what runs networks."""
        if self.model is None:
            raise InputError(f"{why} runs the networks, and a symmetry alone cannot: give --model too")
        return self.model


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
    """Build the model, and find its symmetry or read it from its file."""
    return discovered(prepare(architecture), architecture)


def prepare(architecture: Architecture, networks: Path | None = None) -> Known:
    """Build the model, or read the symmetry from its file: enough to check all else before a symmetry is discovered.

    Without an architecture the model is that of `networks`, if these are a folder of ``save_pretrained``.

    Raises:
        InputError: neither was given.
        SymmetryError: the file holds the symmetry of another model.
    """
    if not architecture.given and networks is not None and is_pretrained(networks):
        architecture = replace(architecture, reference=str(networks))
    stored = None if architecture.file is None else _read_symmetry(architecture.file)
    if architecture.reference is None:
        if stored is None:
            raise InputError(
                "Of which architecture are the networks? Give --model path/to/file.py:factory, or --symmetry FILE as "
                "written by onebasin discover MODEL --output FILE."
            )
        return Known(stored, None, None, architecture.dtype)
    with global_seed(architecture.seed):
        loaded = load(architecture.reference)
        inputs: Any = None
        if stored is None or architecture.texts or loaded.example_input is not None:
            inputs = example(loaded, architecture.texts, architecture.vocabulary, architecture.seed)
    if stored is None:
        return replace(shapes_of(loaded.model, architecture.dtype), inputs=inputs)
    assert architecture.file is not None  # the symmetry is from there
    _check_same(stored, loaded.model, architecture.file, architecture.reference)
    return Known(stored, loaded.model, inputs, architecture.dtype)


def discovered(known: Known, architecture: Architecture) -> Known:
    """The same with its symmetry, which is discovered unless it was read from a file."""
    if architecture.file is not None or known.model is None:
        return known
    with progress(f"discovering the symmetries of {architecture.reference or type(known.model).__name__}"):
        return replace(known, symmetry=discover(known.model, known.inputs, seed=architecture.seed))


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
    dtype: torch.dtype | None = None if known.dtype is None else getattr(torch, known.dtype)
    if known.model is not None:
        spec = as_spec(known.model)
        tied = shared_names(known.model)
        return Population.open(path, spec=spec, dtype=dtype or "stored", tied=tied, finite=finite)
    shapes = {name: TensorSpec(tuple(shape), torch.float32) for name, shape in known.shapes.items()}
    if not is_draws(path) and shapes.keys() <= set(Population.open(path, dtype=dtype).names):
        return Population.open(path, dtype=dtype, finite=finite)  # a symmetry need not know every tensor
    return Population.open(path, spec=shapes or None, dtype=dtype or "stored", finite=finite)


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


def open_population_or_posterior(path: Path, model: nn.Module, dtype: str | None = None) -> Networks:
    """The posterior in a file, or the networks that a word stands for, in a dtype, as for `Population.open`.

    Raises:
        StorageError: there is no such path, or it holds neither.
        SpecError: the networks are of another architecture than the model.
    """
    if not is_there(path):
        raise StorageError(f"there is no {path}: give a population folder, files of networks, or a posterior's file")
    posterior = posterior_in(path, shapes_of(model))
    return open_networks(path, shapes_of(model, dtype), finite=False) if posterior is None else posterior


def posterior_in(path: Path, known: Known) -> Posterior | None:
    """The posterior in a file, refused if it is one of another architecture; None where the path holds none."""
    if not is_posterior(path):
        return None
    posterior = load_posterior(path)
    if known.model is not None:
        check_fits(known.model, posterior.mean)
    else:
        shapes = {name: TensorSpec(tensor.shape, torch.float32) for name, tensor in posterior.spec.items()}
        wanted = {name: TensorSpec(tuple(shape), torch.float32) for name, shape in known.shapes.items()}
        check_spec({name: shapes[name] for name in wanted if name in shapes}, wanted, where=str(path))
    return posterior


def shapes_of(model: nn.Module, dtype: str | None = None) -> Known:
    """A model without its symmetries."""
    return Known(Symmetry((), {name: spec.shape for name, spec in as_spec(model).items()}), model, None, dtype)


def is_plain(folder: Path) -> bool:
    """Whether a folder holds a population that is no run of a sampler, which would take hours to make again."""
    return (folder / MANIFEST).exists() and not is_run(folder)
