"""One network as a dict of tensors: its spec, its checks, its flat form.

A `State` maps state-dict names to tensors, parameters and buffers alike. A `Spec` is the same dict with shapes and
dtypes instead of values, in the same order.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TypeAlias, cast

import torch
from torch import Tensor, nn

from onebasin.errors import InputError, SpecError

State: TypeAlias = dict[str, Tensor]

_SHOWN = 4  # how many tensors an error message lists before it only counts them
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # of batch norms, by torch's names


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of one tensor.

    >>> print(TensorSpec((3, 2), torch.float32))
    float32 (3, 2)
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes that one such tensor occupies."""
        return self.size * self.dtype.itemsize

    def __str__(self) -> str:
        """Dtype and shape for messages."""
        return f"{dtype_name(self.dtype)} {self.shape}"


Spec: TypeAlias = dict[str, TensorSpec]


def state_of(module: nn.Module) -> State:
    """Return parameters and buffers of a module by state-dict name, detached, without a copy.

    >>> {name: tuple(tensor.shape) for name, tensor in state_of(nn.Linear(2, 3)).items()}
    {'weight': (3, 2), 'bias': (3,)}
    """
    # A module may put anything under `..._extra_state`; only tensors are weights.
    return {name: value.detach() for name, value in module.state_dict().items() if isinstance(value, Tensor)}


def as_state(network: Mapping[str, Tensor] | nn.Module) -> State:
    """Return a module or a mapping of tensors as a State without gradients; nothing is copied.

    >>> as_state({"w": nn.Parameter(torch.zeros(2))})
    {'w': tensor([0., 0.])}
    """
    if isinstance(network, nn.Module):
        return state_of(network)
    given: object = network
    if not isinstance(given, Mapping):
        raise InputError(
            f"expected a network as a state dict or a module, found {type(given).__name__}: give a module, or one "
            "member of a population, as population[0]"
        )
    spec_of(network)  # refuses what is no tensor
    return {name: tensor.detach() for name, tensor in network.items()}


def shared_names(model: nn.Module) -> dict[str, str]:
    """For each state-dict name the first name of the same tensor: tied weights have several."""
    tensors = model.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    return {name: first.setdefault(id(value), name) for name, value in tensors.items() if isinstance(value, Tensor)}


def is_statistic(name: str) -> bool:
    """Whether a tensor is a running mean or variance, or their counter."""
    return name.rsplit(".", 1)[-1] in STATISTICS


def trained_parameters(
    what: nn.Module | Mapping[str, TensorSpec] | Mapping[str, Tensor], *, frozen: Collection[str] = ()
) -> tuple[str, ...]:
    """Names of the tensors that training moves: all else is a constant or a statistic of the data.

    This is the one place that decides it, for proofs, fits, distances, overlaps and masks alike.

    Args:
        what: of a module, its parameters that require a gradient, tied ones once under their first name; all of its
            parameters if none of them requires one, because a network that is frozen as a whole was most likely
            frozen for inference. Of a State or a Spec, its floating-point and complex tensors but the running
            statistics of batch norms.
        frozen: names to leave out, as `Symmetry.frozen` lists them.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    >>> trained_parameters(net[0].requires_grad_(False)), trained_parameters(net)
    (('weight', 'bias'), ('1.weight', '1.bias'))
    >>> trained_parameters(as_spec(net), frozen=["0.weight", "0.bias"])
    ('1.weight', '1.bias')
    """
    if isinstance(what, nn.Module):
        parameters = dict(what.named_parameters(remove_duplicate=False))
        gradient = [name for name, value in parameters.items() if value.requires_grad]
        chosen = set(gradient or parameters)
        first = shared_names(what)
        names = [name for name in first if name in chosen and first[name] == name]
    else:
        real = {name: value.dtype.is_floating_point or value.dtype.is_complex for name, value in what.items()}
        names = [name for name in real if real[name] and not is_statistic(name)]
    return tuple(name for name in names if name not in frozen)


def spec_of(state: Mapping[str, Tensor]) -> Spec:
    """Return shape and dtype of each tensor, in the order of `state`."""
    wrong = [name for name, value in state.items() if not isinstance(value, Tensor) or value.layout != torch.strided]
    if wrong:
        kind = type(state[wrong[0]]).__name__
        raise SpecError(
            f"expected only dense tensors in a state, found {kind} under {_listed(wrong)}: "
            "remove or convert these entries"
        )
    return {name: TensorSpec(tuple(value.shape), value.dtype) for name, value in state.items()}


