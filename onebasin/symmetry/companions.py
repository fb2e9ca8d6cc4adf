"""Tensors that a call never reads: named, never moved by themselves, and moved along with another if the user says so.

A Bayesian layer keeps a deviation beside each mean, which a call in evaluation mode does not read; a model with two
heads reads one of them. Nothing can be proved about such tensors, and they stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from onebasin.errors import InputError, SymmetryError

if TYPE_CHECKING:
    from onebasin.symmetry.group import Symmetry

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
