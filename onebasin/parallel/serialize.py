"""Serialization of functions, models and tensors that are sent to a worker and back: pickled, for one user's processes.

Nothing of this is ever read from or written to a file that outlives the processes.

A tensor is sent as its own numbers. (Left to itself, a row of a stack would take the whole stack along.) It arrives in
fresh memory that is aligned as torch aligns it, since products of matrices may round differently elsewhere.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

import cloudpickle
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._pytree import tree_map

_CACHE: OrderedDict[str, Any] = OrderedDict()  # in a worker: what it was sent for many shards, name -> value
_CACHED = 4  # functions and shared values in the cache
_ALIGNED = 64  # bytes: where torch begins the memory of a tensor on a processor
_Value = TypeVar("_Value")


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # not annotated
    """Pickles tensors by their bytes, and modules whose weights are computed."""

    def reducer_override(self, value: Any) -> Any:
        """How one object is pickled."""
        if type(value) is Tensor and _is_plain(value):
            raw: Any = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
            return _tensor, (pickle.PickleBuffer(raw), value.dtype, tuple(value.shape))
        if isinstance(value, nn.Module) and is_parametrized(value):  # which torch refuses: its class has no name
            return copyreg.__newobj__, (type(value),), vars(value)  # type: ignore[attr-defined]  # not in typeshed
        return super().reducer_override(value)


def _is_plain(tensor: Tensor) -> bool:
    ordinary = tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.requires_grad
    return ordinary and not tensor.is_quantized and not tensor.is_conj() and not tensor.is_neg()


def _tensor(raw: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    if tensor.numel():
        tensor.reshape(-1).view(torch.uint8).copy_(torch.frombuffer(raw, dtype=torch.uint8))
    return tensor


def pack(value: Any) -> bytes:
    """The bytes that are sent for a value.

    >>> stack = torch.zeros(1000, 1000)
    >>> len(pack(stack[0])) < 5000, unpack(pack(stack[0])).shape
    (True, torch.Size([1000]))
    """
    file = io.BytesIO()
    _Pickler(file, protocol=5).dump(value)
    return file.getvalue()


def unpack(content: bytes | memoryview) -> Any:
    """The value that was packed."""
    return pickle.loads(content)


def work(fetch: Callable[[str], bytes | memoryview], function: str, shared: str, shard: bytes) -> bytes:
    """Run in a worker: call a function on a shard, and pack the result or the error.

    Args:
        fetch: gives the bytes behind a name, where the worker does not have their value yet.
        function: name of the function.
        shared: name of its first argument.
        shard: its second argument, packed.
    """
    torch.set_num_threads(1)
    try:
        callee, first = (_cached(name, fetch) for name in (function, shared))
        return pack((callee(first, unpack(shard)), None))
    except Exception as error:
        return pack_error(error)


def pack_error(error: Exception) -> bytes:
    """An error in the place of a result; its text alone where it cannot be pickled and unpickled."""
    try:
        content = pack((None, error))
        unpack(content)  # Python makes an error anew of its message alone, which some classes do not take
    except Exception:
        return pack((None, RuntimeError(f"{type(error).__name__}: {error}")))
    return content


def _cached(name: str, fetch: Callable[[str], bytes | memoryview]) -> Any:
    if name not in _CACHE:
        while len(_CACHE) >= _CACHED:
            _CACHE.popitem(last=False)
        _CACHE[name] = unpack(fetch(name))
    _CACHE.move_to_end(name)
    return _CACHE[name]


def result_of(content: bytes) -> Any:
    """The result that a worker packed; its error is raised here."""
    result, error = unpack(content)
    if error is not None:
        raise error
    return result


def pickle_by_value(module: ModuleType) -> None:
    """Send classes and functions of a module as their code: workers cannot import it by its name.

    For modules that were executed from a file. (Those of `__main__` are sent like this anyway.)
    """
    cloudpickle.register_pickle_by_value(module)


def serialized_copy(value: _Value) -> _Value:
    """A copy as a worker gets it.

    Work that is done here on what lies in a file, or in the middle of a larger tensor, may round differently.
    """
    copy: _Value = unpack(pack(value))
    return copy


def align_tensors(values: _Value) -> _Value:
    """Tensors in tuples, lists and dicts as they lie in the memory of a worker; copied only where they do not.

    >>> whole = torch.zeros(3)
    >>> whole[1:].is_set_to(align_tensors(whole[1:])), whole.is_set_to(align_tensors(whole))
    (False, True)
    """
    aligned: _Value = tree_map(_align, values)
    return aligned


def _align(value: Any) -> Any:
    if type(value) is not Tensor or value.device.type != "cpu" or value.layout is not torch.strided:
        return value
    fits = value.is_contiguous() and value.data_ptr() % _ALIGNED == 0
    return value.detach() if fits else value.detach().clone(memory_format=torch.contiguous_format)
