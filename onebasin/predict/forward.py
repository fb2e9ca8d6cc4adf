"""What a model computes with the weights of a State; the module is only the function and stays as it was."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from onebasin.calling import (
    Call,
    Inputs,
    as_seen,
    batches,
    check_fits,
    described,
    fixed_buffers,
    floating_dtype,
    moved,
    run_with,
)
from onebasin.errors import InputError
from onebasin.memory import undisturbed

__all__ = [
    "BATCH",
    "Bound",
    "as_seen",
    "check_fits",
    "described",
    "fixed_buffers",
    "floating_dtype",
    "narrowed",
    "one_tensor",
    "outputs",
    "wide_outputs",
]

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
        with undisturbed(self.model, call), torch.set_grad_enabled(grad):
            return run_with(self.model, self._everything, moved(call, self.device, self.dtype))


def narrowed(result: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    """The result of a wide computation in the dtype of weights in half precision, else as it is."""
    dtype = floating_dtype(tensors)
    return result.to(dtype) if dtype and dtype.itemsize < 4 and result.is_floating_point() else result


def one_tensor(model: nn.Module, result: Any) -> Tensor:
    """Refuse anything but one tensor."""
    if not isinstance(result, Tensor):
        raise InputError(
            f"expected one tensor from {type(model).__name__}, found {type(result).__name__}: "
            "wrap the model in a module whose forward returns the tensor you mean"
        )
    return result
