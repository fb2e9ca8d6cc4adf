"""All shapes by the name under which they are stored."""

from __future__ import annotations

from onebasin.posterior.diagonal import Diagonal
from onebasin.posterior.gaussian import Shape
from onebasin.posterior.low_rank import LowRank

SHAPES: dict[str, type[Shape]] = {shape.kind: shape for shape in (Diagonal, LowRank)}
