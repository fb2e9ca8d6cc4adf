"""Spread in some weights only, such as those of the last layer; the others stay at the centre."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from onebasin.errors import InputError
from onebasin.posterior.diagonal import Diagonal
from onebasin.posterior.full import Full
from onebasin.posterior.gaussian import Shape
from onebasin.posterior.kronecker import Kronecker
from onebasin.posterior.low_rank import LowRank

_INNER: dict[str, type[Shape]] = {shape.kind: shape for shape in (Diagonal, LowRank, Full, Kronecker)}


@dataclass(frozen=True, eq=False)
class Partial:
    """A shape over the entries `places`, zero spread elsewhere.

    >>> Partial(Diagonal(torch.ones(1)), torch.tensor([2]), 4).std()
    tensor([0., 0., 1., 0.])

    Attributes:
        inner: the shape of the entries that vary.
        places: where they are in the flat vector, int64 (inner.size,), each once.
        size: D.
    """

    inner: Shape
    places: Tensor
    size: int
    kind: ClassVar[str] = "partial"

    def __post_init__(self) -> None:
        found = self.places.tolist() if self.places.dim() == 1 else []
        inside = all(type(place) is int and 0 <= place < self.size for place in found)
        if len(found) != self.inner.size or len(set(found)) < len(found) or not inside:
            raise InputError(
                f"expected {self.inner.size} different places out of {self.size} weights, found {len(found)}, "
                f"{len(set(found))} of them different: give one place per weight of the inner shape"
            )

    def std(self) -> Tensor:
        """Standard deviation of each weight (D,)."""
        inner = self.inner.std()
        return inner.new_zeros(self.size).index_copy(0, self.places, inner)

    def noise(self, count: int, generator: torch.Generator) -> Tensor:
        """Draws (count, D) with mean zero."""
        inner = self.inner.noise(count, generator)
        return inner.new_zeros(count, self.size).index_copy(1, self.places, inner)

    def log_density(self, offset: Tensor) -> Tensor:
        """Log density of the entries that vary, float64 (...); the other entries of the offset do not count."""
        return self.inner.log_density(offset.index_select(-1, self.places))

    def tensors(self) -> dict[str, Tensor]:
        """The places, the size, and the inner tensors under the name of their kind."""
        inner = {f"{self.inner.kind}.{name}": value for name, value in self.inner.tensors().items()}
        return {"places": self.places, "size": torch.tensor(self.size), **inner}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Invert `tensors`."""
        inner = {name: value for name, value in tensors.items() if name not in ("places", "size")}
        kind = next(iter(inner), "").split(".")[0]
        shape = _INNER[kind].from_tensors({name.removeprefix(f"{kind}."): value for name, value in inner.items()})
        return cls(shape, tensors["places"], int(tensors["size"]))
