"""What a path holds as a population: networks, or a posterior that networks are drawn from."""

from pathlib import Path

from torch import nn

from onebasin.cli.load import load
from onebasin.cli.networks import Known, open_networks
from onebasin.errors import StorageError
from onebasin.functional import check_fits, global_seed
from onebasin.population import is_there
from onebasin.posterior import FORMAT as POSTERIOR
from onebasin.posterior import Networks, Posterior, load_posterior
from onebasin.state import as_spec
from onebasin.storage import read_header
from onebasin.symmetry import Symmetry


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
    """A model whose symmetries nobody asked for."""
    return Known(Symmetry((), {name: spec.shape for name, spec in as_spec(model).items()}), model, None)
