"""What must be done to things so that they are the same here and where they travel to."""

from __future__ import annotations

from types import ModuleType
from typing import Any, TypeVar

import cloudpickle
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from onebasin.cluster.wire import pack, unpack

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
