"""Starting points of chains: fresh random networks, the model's own weights, or the members of a population."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from onebasin.errors import InputError
from onebasin.functional import check_fits, global_seed
from onebasin.inference.kernel import Draws
from onebasin.inference.seeds import derived, generator
from onebasin.inference.target import DensityEvaluation, ParameterLayout, is_frozen, widened
from onebasin.population import Population
from onebasin.state import State

Start = str | Population


def first_networks(model: nn.Module, layout: ParameterLayout, start: Start, chains: Sequence[int], seed: int) -> Draws:
    """The first network of each chain.

    Newly initialised for "fresh", the weights of the model for "model"; of a population, member c mod n for chain c.
    """
    if isinstance(start, Population):
        if not len(start):
            raise InputError("expected networks to start from, found an empty population: add members")
        rows = start[[chain % len(start) for chain in chains]].stacked()
        check_fits(model, rows, members=True)
        states = [{name: value[row] for name, value in rows.items()} for row in range(len(chains))]
    elif start == "model":
        states = [dict(model.state_dict())] * len(chains)
    elif start == "fresh":
        states = [fresh(model, seed, chain) for chain in chains]
    else:
        raise InputError(f'expected start "fresh", "model" or a Population, found {start!r}: give "fresh"')
    position = torch.stack([layout.join(state) for state in states]).to(layout.device)
    buffers = {
        name: torch.stack([widened(state[name].detach()) for state in states]) for name in layout.buffers_of(model)
    }
    return Draws(position, buffers, torch.full((len(chains),), float("nan"), dtype=torch.float64))


def check_start(evaluation: DensityEvaluation, chains: Sequence[int]) -> None:
    """Raise for starts where density or gradient is not finite: no sampler finds a way out of there."""
    bad = ~evaluation.finite
    if bool(bad.any()):
        raise InputError(
            "expected a finite log density at the start, found none at the start of chain "
            f"{chains[int(bad.nonzero()[0])]}: train the starting networks (epochs=...), use a tighter prior, or give "
            "start= yourself"
        )


def fresh(model: nn.Module, seed: int, chain: int) -> State:
    """A new network of the architecture: every module with `reset_parameters` draws its weights again.

    Parameters of modules without one get normal numbers with the mean and spread they have in `model`; where all
    entries are alike (a gain of one, a bias of zero) they stay. What is frozen stays as it is: parameters that require
    no gradient, and buffers of modules that have parameters, all of them frozen.
    """
    twin = copy.deepcopy(model)
    with global_seed(derived(seed, "initial", chain)):
        for module in twin.modules():
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
    _thaw_nothing(model, twin)
    stream = generator(seed, "initial spread", chain)
    for value in unreset(twin):
        if value.numel() > 1:
            before = value.detach()
            noise = torch.randn(before.shape, generator=stream, dtype=torch.float32).to(before)
            spread = before.float().std()
            if float(spread) > 0:
                value.data = before.float().mean().to(before) + spread.to(before) * noise
    return {name: value.detach() for name, value in twin.state_dict().items() if isinstance(value, Tensor)}


def unreset(model: nn.Module) -> list[nn.Parameter]:
    """Parameters to be sampled that belong to no module which can reset them."""
    known = {id(value) for module in model.modules() if _resets(module) for value in module.parameters(recurse=False)}
    return [value for value in model.parameters() if value.requires_grad and id(value) not in known]


def _resets(module: nn.Module) -> bool:
    return callable(getattr(module, "reset_parameters", None))


def _thaw_nothing(model: nn.Module, twin: nn.Module) -> None:
    """Give a reset twin back what is frozen in the model."""
    for old, new in zip(model.parameters(), twin.parameters(), strict=True):
        if not old.requires_grad:
            new.data = old.detach().clone()
    for module, other in zip(model.modules(), twin.modules(), strict=True):
        if is_frozen(module):
            for name, buffer in module.named_buffers(recurse=False):
                setattr(other, name, buffer.detach().clone())
