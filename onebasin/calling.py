"""How somebody's model is called: its arguments, and what must be as before afterwards."""

from __future__ import annotations

import contextlib
from collections import deque
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


Container = dict[Any, Any] | list[Any] | set[Any] | deque[Any]
CONTAINERS = (dict, list, set, deque, tuple)
HOOKS = frozenset(name for name in vars(nn.Module()) if name.endswith(("_hooks", "_with_kwargs", "_always_called")))


def containers(model: nn.Module) -> list[Container]:
    """The attributes of every module, as the dict that holds them, and all dicts, lists and sets inside of these."""
    found: dict[int, Any] = {}
    todo: list[Any] = []
    for module in model.modules():
        held = vars(module)
        found[id(held)] = held
        todo += [item for name, item in held.items() if isinstance(item, CONTAINERS) and name not in HOOKS]
    while todo:
        held = todo.pop()
        if id(held) not in found:
            found[id(held)] = held
            todo += [
                item for item in (held.values() if isinstance(held, dict) else held) if isinstance(item, CONTAINERS)
            ]
    return [held for held in found.values() if not isinstance(held, tuple)]


@contextlib.contextmanager
def attributes_kept(model: nn.Module, held: list[Container] | None = None) -> Iterator[None]:
    """On exit all attributes of all modules, and what their dicts, lists and sets hold, are the objects they were.

    `held` is `containers(model)`, for who has it already.
    """
    held = containers(model) if held is None else held
    before: list[Any] = [dict(each) if isinstance(each, dict) else list(each) for each in held]
    try:
        yield
    finally:
        for each, content in zip(held, before, strict=True):
            _put_back(each, content)


def _put_back(held: Any, content: Any) -> None:
    keyed = isinstance(held, dict)
    if keyed and len(held) == len(content):
        pairs = zip(held.items(), content.items(), strict=True)
        same = all(key == other and item is old for (key, item), (other, old) in pairs)
    else:
        same = len(held) == len(content) and all(item is old for item, old in zip(held, content, strict=True))
    if not same:
        held.clear()
        held.update(content) if keyed or isinstance(held, set) else held.extend(content)


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put every submodule into evaluation mode; on exit the model is as it was, see `left_as_it_was`."""
    with left_as_it_was(model):
        for module in model.modules():
            vars(module)["training"] = False
        yield


@contextlib.contextmanager
def training_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into training mode; on exit it is as it was, running statistics too.

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
    """On exit the model is as it was, with all that it remembers.

    Flags of the mode are set directly: a `train()` override may do more than flip a flag, and must not run. Attributes
    are restored one by one because torch.export puts back equal tuples and lists instead of the same ones; the values
    of buffers and other tensors that are no parameters, because a forward pass may count steps or average.
    """
    held = containers(model)
    with attributes_kept(model, held):
        values = [(tensor, tensor.detach().clone()) for tensor in _unregistered(held)]
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, value in values:
                    if not torch.equal(tensor, value):
                        tensor.copy_(value)


def _unregistered(held: list[Container]) -> list[Tensor]:
    """Tensors that are no parameters: buffers and plain attributes. Only dense ones are written to in place."""
    items = (item for each in held for item in (each.values() if isinstance(each, dict) else each))
    tensors = {id(item): item for item in items if isinstance(item, Tensor) and not isinstance(item, nn.Parameter)}
    return [tensor for tensor in tensors.values() if tensor.layout == torch.strided and not tensor.is_meta]
