"""Tensors that no symmetry moves by itself: constants of the function, and companions that a call never reads.

Constants are frozen parameters, and buffers that training does not update. A constant is never moved; units whose
entries in it are all equal may still change places, because then nothing in it would have to move.

A tensor that the call does not read (the deviation that a Bayesian layer keeps beside each mean, a second head) stays
as it is, since nothing about it can be proved; it is named, and moves along with another tensor if the user says so.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from onebasin.errors import InputError, SymmetryError
from onebasin.functional import Inputs, call_arguments, frozen_norms, training_mode
from onebasin.state import is_statistic, shared_names, state_of, trained_parameters

if TYPE_CHECKING:
    from onebasin.symmetry.group import Symmetry
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
    for times in (1, 2):
        arguments, options = with_noise(call_arguments(inputs), generator, times=times, scale=1.0)
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


def with_noise(call: Any, generator: torch.Generator, *, times: int = 1, scale: float = 0.5) -> Any:
    """The arguments of a call with normal noise of deviation `scale` on floating-point tensors, repeated `times`."""

    def noisy(value: Any) -> Any:
        if not isinstance(value, Tensor) or not (value.dim() or times == 1):
            return value
        value = value.repeat(times, *[1] * (value.dim() - 1)) if times > 1 else value
        if not value.is_floating_point():
            return value
        noise = torch.randn(value.shape, generator=generator, dtype=torch.promote_types(value.dtype, torch.float32))
        return value + scale * noise.to(value)

    return tree_map(noisy, call)


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


UNREAD = "it is not read by this call"
COMPANIONS = ("value", "std", "log-std", "softplus", "mask")
"""How a companion takes the factor m of its weight: times m, times |m|, plus log |m|, as r of the deviation
log(1 + exp(r)) that is multiplied by |m|, or not at all. All of them follow permutations."""

Companions = Mapping[str, tuple[str, str]]


def with_companions(symmetry: Symmetry, wanted: Companions | None, parameters: Sequence[str]) -> Symmetry:
    """The symmetry with its companions, and with a sentence about every other parameter that the call does not read.

    Args:
        symmetry: as analysed; tensors that are not read are rigid for the reason `UNREAD`.
        wanted: name -> (name of the tensor that it goes along with, how); names are those of tensors, or last parts of
            such names, which then speak of all modules that have both.
        parameters: the trained parameters of the model.
    """
    unread = dict.fromkeys(name for name, _, why in symmetry.rigid if why == UNREAD and name in parameters)
    found: dict[str, tuple[str, str]] = {}
    for name, value in (wanted or {}).items():
        pairs = _pairs(symmetry, name, value)
        for own, (leader, _) in pairs.items():
            if own not in unread:
                raise InputError(
                    f"expected companions that the call does not read, found {own}, which it reads: leave it out, how "
                    "it moves is found by itself"
                )
            if symmetry.shapes[own] != symmetry.shapes[leader]:
                raise InputError(
                    f"expected companions of the shape of their tensor, found {own} {symmetry.shapes[own]} beside "
                    f"{leader} {symmetry.shapes[leader]}: name another tensor"
                )
        found |= pairs
    if not symmetry.spaces:
        return replace(symmetry, companions=found)
    rigid = tuple(row for row in symmetry.rigid if row[0] not in unread)
    said = _sentences(symmetry, [name for name in unread if name not in found])
    return replace(symmetry, companions=found, rigid=rigid, unexplained=(*symmetry.unexplained, *said))


def _pairs(symmetry: Symmetry, name: str, value: tuple[str, str]) -> dict[str, tuple[str, str]]:
    if not isinstance(value, tuple | list) or len(value) != 2 or value[1] not in COMPANIONS:
        raise InputError(
            f"expected companions as {{name: (tensor, how)}} with how out of {', '.join(COMPANIONS)}, found {value!r} "
            f"for {name}: write for example {{'weight_rho': ('weight_mu', 'softplus')}}"
        )
    leader, how = value
    if name in symmetry.shapes and leader in symmetry.shapes:
        return {name: (leader, how)}
    pairs = {}
    for own in symmetry.shapes:
        module, dot, last = own.rpartition(".")
        if last == name and module + dot + leader in symmetry.shapes:
            pairs[own] = (module + dot + leader, how)
    if not pairs:
        raise InputError(
            f"expected companions among the tensors of the model, found no {name!r} beside a {leader!r}: give names as "
            "in the state dict, or their last parts"
        )
    return pairs


def _sentences(symmetry: Symmetry, unread: Sequence[str]) -> list[str]:
    moved = {leg.tensor: None for space in symmetry.spaces for leg in space.legs}
    said, alone = [], []
    for name in unread:
        module = name.rpartition(".")[0]
        twins = [
            other for other in moved if symmetry.shapes[other] == symmetry.shapes[name]
            and other.rpartition(".")[0] == module
        ]  # fmt: skip
        if not twins:
            alone.append(name)
            continue
        said.append(
            f"{name}: {UNREAD} and stays as it is, but has the shape of {' and '.join(twins)}, which moves; if they "
            f"belong together, as a deviation beside a mean, say how: companions={{'{name}': ('{twins[0]}', "
            "'softplus')}, or 'std', 'log-std', 'value', 'mask'"
        )
    if alone:
        said.append(
            f"{', '.join(alone)}: not read by this call and left as they are; another call that reads them (a second "
            "head, an optional input) may change: discover with that call, or freeze them"
        )
    return said


def moved_companion(moved: Tensor, factor: Tensor, how: str, kind: str, name: str) -> Tensor:
    """A companion under an element.

    Args:
        moved: its entries in their new order.
        factor: m of each entry, as it acts on the tensor that the companion goes along with.
        how: one of `COMPANIONS`.
        kind: what the tensors are, as in `Symmetry.apply`.
        name: for messages.
    """
    if kind == "mask" or how == "mask" or bool((factor == 1).all()):
        return moved
    size = factor.abs()
    if how in ("value", "std"):
        power = {"value": 1, "std": 1, "variance": 2, "gradient": -1, "squared-gradient": -2}[kind]
        base = size if how == "std" or kind == "std" else factor
        return (moved.double() * base**power).to(moved.dtype)
    if how == "log-std":
        return (moved.double() + size.log()).to(moved.dtype) if kind == "value" else moved
    if kind != "value" and bool((size != 1).any()):
        raise SymmetryError(
            f"the companion {name!r} is the inverse softplus of a deviation: scales move its value, but there is no "
            f"exact {kind} of it; use an element without scales."
        )
    if kind != "value":
        return moved
    std = torch.nn.functional.softplus(moved.double()) * size
    return torch.where(size == 1, moved, (std + torch.log(-torch.expm1(-std))).to(moved.dtype))
