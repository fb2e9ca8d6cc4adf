"""How somebody's model is called: its arguments, and what must be as before afterwards."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

from onebasin.errors import InputError, SpecError
from onebasin.state import State, TensorSpec, as_spec, check_spec, shared_names, spec_of

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


def examples_in(inputs: Inputs) -> int:
    """Number of examples: the common length of the first axis of all tensors.

    >>> examples_in((torch.zeros(5, 2), torch.zeros(5)))
    5
    """
    tensors = [leaf for leaf in tree_leaves(call_arguments(inputs)) if isinstance(leaf, Tensor) and leaf.dim()]
    lengths = {len(tensor) for tensor in tensors}
    if len(lengths) != 1 or lengths == {0}:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors) or "no tensor"
        raise InputError(
            f"expected input tensors with one and the same number of examples on the first axis, found {shapes}: "
            "give every input one row per example"
        )
    return lengths.pop()


def batches(inputs: Inputs, size: int) -> Iterator[tuple[slice, Call]]:
    """Yield (rows, arguments) with at most `size` examples each.

    The pieces are as equal as can be: a last batch of one example would have no variance.

    >>> [rows for rows, _ in batches(torch.zeros(7), 3)]
    [slice(0, 3, None), slice(3, 5, None), slice(5, 7, None)]
    """
    if size < 1:
        raise InputError(f"a batch has at least 1 example, found {size}: leave batch out for 1000")
    count, call = examples_in(inputs), call_arguments(inputs)
    pieces = -(-count // size)
    start = 0
    for piece in range(pieces):
        stop = start + count // pieces + (piece < count % pieces)
        rows = slice(start, stop)
        yield rows, rows_of(call, rows)
        start = stop


def moved(call: Call, device: torch.device, dtype: torch.dtype | None) -> Call:
    """The arguments on a device, floating-point ones in a dtype if one is given."""
    result: Call = tree_map(lambda value: _moved(value, device, dtype), call)
    return result


def _moved(value: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.to(device=device, dtype=dtype if value.is_floating_point() else None)


def rows_of(call: Call, rows: slice | Tensor) -> Call:
    """The arguments of some of the examples."""
    result: Call = tree_map(lambda value: value[rows] if isinstance(value, Tensor) and value.dim() else value, call)
    return result


def check_fits(model: nn.Module, state: Mapping[str, Tensor], *, members: bool = False) -> None:
    """Raise `SpecError` unless names and shapes are those of the model, and shared tensors have one value.

    Dtypes may differ: the same function is worked with in float32 and proved in float64.

    Args:
        model: the module.
        state: one network, or many with a leading member axis.
        members: whether there is such an axis.
    """
    expected = as_spec(model)
    found = {
        name: TensorSpec(tensor.shape[1:] if members else tensor.shape, expected[name].dtype)
        if name in expected
        else tensor
        for name, tensor in spec_of(state).items()
    }
    check_spec(found, expected, where=f"as a state of {type(model).__name__}, what was given")
    for name, first in shared_names(model).items():
        if name != first and not torch.allclose(state[name], state[first], rtol=0, atol=0, equal_nan=True):
            raise SpecError(
                f"{name} and {first} are one tensor in {type(model).__name__}, but their values in the state differ: "
                "give both the same value"
            )


def as_seen(model: nn.Module, state: Mapping[str, Tensor]) -> State:
    """The tensors as the model may see them: wide enough to compute with, and copies where it could write."""
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    seen: State = {}
    for name, first in shared_names(model).items():
        if first in seen:
            seen[name] = seen[first]
            continue
        value = state[name].detach()
        if value.is_floating_point() and value.dtype.itemsize < 4:
            value = value.float()
        seen[name] = value.clone() if name in buffers else value
    return seen


def floating_dtype(tensors: Mapping[str, Tensor]) -> torch.dtype | None:
    """The dtype of all floating-point tensors, None if there are several or no such tensors."""
    dtypes = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    return dtypes.pop() if len(dtypes) == 1 else None


def fixed_buffers(model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> State:
    """Copies of all buffers of the module; those outside of its state dict are part of the function."""
    return {
        name: buffer.detach().to(device=device, dtype=dtype if buffer.is_floating_point() else None, copy=True)
        for name, buffer in model.named_buffers(remove_duplicate=False)
    }


def described(call: Call) -> str:
    """Shapes and dtypes of arguments, for messages."""

    def word(value: Any) -> str:
        if isinstance(value, Tensor):
            return f"{str(value.dtype).removeprefix('torch.')}[{'x'.join(map(str, value.shape))}]"
        return type(value).__name__

    arguments, options = call
    return ", ".join([word(value) for value in arguments] + [f"{key}={word(value)}" for key, value in options.items()])


def run_with(model: nn.Module, tensors: Mapping[str, Tensor], call: Call) -> Any:
    """What a model returns with these parameters and buffers, in whatever mode it is.

    Raises:
        InputError: its forward refuses these arguments.
    """
    arguments, options = call
    try:
        return functional_call(model, dict(tensors), arguments, options, tie_weights=False)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise InputError(
            f"{type(model).__name__} could not be called with ({described(call)}): "
            f"{type(error).__name__}: {error}. Give inputs of the shapes and dtypes that its forward expects"
        ) from error
