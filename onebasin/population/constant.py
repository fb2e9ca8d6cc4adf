"""Tensors that are the same in all members of a population."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from onebasin.population.parting import parts

if TYPE_CHECKING:
    from onebasin.population.crowd import Population


def constant_tensors(population: Population, names: Iterable[str]) -> set[str]:
    """The names among `names` of tensors that are equal bit for bit in all members; none of an empty population.

    A tensor is not looked at any more once two members differ in it, and reading stops when none is left: of a
    population of sampled networks the first block.

    Args:
        population: the networks.
        names: tensors to look at.
    """
    left = set(names) if len(population) else set()
    first = population.member(0) if left else {}
    for _, part in parts(population) if left else ():
        block = part.stacked()
        left = {name for name in left if torch.equal(block[name], first[name].expand_as(block[name]))}
        if not left:
            break
    return left
