"""What a model computes with the weights of a State; the module is only the function and stays as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from onebasin.calling import Call, Inputs, evaluation_mode
from onebasin.errors import InputError, SpecError
from onebasin.predict.batches import batches, moved
from onebasin.state import State, TensorSpec, as_spec, check_spec, shared_names, spec_of

BATCH = 1000  # examples per forward pass: enough to fill a processor, small against memory


def outputs(model: nn.Module, state: Mapping[str, Tensor], inputs: Inputs, *, batch: int = BATCH) -> Tensor:
    """Return what `model` gives for `inputs` with the weights `state`, in evaluation mode and without gradient.

    >>> layer = nn.Linear(2, 1)
    >>> outputs(layer, {"weight": torch.ones(1, 2), "bias": torch.zeros(1)}, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor([[3.],
            [7.]])

    Args:
        model: the function. Neither its weights nor its mode matter, and it is left exactly as it was.
        state: parameters and buffers. They decide device and dtype: floating-point inputs follow. Half precision is
            computed in float32 and given back in its dtype.
        inputs: a tensor, a tuple of positional or a dict of keyword inputs, one example per row of every tensor.
        batch: largest number of examples in one forward pass.

    Raises:
        SpecError: the state is not one of this model.
        InputError: the model cannot be called like this, or gives something else than one tensor.
    """
    return narrowed(wide_outputs(model, state, inputs, batch=batch), state)


def wide_outputs(model: nn.Module, state: Mapping[str, Tensor], inputs: Inputs, *, batch: int = BATCH) -> Tensor:
    """As `outputs`, in the dtype of the computation: float32 for half precision."""
    bound = Bound(model, state)
    return torch.cat([bound(call) for _, call in batches(inputs, batch)])


class Bound:
    """A model tied to the weights of one State: a pure function of its arguments.

    Attributes:
        tensors: state-dict name -> the tensor the model sees; at least float32, buffers copied, one object for all
            names of a shared tensor.
        dtype: the dtype of all floating-point tensors, None if they have several.
        device: where they are.
    """

    def __init__(self, model: nn.Module, state: Mapping[str, Tensor]) -> None:
        """Check that the state is one of this model."""
        check_fits(model, state)
        self.model = model
        self.tensors = as_seen(model, state)
        self.dtype = floating_dtype(self.tensors)
        self.device = next(iter(self.tensors.values()), torch.zeros(())).device
        self._everything = {**fixed_buffers(model, self.device, self.dtype), **self.tensors}

    def __call__(self, call: Call, *, grad: bool = False) -> Tensor:
        """One forward pass; with `grad` it is recorded for what happens to require a gradient."""
        return one_tensor(self.model, self.run(call, grad=grad))

    def run(self, call: Call, *, grad: bool = False) -> Any:
        """The same for a model that may return anything, for those who only watch it."""
        arguments, options = moved(call, self.device, self.dtype)
        with undisturbed(self.model), torch.set_grad_enabled(grad):
            try:
                return functional_call(self.model, self._everything, arguments, options, tie_weights=False)
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                raise InputError(
                    f"{type(self.model).__name__} could not be called with ({described(call)}): "
                    f"{type(error).__name__}: {error}. Give inputs of the shapes and dtypes that its forward expects"
                ) from error


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


def narrowed(result: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    """The result of a wide computation in the dtype of weights in half precision, else as it is."""
    dtype = floating_dtype(tensors)
    return result.to(dtype) if dtype and dtype.itemsize < 4 and result.is_floating_point() else result


def fixed_buffers(model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> State:
    """Copies of all buffers of the module; those outside of its state dict are part of the function."""
    return {
        name: buffer.detach().to(device=device, dtype=dtype if buffer.is_floating_point() else None, copy=True)
        for name, buffer in model.named_buffers(remove_duplicate=False)
    }


def one_tensor(model: nn.Module, result: Any) -> Tensor:
    """Refuse anything but one tensor."""
    if not isinstance(result, Tensor):
        raise InputError(
            f"expected one tensor from {type(model).__name__}, found {type(result).__name__}: "
            "wrap the model in a module whose forward returns the tensor you mean"
        )
    return result


def described(call: Call) -> str:
    """Shapes and dtypes of arguments, for messages."""

    def word(value: Any) -> str:
        if isinstance(value, Tensor):
            return f"{str(value.dtype).removeprefix('torch.')}[{'x'.join(map(str, value.shape))}]"
        return type(value).__name__

    arguments, options = call
    return ", ".join([word(value) for value in arguments] + [f"{key}={word(value)}" for key, value in options.items()])


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, without gradient; on exit every module and the global generator are as before."""
    with evaluation_mode(model), torch.no_grad(), torch.random.fork_rng(devices=[]):
        yield
