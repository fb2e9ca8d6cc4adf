"""All shapes by the name under which they are stored."""

from __future__ import annotations

from onebasin.posterior.diagonal import Diagonal
from onebasin.posterior.full import Full
from onebasin.posterior.gaussian import Shape
from onebasin.posterior.kronecker import Kronecker
from onebasin.posterior.low_rank import LowRank
from onebasin.posterior.partial import Partial

SHAPES: dict[str, type[Shape]] = {shape.kind: shape for shape in (Diagonal, LowRank, Full, Kronecker, Partial)}
