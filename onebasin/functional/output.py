"""The part of a model's output that counts: a key of a dict, an attribute of a dataclass, a place of a tuple."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

from torch import Tensor, nn

from onebasin.errors import InputError

OutputPart = str | int | None
"""`output` of public functions: the name or place of the tensor meant, None where a model returns one tensor."""


def select_output(model: Any, output: OutputPart = None) -> Any:
    """Return the model, or one with the same tensors whose calls give one part of what the model returns.

    Names of parameters and buffers, submodules, hooks and memory are those of the model; it is not changed.

    >>> import torch
    >>> class Two(nn.Linear):
    ...     def forward(self, x):
    ...         return {"logits": super().forward(x), "hidden": x}
    >>> model = Two(2, 3)
    >>> chosen = select_output(model, "logits")
    >>> chosen(torch.zeros(4, 2)).shape, list(chosen.state_dict()), chosen.weight is model.weight
    (torch.Size([4, 3]), ['weight', 'bias'], True)

    Args:
        model: the module.
        output: a key of a dict, an attribute, or the number of a part; None for the model itself.

    Raises:
        InputError: the model is no module, or `output` neither a name nor a number.
    """
    if not isinstance(model, nn.Module):
        named = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        remedy = "the order is model, networks, data"
        if isinstance(model, type):
            remedy = f"call it, as {model.__name__}()"
        elif callable(model):
            remedy = "wrap functions in a module"
        raise InputError(f"expected a torch.nn.Module as the model, found {named}: {remedy}")
    if output is None:
        return model
    if not isinstance(output, str | int) or isinstance(output, bool):
        raise InputError(f'expected output as a name or a number, found {output!r}: give one, as output="logits"')
    chosen = _empty(type(model), output)
    vars(chosen).update(vars(model))  # registries of tensors and modules are shared
    return chosen


def _empty(kind: type[nn.Module], output: str | int) -> nn.Module:
    made: Any = _selected_class  # torch types its modules as not hashable
    empty: nn.Module = object.__new__(made(kind, output))
    return empty


@cache
def _selected_class(kind: type[nn.Module], output: str | int) -> type[nn.Module]:
    """A class whose instances are called as those of `kind`, and give a part.

    A class and no wrapper, so that names in the state dict stay, and `self` in the forward pass is the module whose
    mode is set.
    """

    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        return part_of(kind.__call__(self, *arguments, **options), output, kind.__name__)

    def reduced(self: Any, protocol: Any) -> Any:  # the class has no place to be imported from
        return _empty, (kind, output), dict(vars(self))

    name = f"{kind.__name__}[{output!r}]"
    return type(name, (kind,), {"__call__": call, "__reduce_ex__": reduced, "__module__": __name__})


def part_of(result: Any, output: str | int, name: str = "the model") -> Any:
    """One part of what a model returned.

    >>> part_of({"loc": 1, "scale": 2}, "loc"), part_of((3, 4), 1)
    (1, 4)

    Raises:
        InputError: there is no such part.
    """
    if isinstance(result, Tensor):
        words = ("probabilities", "logits", "values")
        hint = f" (for {output} of the predictions write quantity={output!r})" if output in words else ""
        raise InputError(
            f"output={output!r} names a part of what {name} returns, found one tensor: leave output out{hint}"
        )
    known = parts(result)
    if isinstance(output, int):
        values = list(known.values())
        if -len(values) <= output < len(values):
            return values[output]
    elif output in known:
        return known[output]
    elif not known and hasattr(result, output):
        return getattr(result, output)
    raise InputError(
        f"{name} returns {_named(known) or type(result).__name__}, and no part {output!r}: give {_suggested(known)}"
    )


def parts(result: Any) -> dict[Any, Any]:
    """The parts of what a model returned, by name or number; empty where none are known."""
    if isinstance(result, Mapping):
        return dict(result)
    if is_dataclass(result) and not isinstance(result, type):
        return {one.name: getattr(result, one.name) for one in fields(result)}
    if isinstance(result, tuple | list):
        return dict(zip(getattr(result, "_fields", range(len(result))), result, strict=True))
    return {}


def one_tensor(model: nn.Module, result: Any) -> Tensor:
    """Refuse anything but one tensor.

    Raises:
        InputError: it is something else; the sentence names its parts.
    """
    if isinstance(result, Tensor):
        return result
    known = parts(result)
    what = f"expected one tensor from {type(model).__name__}, found {type(result).__name__}"
    if known:
        raise InputError(f"{what} with {_named(known)}: give {_suggested(known)}")
    raise InputError(f"{what}: wrap the model in a module whose forward returns the tensor you mean")


def _named(known: Mapping[Any, Any]) -> str:
    names = list(map(str, known))
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


def _suggested(known: Mapping[Any, Any]) -> str:
    """The keyword that takes the part which is most likely meant."""
    tensors = [name for name, value in known.items() if isinstance(value, Tensor)] or list(known)
    best = "logits" if "logits" in known else tensors[0] if tensors else "logits"
    given = f'output="{best}"' if isinstance(best, str) else f"output={best}"
    return f"{given} (on the command line MODEL[{best}])"
