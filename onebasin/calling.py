"""How somebody's model is called: its arguments, and what must be as before afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from onebasin.errors import InputError

Inputs = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]
Call = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments


def call_arguments(inputs: Inputs) -> Call:
    """Split `inputs` into positional and keyword arguments.

    >>> call_arguments({"x": 1})
    ((), {'x': 1})
    """
    if isinstance(inputs, Tensor):
        return (inputs,), {}
    if isinstance(inputs, tuple | list):
        return tuple(inputs), {}
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    raise InputError(
        f"inputs must be a tensor, a tuple of positional or a dict of keyword inputs, found {type(inputs).__name__}; "
        "wrap several inputs as (x, y) or {'x': x, 'y': y}."
    )


@contextlib.contextmanager
def global_seed(seed: int) -> Iterator[None]:
    """Seed torch's global generator inside the block and restore it afterwards.

    Constructors of layers draw their weights from there, and so does dropout; neither takes a generator.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put every submodule into evaluation mode; on exit all attributes of all modules are the objects they were before.

    See `left_as_it_was`.
    """
    with left_as_it_was(model):
        for module in model.modules():
            vars(module)["training"] = False
        yield


@contextlib.contextmanager
def training_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into training mode; on exit all is as before, running statistics too.

    A model that is in training mode already keeps the flag of every submodule: parts may be held in evaluation mode
    on purpose, as frozen batch norms are.
    """
    with left_as_it_was(model):
        if not model.training:
            for module in model.modules():
                vars(module)["training"] = True
        yield


@contextlib.contextmanager
def left_as_it_was(model: nn.Module) -> Iterator[None]:
    """On exit all attributes of all modules are the objects they were before, and all buffers hold what they held.

    Flags of the mode are set directly: a `train()` override may do more than flip a flag, and must not run. Attributes
    are restored one by one because torch.export puts back equal tuples and lists instead of the same ones.
    """
    before = [(module, dict(vars(module))) for module in model.modules()]
    members: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (held, dict(held)) for module, _ in before for held in (module._parameters, module._buffers, module._modules)
    ]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]  # a forward pass may count steps or average
    try:
        yield
    finally:
        for module, attributes in before:
            vars(module).clear()
            vars(module).update(attributes)
        for held, content in members:
            if [(k, id(v)) for k, v in held.items()] != [(k, id(v)) for k, v in content.items()]:
                held.clear()
                held.update(content)
        with torch.no_grad():
            for buffer, value in buffers:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
