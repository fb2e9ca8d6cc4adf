"""Inputs around those that are given: where a predictive should also be kept, and nobody has labels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from onebasin.calling import Call, Inputs, call_arguments
from onebasin.predict.batches import examples_in

Change = Callable[[Tensor], Tensor]


def surroundings(inputs: Inputs, *, noise: float, mixed: int, generator: torch.Generator) -> Inputs:
    """The inputs x themselves, a noisy copy of each, and `mixed` copies that are mixtures of two of them.

    >>> given = torch.tensor([[0.0], [1.0]])
    >>> around = surroundings(given, noise=2.0, mixed=3, generator=torch.Generator().manual_seed(0))
    >>> around[0].shape, bool(((around[0][4:] >= 0) & (around[0][4:] <= 1)).all())
    (torch.Size([10, 1]), True)

    Noisy: x + noise s u z, with s the standard deviation of the tensor, z standard normal numbers and u uniform in
    (0, 1) for each example, so that copies are near and far. Mixed: u x + (1 - u) x', with x' another input. Tensors
    of whole numbers, such as tokens, are copied as they are; where there are no others, nothing is added.

    Args:
        inputs: a tensor, a tuple of positional or a dict of keyword inputs, one example per row of every tensor.
        noise: largest noise, in standard deviations; 0 for no noisy copies.
        mixed: number of mixtures for each input.
        generator: of everything random.
    """
    call, count = call_arguments(inputs), examples_in(inputs)
    if not any(map(_continuous, (*call[0], *call[1].values()))):
        return inputs
    kinds: list[Change] = [lambda value: value]
    if noise:
        kinds.append(_noisy(count, noise, generator))
    kinds += [_mixed(count, generator) for _ in range(mixed)]
    return _joined(call, kinds)


def around(inputs: Inputs, generator: torch.Generator) -> dict[str, Inputs]:
    """As many inputs of three other kinds; nothing where there are only whole numbers, such as tokens.

    "noisy inputs" and "mixed inputs" are those of `surroundings` with noise=2 and mixed=1. "uniform noise" is drawn
    between the smallest and the largest number of each tensor: inputs that look like nothing.
    """
    call, count = call_arguments(inputs), examples_in(inputs)
    if not any(map(_continuous, (*call[0], *call[1].values()))):
        return {}
    kinds = {
        "noisy inputs": _noisy(count, 2.0, generator),
        "mixed inputs": _mixed(count, generator),
        "uniform noise": _uniform(generator),
    }
    return {name: _joined(call, [kind]) for name, kind in kinds.items()}


def _joined(call: Call, kinds: list[Change]) -> Inputs:
    """All kinds of copies of every tensor, one below the other."""

    def every(value: object) -> object:
        if not isinstance(value, Tensor) or not value.dim():
            return value
        return torch.cat([kind(value) if _continuous(value) else value for kind in kinds])

    arguments, options = call
    if options:
        return {name: every(value) for name, value in options.items()}
    return tuple(every(value) for value in arguments)


def _noisy(count: int, noise: float, generator: torch.Generator) -> Change:
    near = torch.rand(count, generator=generator, device=generator.device)

    def change(value: Tensor) -> Tensor:
        drawn = torch.randn(value.shape, generator=generator, device=generator.device).to(value)
        return value + noise * value.std(correction=0) * _per_example(near, value) * drawn

    return change


def _mixed(count: int, generator: torch.Generator) -> Change:
    """One partner and one share for each example, the same for all its tensors."""
    partner = torch.randperm(count, generator=generator, device=generator.device)
    share = torch.rand(count, generator=generator, device=generator.device)

    def change(value: Tensor) -> Tensor:
        part = _per_example(share, value)
        return part * value + (1 - part) * value[partner.to(value.device)]

    return change


def _uniform(generator: torch.Generator) -> Change:
    def change(value: Tensor) -> Tensor:
        drawn = torch.rand(value.shape, generator=generator, device=generator.device).to(value)
        return value.min() + (value.max() - value.min()) * drawn

    return change


def _per_example(numbers: Tensor, like: Tensor) -> Tensor:
    return numbers.to(like).reshape(-1, *[1] * (like.dim() - 1))


def _continuous(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.is_floating_point()