def as_spec(source: Mapping[str, TensorSpec] | Mapping[str, Tensor] | nn.Module) -> Spec:
    """Return the spec of a module or a state; a spec is returned as it is."""
    if isinstance(source, nn.Module):
        return spec_of(state_of(source))
    if all(isinstance(value, TensorSpec) for value in source.values()):
        return dict(cast("Mapping[str, TensorSpec]", source))
    return spec_of(cast("Mapping[str, Tensor]", source))


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without the package: `float32`."""
    return str(dtype).removeprefix("torch.")


def spec_to_json(spec: Mapping[str, TensorSpec]) -> str:
    """Return a spec as JSON text; the order of names is kept.

    >>> spec_to_json({"bias": TensorSpec((3,), torch.float16)})
    '{"bias": {"shape": [3], "dtype": "float16"}}'
    """
    return json.dumps({name: {"shape": t.shape, "dtype": dtype_name(t.dtype)} for name, t in spec.items()})


def spec_from_json(text: str) -> Spec:
    """Read back what `spec_to_json` wrote.

    Raises:
        SpecError: when the text is not such a spec.
    """
    try:
        return {
            str(name): TensorSpec(tuple(int(size) for size in entry["shape"]), _dtype(entry["dtype"]))
            for name, entry in json.loads(text).items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise SpecError(
            f'expected a JSON object of {{name: {{"shape": [...], "dtype": "..."}}}}, found one that is not ({error}): '
            "write it again with spec_to_json"
        ) from error


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    return dtype


def check_state(
    state: Mapping[str, Tensor], spec: Mapping[str, TensorSpec], *, where: str, finite: bool = False
) -> None:
    """Raise `SpecError` unless `state` has exactly the names, shapes and dtypes of `spec`.

    Args:
        state: the network to check.
        spec: what is expected.
        where: how the message names the network ("member 3", a file name).
        finite: also refuse NaN and infinity.
    """
    check_spec(spec_of(state), spec, where=where)
    if finite:
        check_finite(state, where=where)


def check_spec(found: Mapping[str, TensorSpec], expected: Mapping[str, TensorSpec], *, where: str) -> None:
    """Raise `SpecError` unless the two specs agree; the order of names does not matter."""
    if found == expected:
        return
    missing = [name for name in expected if name not in found]
    extra = [name for name in found if name not in expected]
    if missing or extra:
        parts = [f"is missing {_listed(missing)}"] if missing else []
        parts += [f"has unexpected {_listed(extra)}"] if extra else []
        raise SpecError(f"{where} {' and '.join(parts)}: {_hint(missing, extra) or 'use networks of one architecture'}")
    wrong = [name for name in expected if found[name].shape != expected[name].shape]
    if wrong:
        rows = [f"{name} {found[name].shape} where {expected[name].shape} is expected" for name in wrong]
        raise SpecError(f"{where} has other shapes: {_listed(rows)}; use networks of one architecture and width")
    wrong = [name for name in expected if found[name].dtype != expected[name].dtype]
    rows = [f"{name} is {dtype_name(found[name].dtype)}, not {dtype_name(expected[name].dtype)}" for name in wrong]
    raise SpecError(
        f"{where} has other dtypes: {_listed(rows)}; convert it first with .to(dtype), or "
        "open files with dtype= (on the command line --dtype)"
    )


def check_finite(state: Mapping[str, Tensor], *, where: str) -> None:
    """Raise `SpecError` when a tensor holds NaN or infinity."""
    for name, value in state.items():
        wide = value.float() if value.dtype.itemsize == 1 else value  # torch knows too little of float8
        if not bool(torch.isfinite(wide).all()):
            raise SpecError(
                f"{where} is not finite: tensor {name} holds NaN or infinity; "
                "leave this network out or train it again with a smaller step"
            )


def _listed(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _hint(missing: list[str], extra: list[str]) -> str:
    """Say which renaming would help, if one does."""
    if not missing or not extra:
        return ""
    first, other = missing[0], sorted(extra, key=len)
    for name in other:
        if name.endswith(first) and {name.removesuffix(first) + rest for rest in missing} <= set(extra):
            return f"did you mean to strip the prefix {name.removesuffix(first)!r}?"
        if first.endswith(name) and {rest.removeprefix(first.removesuffix(name)) for rest in missing} <= set(extra):
            return f"did you mean to add the prefix {first.removesuffix(name)!r}?"
    close = difflib.get_close_matches(first, extra, n=1)
    return f"did you mean {first} by {close[0]}?" if close else ""


def _flat_names(spec: Mapping[str, TensorSpec]) -> list[str]:
    """Names that take part in the flat vector, in order: the floating-point tensors."""
    complex_names = [name for name, tensor in spec.items() if tensor.dtype.is_complex]
    if complex_names:
        raise SpecError(
            f"a flat vector holds real weights, found complex {_listed(complex_names)}: "
            "store real and imaginary parts as two tensors (torch.view_as_real)"
        )
    return [name for name, tensor in spec.items() if tensor.dtype.is_floating_point]


def flat_size(spec: Mapping[str, TensorSpec]) -> int:
    """Return the length D of the flat vector: the number of floating-point weights.

    >>> flat_size(spec_of(nn.BatchNorm1d(3).state_dict()))  # weight, bias, mean, variance; not the batch counter
    12
    """
    return sum(spec[name].size for name in _flat_names(spec))


def flatten(state: Mapping[str, Tensor]) -> Tensor:
    """Concatenate the floating-point tensors in their order into one vector (D,).

    Mixed dtypes are promoted to the widest; integer tensors are left out.

    >>> flatten({"a": torch.tensor([[1.0, 2.0]]), "steps": torch.tensor(7), "b": torch.tensor(3.0)})
    tensor([1., 2., 3.])
    """
    names = _flat_names(spec_of(state))
    return torch.cat([state[name].reshape(-1) for name in names]) if names else torch.zeros(0)


def restore(vector: Tensor, spec: Mapping[str, TensorSpec], rest: Mapping[str, Tensor] | None = None) -> State:
    """Invert `flatten`: a vector (..., D) becomes tensors (..., *shape) in the dtypes of `spec`.

    Integer tensors (a batch counter, say) are not in the vector: they come from `rest`, or are zeros.

    >>> restore(torch.arange(3.0), {"a": TensorSpec((2,), torch.float32), "b": TensorSpec((), torch.float32)})
    {'a': tensor([0., 1.]), 'b': tensor(2.)}
    """
    flat_names, size = _flat_names(spec), flat_size(spec)
    if vector.dim() < 1 or vector.shape[-1] != size:
        raise SpecError(
            f"expected a vector (..., {size}) for {len(flat_names)} floating-point tensors, "
            f"found shape {tuple(vector.shape)}: flatten it in the order of this spec"
        )
    batch = tuple(vector.shape[:-1])
    pieces = dict(zip(flat_names, vector.split([spec[name].size for name in flat_names], dim=-1), strict=True))
    return {
        name: pieces[name].reshape(batch + tensor.shape).to(tensor.dtype)
        if name in pieces
        else _other(name, tensor, rest, batch, vector.device)
        for name, tensor in spec.items()
    }


def _other(
    name: str,
    tensor: TensorSpec,
    rest: Mapping[str, Tensor] | None,
    batch: tuple[int, ...],
    device: torch.device,
) -> Tensor:
    if rest is None or name not in rest:
        return torch.zeros(batch + tensor.shape, dtype=tensor.dtype, device=device)
    return rest[name].detach().to(device=device, dtype=tensor.dtype).expand(batch + tensor.shape).clone()


def interpolate(a: Mapping[str, Tensor], b: Mapping[str, Tensor], t: float) -> State:
    """Return (1 - t) a + t b for floating-point tensors, in their dtype; integer tensors come from `a`.

    >>> interpolate({"w": torch.tensor([0.0, 2.0])}, {"w": torch.tensor([4.0, 2.0])}, 0.25)
    {'w': tensor([1., 2.])}
    """
    check_state(b, spec_of(a), where="the second network")
    return {
        name: torch.lerp(value, b[name], t)
        if value.dtype.is_floating_point or value.dtype.is_complex
        else value.clone()
        for name, value in a.items()
    }
