"""How somebody's model is called: its arguments, and what must be as before afterwards."""

from __future__ import annotations

import contextlib
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


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put every submodule into evaluation mode; on exit all attributes of all modules are the objects they were before.

    The flags are set directly: a `train()` override may do more than flip a flag, and must not run here. Attributes
    are restored one by one because torch.export puts back equal tuples and lists instead of the same ones.
    """
    before = [(module, dict(vars(module))) for module in model.modules()]
    members: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (held, dict(held)) for module, _ in before for held in (module._parameters, module._buffers, module._modules)
    ]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]  # a forward pass may count steps or average
    try:
        for module, _ in before:
            vars(module)["training"] = False
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


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, without gradient; on exit every module and the global generator are as before."""
    with evaluation_mode(model), torch.no_grad(), torch.random.fork_rng(devices=[]):
        yield
