"""Are the tensors of a torch file what they weigh? A pickle without code can still describe what no machine holds.

A view may repeat one stored number 2**40 times, a tensor of the device "meta" has a shape and no numbers at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from onebasin.errors import UnsafeFileError
from onebasin.population.tensor_file import is_usual

FREE = 64 << 20  # bytes that any file may describe
TIMES = 8  # and so many times its own size: tied and repeated weights are stored once


def check_plain(networks: Iterable[Mapping[str, Tensor]], path: Path) -> None:
    """Raise `UnsafeFileError` unless all tensors are plain ones in memory, and together about as large as the file."""
    total, most = 0, FREE + TIMES * path.stat().st_size
    for network in networks:
        for name, value in network.items():
            if reason := _strangeness(name, value):
                raise UnsafeFileError(
                    f"expected plain tensors in {path}, found {name[:80]!r} {reason}: load the file yourself, if "
                    "you trust it, and pass dense copies to Population.from_states"
                )
            total += value.numel() * value.element_size()
    if total > most:
        raise UnsafeFileError(
            f"the tensors of {path} would take {total:,} bytes, which its {path.stat().st_size:,} bytes should not "
            "hold: load the file yourself, if you trust it, and pass what you need to Population.from_states"
        )


def _strangeness(name: str, value: Tensor) -> str:
    if type(value) not in (Tensor, nn.Parameter):
        return f"of the class {type(value).__name__}"
    if value.is_nested or value.is_quantized or value.layout != torch.strided:  # a nested one has no shape to look at
        return "in a form that is not dense: nested, quantised or sparse"
    if not is_usual(name, value.shape):
        return f"with {value.dim()} axes, or a name that cannot be printed"
    if value.device.type != "cpu":
        return f"on the device {value.device.type}"
    return "that is a view to be negated or conjugated" if value.is_conj() or value.is_neg() else ""
