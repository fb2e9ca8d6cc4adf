"""Compile a function of tensors for fixed shapes, when a C++ compiler is there.

The function is traced once with `make_fx`, its matrix products rewritten by the way, and the graph goes straight to
inductor: no guards are checked at each call, which counts when a gradient takes a tenth of a millisecond, and compiling
takes seconds where `torch.compile` takes ten.

Matrix products of many chains are computed in the form that the CPU's library computes fastest. Under `vmap` every
layer is a batched product (chains, m, k) @ (chains, k, n). Two rewritings, which change no more than rounding, are made
while a gradient is traced:

- An operand that all chains share, as the inputs of the first layer, makes it one product with the matrices of all
  chains side by side, (m, k) @ (k, chains * n), and likewise for the gradient of the first weights.
- Libraries run along the last axis of the result. Where that is shorter than a vector register (few outputs, few
  inputs), the transposed product is computed.
"""

from __future__ import annotations

import logging
import shutil
import warnings
from collections.abc import Callable, Sequence
from functools import cache
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


Function = Callable[..., tuple[Tensor, ...]]
_LOG = logging.getLogger(__name__)
CLOSE = 1e-3  # largest difference between a compiled and an eager gradient, relative to its largest entry
CLOSE_IN_BF16 = 5e-2  # compiled code rounds to bfloat16, at 2^-9, less often; a ResNet-8 of width 8 differs by 1.3e-2


@cache
def has_compiler() -> bool:
    """Whether inductor will find a C++ compiler."""
    import os

    return any(shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++", "cl") if name)


def compiled(function: Function, arguments: Sequence[Tensor], close: float = CLOSE) -> Function | None:
    """Return `function` compiled for tensors like `arguments`, or None where that fails or gives other numbers.

    Args:
        function: takes and returns flat sequences of tensors; must not depend on their values by branching.
        arguments: an example call.
        close: largest difference to what `function` itself gives, relative to the largest entry.
    """
    # One tensor in two places would be traced as one argument, and the second place ignored ever after.
    arguments = [
        value.clone() if any(value is other for other in arguments[:place]) else value
        for place, value in enumerate(arguments)
    ]
    expected = function(*arguments)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's compiler warns about itself
            made = _built(function, arguments)
            found = made(*arguments)
    except Exception as error:  # any part of the compiler may refuse a model; eager is always right
        _LOG.info("not compiled: %s: %s", type(error).__name__, error)
        return None
    return made if all(_agree(a, b, close) for a, b in zip(expected, found, strict=True)) else None


def _built(function: Function, arguments: Sequence[Tensor]) -> Function:
    import torch._inductor
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(function, decomposition_table=rewritings())(*arguments)
    if any(torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in graph.graph.nodes):
        raise ValueError("it draws random numbers, which must be those of the seed at each call")
    made: Any = torch._inductor.compile(graph, list(arguments))
    return lambda *tensors: tuple(made(*tensors))


def _agree(a: Tensor, b: Tensor, close: float) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point() or not a.numel():
        return torch.equal(a, b)
    if not bool(torch.isfinite(a).all()):
        return True  # a wild start tells nothing; both are watched for NaN when they run
    return bool((a - b).abs().max() <= close * (1e-30 + a.abs().max()))
