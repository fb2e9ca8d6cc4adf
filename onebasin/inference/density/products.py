"""Matrix products of many chains, in the form that the CPU's library computes fastest.

Under `vmap` every layer is a batched product (chains, m, k) @ (chains, k, n). Two rewritings, which change no more
than rounding, are made while a gradient is traced:

- An operand that all chains share, as the inputs of the first layer, makes it one product with the matrices of all
  chains side by side, (m, k) @ (k, chains * n), and likewise for the gradient of the first weights.
- Libraries run along the last axis of the result. Where that is shorter than a vector register (few outputs, few
  inputs), the transposed product is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_REGISTER = 64  # bytes
_WIDE = 64  # rows and columns of a shared matrix from which one product is worth arranging the others side by side


def rewritings() -> dict[Any, Callable[..., Tensor]]:
    """The decompositions for `make_fx`: the product in its better form, or NotImplemented where it has that already."""
    return {torch.ops.aten.bmm.default: batched, torch.ops.aten.mm.default: single}


def batched(a: Tensor, b: Tensor) -> Tensor:
    """Compute a @ b for (chains, m, k) and (chains, k, n).

    >>> a, b = torch.eye(70, 80).expand(3, 70, 80), torch.arange(4800.0).reshape(3, 80, 20)
    >>> torch.equal(batched(a, b), a @ b)
    True
    """
    chains, m, n = len(a), a.shape[1], b.shape[2]
    if chains == 1:
        return torch.mm(a[0], b[0])[None]
    if _shared(a):
        return torch.mm(a[0], _beside(b)).reshape(m, chains, n).transpose(0, 1)
    if _shared(b):
        return torch.mm(_beside(a.mT).T, b[0]).reshape(chains, m, n)
    return torch.bmm(b.mT, a.mT).mT if _narrow(a, b) else NotImplemented


def single(a: Tensor, b: Tensor) -> Tensor:
    """Compute a @ b for (m, k) and (k, n)."""
    return torch.mm(b.T, a.T).T if _narrow(a, b) else NotImplemented


def _shared(matrices: Tensor) -> bool:
    return matrices.stride(0) == 0 and min(matrices.shape[1:]) >= _WIDE


def _narrow(a: Tensor, b: Tensor) -> bool:
    return b.shape[-1] * b.element_size() < _REGISTER and b.shape[-1] < a.shape[-2]


def _beside(matrices: Tensor) -> Tensor:
    """Matrices (chains, k, n) as one (k, chains * n), keeping which of k and n runs faster in memory."""
    chains, k, n = matrices.shape
    if matrices.stride(1) < matrices.stride(2):
        return matrices.mT.reshape(chains * n, k).T
    return matrices.transpose(0, 1).reshape(k, chains * n)
