"""Which tensors of a state are constants of the function: frozen parameters, and buffers that training does not update.

A constant is never moved. Units whose entries in it are all equal may still change places, because then nothing in it
would have to move; that is all it allows.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from onebasin.errors import InputError
from onebasin.functional import Inputs, call_arguments, frozen_norms, training_mode
from onebasin.state import is_statistic, shared_names, state_of, trained_parameters
from onebasin.symmetry.trace import Graph


def constants(model: nn.Module, graph: Graph, inputs: Inputs, frozen: Iterable[str] | None = None) -> dict[str, Tensor]:
    """The constant tensors of a model by state-dict name, tied ones under all their names.

    Args:
        model: the module.
        graph: its trace in evaluation mode.
        inputs: of a call in training mode, which shows what buffers training updates.
        frozen: names of parameters, or of modules for all of theirs; by default what requires no gradient, see
            `trained_parameters`.

    Buffers that a call in training mode changes (running statistics of a norm, the vectors of a spectral norm) are no
    constants: they are statistics and go along with their units. Where no such call can be made, those that a batch
    norm reads and those with torch's names for running statistics are taken for them. Statistics of frozen norms, whose
    own parameters are frozen or which stay in evaluation mode, are constants.
    """
    state = state_of(model)
    names = set(dict(model.named_parameters(remove_duplicate=False)))
    held = names - _with_ties(model, trained_parameters(model)) if frozen is None else _named(names, frozen)
    buffers = {
        name
        for name, tensor in state.items()
        if name not in names and tensor.is_floating_point() and tensor.layout == torch.strided
    }
    if buffers:
        updated = updated_buffers(model, inputs)
        if updated is None:
            updated = {name for name in buffers if is_statistic(name)} | graph.batch_norm_statistics()
        buffers -= updated - _frozen_statistics(model)
    held = _with_ties(model, held | buffers)
    return {name: tensor for name, tensor in state.items() if name in held}


def _with_ties(model: nn.Module, names: Iterable[str]) -> set[str]:
    first = shared_names(model)
    chosen = {first.get(name, name) for name in names}
    return {name for name, own in first.items() if own in chosen}


def _named(parameters: set[str], frozen: Iterable[str]) -> set[str]:
    held: set[str] = set()
    for wanted in [frozen] if isinstance(frozen, str) else frozen:
        found = {name for name in parameters if name == wanted or name.startswith(f"{wanted}.")}
        if not found:
            listed = ", ".join(sorted(parameters)[:4])
            raise InputError(
                f"expected names of parameters or modules to freeze ({listed}, ...), found {wanted!r}: choose others"
            )
        held |= found
    return held


def _frozen_statistics(model: nn.Module) -> set[str]:
    """Names of the running means and variances of norms that training leaves alone."""
    means = frozen_norms(model)
    if any(type(module).train is not nn.Module.train for module in model.modules()):
        with contextlib.suppress(Exception):  # which norms an override of `train` leaves in evaluation mode
            means |= frozen_norms(copy.deepcopy(model).train())
    return {name for mean in means for name in (mean, f"{mean.removesuffix('running_mean')}running_var")}


def updated_buffers(model: nn.Module, inputs: Inputs) -> set[str] | None:
    """Names of the buffers that a call in training mode changes; None if there can be no such call.

    Inputs get noise, since a batch of zeros may leave a mean at zero; a batch of one, which has no batch statistics, is
    repeated where the model refuses it.
    """
    generator = torch.Generator().manual_seed(0)

    def noisy(value: Any, times: int) -> Any:
        if not isinstance(value, Tensor) or not value.dim():
            return value
        value = value.repeat(times, *[1] * (value.dim() - 1))
        if not value.is_floating_point():
            return value
        return value + torch.randn(value.shape, generator=generator).to(value)

    for times in (1, 2):
        arguments, options = tree_map(partial(noisy, times=times), call_arguments(inputs))
        with training_mode(model), torch.random.fork_rng(devices=[]), torch.no_grad():
            dense = {name: tensor for name, tensor in state_of(model).items() if tensor.layout == torch.strided}
            before = {name: (tensor._version, tensor.clone()) for name, tensor in dense.items()}
            with contextlib.suppress(Exception):
                model(*arguments, **options)
                after = state_of(model)
                # Written in place counts, too: the vectors of a spectral norm may have converged to the last bit.
                return {
                    name
                    for name, (version, tensor) in before.items()
                    if dense[name]._version != version or not torch.equal(after[name], tensor)
                }
    return None


def uniform_axes(tensor: Tensor) -> tuple[int, ...]:
    """The axes of two or more entries along which all entries are equal, bit for bit.

    >>> uniform_axes(torch.tensor([[1.0, 2.0], [1.0, 2.0]]))
    (0,)
    """
    return tuple(
        axis for axis, size in enumerate(tensor.shape) if size > 1 and bool((tensor == tensor.narrow(axis, 0, 1)).all())
    )


def differing(frozen: Mapping[str, tuple[int, ...]], state: Mapping[str, Tensor], lead: int = 0) -> str | None:
    """The first constant whose entries are not equal along an axis where they were; `lead` axes come before."""
    for name, axes in frozen.items():
        tensor = state.get(name)
        for axis in axes if tensor is not None else ():
            assert tensor is not None
            if tensor.dim() <= axis + lead or not bool((tensor == tensor.narrow(axis + lead, 0, 1)).all()):
                return name
    return None
