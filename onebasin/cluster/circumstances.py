"""What torch was told in this process and what changes numbers: workers are told the same before they work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch


@dataclass(frozen=True)
class Circumstances:
    """Settings of torch.

    Attributes:
        dtype: of tensors of which none is said.
        precision: of products of matrices in float32.
        deterministic: whether only deterministic algorithms may be used.
        automatic: the dtype of an `autocast` on the processor, None outside of one.
    """

    dtype: torch.dtype
    precision: str
    deterministic: bool
    automatic: torch.dtype | None

    @classmethod
    def here(cls) -> Self:
        """Those of this process."""
        automatic = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        deterministic = torch.are_deterministic_algorithms_enabled()
        return cls(torch.get_default_dtype(), torch.get_float32_matmul_precision(), deterministic, automatic)


@dataclass(frozen=True, eq=False)
class UnderThese:
    """A function, and the circumstances under which a worker calls it; the worker keeps them until the next call."""

    function: Callable[[Any, Any], Any]
    circumstances: Circumstances

    def __call__(self, shared: Any, shard: Any) -> Any:
        """Call it."""
        given = self.circumstances
        torch.set_default_dtype(given.dtype)
        torch.set_float32_matmul_precision(given.precision)
        if given.deterministic != torch.are_deterministic_algorithms_enabled():  # the call imports half of torch
            torch.use_deterministic_algorithms(given.deterministic)
        with torch.autocast("cpu", dtype=given.automatic or torch.bfloat16, enabled=given.automatic is not None):
            return self.function(shared, shard)
