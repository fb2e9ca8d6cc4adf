"""What may be asked of `fit`: families, their options, and which go together."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import Any, NamedTuple

from onebasin.cluster import Places
from onebasin.errors import InputError
from onebasin.options import refuse_unknown

FAMILIES = ("diagonal", "low-rank", "mixture")
SHAPES = ("diagonal", "low-rank")
_COUNTS = ("rank", "passes", "oversample", "restarts", "steps", "seed")
_SWITCHES = ("diagonal", "pooled")


class Options(Places, total=False):
    """Options of `fit`; where it runs is said as in `Places`.

    Attributes:
        passes: of low rank: power passes over the crowd (2); more for directions whose variances differ little.
        oversample: of low rank: directions that are searched beyond the rank (10).
        diagonal: of low rank: keep what the directions leave of each weight's variance as independent noise (True).
            False leaves it out: draws then stay in the plane of the directions, and there is no density.
        shape: of a mixture: "diagonal" or "low-rank" components ("diagonal").
        pooled: of a mixture: all components share one spread, that of members around their component's mean (False).
        restarts: of a mixture by k-means: starts that are tried (10).
        steps: of a mixture by k-means: steps at most (50).
        seed: for random projections and starts (0).
    """

    passes: int
    oversample: int
    diagonal: bool
    shape: str
    pooled: bool
    restarts: int
    steps: int
    seed: int


class Plan(NamedTuple):
    """What was asked for, checked and complete; `clusters` are those of k-means, None where there is none."""

    shape: str
    rank: int
    clusters: int | None = None
    passes: int = 2
    oversample: int = 10
    diagonal: bool = True
    pooled: bool = False
    restarts: int = 10
    steps: int = 50
    seed: int = 0

    def facts(self, family: str) -> dict[str, Any]:
        """The options that this family reads, by name."""
        rank = {"rank": self.rank} if self.shape == "low-rank" else {}
        return rank | {name: getattr(self, name) for name in sorted(_read(family, self.shape))}


def plan(family: str, rank: int | None, components: object, options: Options) -> Plan:
    """Refuse what does not go together, and fill in the rest."""
    if family not in FAMILIES:
        raise InputError(f"expected a family out of {', '.join(FAMILIES)}, found {family!r}: choose one of them")
    shape = options.get("shape", "diagonal") if family == "mixture" else family
    if shape not in SHAPES:
        raise InputError(f"expected a shape out of {', '.join(SHAPES)}, found {shape!r}: choose one of them")
    own = {name: value for name, value in options.items() if name not in Places.__annotations__}
    refuse_unknown(own, _read(family, shape), f"fit of {family!r} with {shape!r} Gaussians")
    _check_whole({"rank": rank, **own})
    if isinstance(components, bool):
        raise InputError(
            f'expected components as a number of clusters, "chains" or one per member, found {components}: give one'
        )
    if (shape == "low-rank") != (rank is not None) or (rank is not None and rank < 1):
        raise InputError(
            f"expected a rank from 1 on for low-rank Gaussians and none for diagonal ones, found rank={rank} with "
            f"{shape!r}: {'give one, such as rank=20' if shape == 'low-rank' else 'leave it out'}"
        )
    if (family == "mixture") != (components is not None):
        raise InputError(
            f"expected components for a mixture and for nothing else, found components={components!r} with {family!r}: "
            'give a number of clusters, "chains", or the component of each member to family="mixture"'
        )
    given: dict[str, Any] = {"rank": rank or 0, **own, "shape": shape, "clusters": _clusters(components)}
    counts: dict[str, Any] = {name: int(value) for name, value in given.items() if name in _COUNTS}
    made = Plan(**{**given, **counts})
    if min(made.passes, made.oversample) < 0:
        raise InputError(
            f"expected passes and oversample from 0 on, found {made.passes} and {made.oversample}: leave them out "
            "for 2 and 10"
        )
    return made


def _clusters(components: object) -> int | None:
    return int(components) if isinstance(components, Integral) else None


def _check_whole(options: Mapping[str, object]) -> None:
    """Refuse counts that are no whole numbers, and switches that are neither on nor off."""
    for name, value in options.items():
        if name in _COUNTS and value is not None and (isinstance(value, bool) or not isinstance(value, Integral)):
            raise InputError(f"expected {name} as a whole number, found {value!r}: give one such as 2")
        if name in _SWITCHES and not isinstance(value, bool):
            raise InputError(f"expected {name} as True or False, found {value!r}: give one of them")


def _read(family: str, shape: str) -> set[str]:
    mixture = {"shape", "pooled", "restarts", "steps", "seed"} if family == "mixture" else set()
    return mixture | ({"passes", "oversample", "diagonal", "seed"} if shape == "low-rank" else set())
