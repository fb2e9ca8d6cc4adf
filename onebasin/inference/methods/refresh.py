"""Batch norm of networks that were drawn, not trained: their running statistics are measured on the training data."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_unflatten

from onebasin.calling import global_seed
from onebasin.inference.density.target import Target
from onebasin.predict.batches import batches
from onebasin.state import State


def tracked(model: nn.Module) -> dict[str, _NormBase]:
    """Layers with running statistics, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _NormBase) and module.running_mean is not None
    }


def refreshed(target: Target, position: Tensor, rest: State, *, seed: int = 0) -> State:
    """The rest (chains, ...) with running means and variances of the networks at `position` (chains, D).

    What `torch.optim.swa_utils.update_bn` does for one network is done for all at once: passes over the data in
    training mode, in pieces of `target.piece` examples, with the statistics of the pieces averaged equally. In pass k a
    momentum of 1 / k makes the running value that average. Without such layers the rest comes back as it is.

    Args:
        target: the posterior, whose data are used.
        position: the networks.
        rest: what they carry beside their weights.
        seed: of the model's own random numbers.
    """
    if target.outputs is None or not tracked(target.outputs.model):
        return rest
    called = copy.deepcopy(target.outputs)  # momenta are changed
    layers = tracked(called.model)
    own = {f"{name}.{key}" if name else key for name, layer in layers.items() for key, _ in layer.named_buffers()}
    now = {name: torch.zeros_like(value) if name in own else value for name, value in rest.items()}

    def after(sampled: State, beside: State, call: Any) -> State:
        return called(sampled, beside, call, True)[1]

    several = vmap(after, in_dims=(0, 0, None), randomness="different")
    with torch.no_grad(), global_seed(seed):
        for number, (rows, _) in enumerate(batches(tuple(target.leaves), target.piece), start=1):
            for layer in layers.values():
                layer.momentum = 1 / number
            call, _ = tree_unflatten([leaf[rows] for leaf in target.leaves], target.structure)
            now = several(target.layout.split(position), now, call)
    return {name: now[name] if name in own else value for name, value in rest.items()}
