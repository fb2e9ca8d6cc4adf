"""What must be done to things so that they are the same here and where they travel to."""

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

# ----------------------------------------------------------------------
# How work travels to a worker and back: pickled, between processes of one user, and never from or into their fi


_KEPT: OrderedDict[str, Any] = OrderedDict()  # what a worker was sent for many shards: name -> value
_MOST = 4  # functions and shared values that are kept


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # not annotated
    """Knows tensors, and modules whose weights are computed."""

    def reducer_override(self, thing: Any) -> Any:
        """How one object travels."""
        if type(thing) is Tensor and _plain(thing):
            raw: Any = thing.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
            return _tensor, (pickle.PickleBuffer(raw), thing.dtype, tuple(thing.shape))
        if isinstance(thing, nn.Module) and is_parametrized(thing):  # which torch refuses: its class has no name
            return copyreg.__newobj__, (type(thing),), vars(thing)  # type: ignore[attr-defined]  # not in typeshed
        return super().reducer_override(thing)


def _plain(tensor: Tensor) -> bool:
    ordinary = tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.requires_grad
    return ordinary and not tensor.is_quantized and not tensor.is_conj() and not tensor.is_neg()


def _tensor(raw: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    made = torch.empty(shape, dtype=dtype)
    if made.numel():
        made.reshape(-1).view(torch.uint8).copy_(torch.frombuffer(raw, dtype=torch.uint8))
    return made


def pack(thing: Any) -> bytes:
    """The bytes that travel.

    >>> stack = torch.zeros(1000, 1000)
    >>> len(pack(stack[0])) < 5000, unpack(pack(stack[0])).shape
    (True, torch.Size([1000]))
    """
    file = io.BytesIO()
    _Pickler(file, protocol=5).dump(thing)
    return file.getvalue()


def unpack(content: bytes | memoryview) -> Any:
    """What was packed."""
    return pickle.loads(content)


def work(fetch: Callable[[str], bytes | memoryview], function: str, shared: str, shard: bytes) -> bytes:
    """Run in a worker: fetch what is not known yet, work on a shard, and pack the result or the error.

    Args:
        fetch: gives the bytes behind a name.
        function: the name of what is to be done.
        shared: the name of what it needs beside the shard.
        shard: packed.
    """
    torch.set_num_threads(1)
    try:
        what, beside = (_kept(name, fetch) for name in (function, shared))
        return pack((what(beside, unpack(shard)), None))
    except Exception as error:
        return pack_error(error)


def pack_error(error: Exception) -> bytes:
    """An error in the place of a result; of one that cannot travel, or does not arrive, what it says."""
    try:
        content = pack((None, error))
        unpack(content)  # Python makes an error anew of its message alone, which some classes do not take
    except Exception:
        return pack((None, RuntimeError(f"{type(error).__name__}: {error}")))
    return content


def _kept(name: str, fetch: Callable[[str], bytes | memoryview]) -> Any:
    if name not in _KEPT:
        while len(_KEPT) >= _MOST:
            _KEPT.popitem(last=False)
        _KEPT[name] = unpack(fetch(name))
    _KEPT.move_to_end(name)
    return _KEPT[name]


def result_of(content: bytes) -> Any:
    """The result that a worker packed; its error is raised here."""
    result, error = unpack(content)
    if error is not None:
        raise error
    return result


# ----------------------------------------------------------------------
# What must be done to things so that they are the same here and where they travel to.


_ALIGNED = 64  # bytes: where torch begins the memory of a tensor on a processor
_Thing = TypeVar("_Thing")


def travel_by_value(module: ModuleType) -> None:
    """Let classes and functions of a module travel as their code: workers cannot import it by its name.

    For modules that were executed from a file that somebody named. (Those of `__main__` travel like this anyway.)
    """
    cloudpickle.register_pickle_by_value(module)


def as_arrived(thing: _Thing) -> _Thing:
    """A copy as a worker gets it.

    Work that is done here on what lies in a file, or in the middle of a larger tensor, may round differently.
    """
    arrived: _Thing = unpack(pack(thing))
    return arrived


def settled(things: _Thing) -> _Thing:
    """Tensors in tuples, lists and dicts as they lie in the memory of a worker; copied only where they do not.

    >>> whole = torch.zeros(3)
    >>> whole[1:].is_set_to(settled(whole[1:])), whole.is_set_to(settled(whole))
    (False, True)
    """
    found: _Thing = tree_map(_settled, things)
    return found


def _settled(thing: Any) -> Any:
    if type(thing) is not Tensor or thing.device.type != "cpu" or thing.layout is not torch.strided:
        return thing
    fits = thing.is_contiguous() and thing.data_ptr() % _ALIGNED == 0
    return thing.detach() if fits else thing.detach().clone(memory_format=torch.contiguous_format)
