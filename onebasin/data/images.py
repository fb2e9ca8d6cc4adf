"""From stored pixels to the inputs of a network."""

from __future__ import annotations

import torch
from torch import Tensor

from onebasin.errors import InputError

_BRIGHTEST = 255
_COLOURS = (1, 3)
_MOST = 1 << 31  # numbers in a table whose categories became columns: 8 GB


def as_inputs(stored: Tensor) -> Tensor:
    """Inputs as float32; bytes are pixels, and go from 0..255 to [0, 1].

    >>> as_inputs(torch.full((2, 4, 4), 255, dtype=torch.uint8)).shape
    torch.Size([2, 1, 4, 4])
    >>> as_inputs(torch.zeros(2, 3, dtype=torch.float64)).dtype
    torch.float32

    Args:
        stored: (n, ...). Bytes (n, h, w) are grey images and become (n, 1, h, w); (n, h, w, 1 or 3) have their colours
            last and become (n, 1 or 3, h, w), unless axis 1 already looks like colours.
    """
    if stored.dtype != torch.uint8:
        return stored.float()
    if stored.dim() == 3:
        stored = stored[:, None]
    elif stored.dim() == 4 and stored.shape[-1] in _COLOURS and stored.shape[1] not in _COLOURS:
        stored = stored.permute(0, 3, 1, 2)
    return stored.float().div_(_BRIGHTEST).contiguous()


def as_targets(stored: Tensor) -> Tensor:
    """Class numbers as int64 (n,), values as float32 (n, outputs): (n,) would broadcast against outputs (n, 1).

    >>> as_targets(torch.tensor([1.5, 2.0])).shape, as_targets(torch.tensor([1, 2], dtype=torch.uint8)).dtype
    (torch.Size([2, 1]), torch.int64)
    """
    if not stored.is_floating_point():
        return (stored[:, 0] if stored.dim() == 2 and stored.shape[1] == 1 else stored).long()
    return (stored[:, None] if stored.dim() == 1 else stored).float()


def check_columns(rows: int, columns: int, where: str) -> None:
    """Refuse a table whose categories need more columns than memory has room for.

    Raises:
        InputError: there are too many.
    """
    if rows * columns > _MOST:
        raise InputError(
            f"expected at most {_MOST:,} numbers with one column per category in {where}, found {rows:,} x "
            f"{columns:,}: join rare categories and give the table as .npz"
        )
