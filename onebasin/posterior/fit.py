"""A density fitted to a population: raw and aligned ones by the same code, in memory or from disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor, nn

from onebasin.errors import InputError, check_options
from onebasin.functional import statistics_in
from onebasin.parallel import ExecutionOptions, Executor, MemoryNeeds, executor_for
from onebasin.population import BLOCK_BYTES, Population, constant_tensors, member_bytes
from onebasin.posterior.gaussian import Covariance, Diagonal, Gaussian, LowRank
from onebasin.posterior.layout import FlatLayout, uncertain, vector_dtype
from onebasin.posterior.mixture import PROJECTED, clusters
from onebasin.posterior.moments import Deviations, Moments, leading_factor, moments, rows_at_once
from onebasin.posterior.posterior import Posterior
from onebasin.state import State

# ----------------------------------------------------------------------
# What may be asked of `fit`: families, their options, and which go together.


FAMILIES = ("diagonal", "low-rank", "mixture")
SHAPES = ("diagonal", "low-rank")
_COUNTS = ("rank", "passes", "oversample", "restarts", "steps", "seed")
_SWITCHES = ("diagonal", "pooled")


class FitOptions(ExecutionOptions, total=False):
    """Options of `fit`; where it runs is said as in `ExecutionOptions`.

    Attributes:
        passes: of low rank: power passes over the population (2); more for directions whose variances differ little.
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


class FitPlan(NamedTuple):
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


def plan(family: str, rank: int | None, components: object, options: FitOptions) -> FitPlan:
    """Refuse what does not go together, and fill in the rest."""
    if family not in FAMILIES:
        raise InputError(f"expected a family out of {', '.join(FAMILIES)}, found {family!r}: choose one of them")
    shape = options.get("shape", "diagonal") if family == "mixture" else family
    if shape not in SHAPES:
        raise InputError(f"expected a shape out of {', '.join(SHAPES)}, found {shape!r}: choose one of them")
    own = {name: value for name, value in options.items() if name not in ExecutionOptions.__annotations__}
    check_options(own, _read(family, shape), f"fit of {family!r} with {shape!r} Gaussians")
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
    made = FitPlan(**{**given, **counts})
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


# ----------------------------------------------------------------------
# How much memory a fit takes, at most: in this process, and for work on one shard.


_WAITING = 4  # results of a shard in memory at once: where it is made, packed, and two that wait to be collected


def fit_bytes(population: Population, layout: FlatLayout, groups: int, columns: int) -> MemoryNeeds:
    """Upper estimates.

    Args:
        population: the networks.
        layout: of the weights that are fitted.
        groups: components.
        columns: L of the widest product (D, L) with all deviations; 0 if there is none.
    """
    moments = 16 * sum(tensor.size for tensor in population.spec.values()) * groups  # mean and squares, float64
    block = min(population.nbytes, max(BLOCK_BYTES, member_bytes(population.spec)))
    each, here = 4 * block + _WAITING * moments, 3 * moments  # a block is read, copied, and in part made float64
    if columns:
        row = vector_dtype(layout).itemsize * layout.size
        product = row * columns
        each = max(each, 3 * row * rows_at_once(layout, len(population)) + (1 + _WAITING) * product + 3 * row * groups)
        here += 4 * product + 24 * len(population) * columns
    return {"each": each, "here": here}


# ----------------------------------------------------------------------
# A density fitted to a population: raw and aligned ones by the same code, in memory or from disk.


_WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_ROUNDING = 64  # times the precision: a smaller part of a variance is not known from a difference


def fit(
    population: Population,
    family: str = "diagonal",
    *,
    rank: int | None = None,
    components: int | str | Sequence[int] | Tensor | None = None,
    model: nn.Module | None = None,
    **options: Unpack[FitOptions],
) -> Posterior:
    """Fit a Gaussian, or a mixture of Gaussians, to a population; it is read in blocks and never held.

    "diagonal" is N(mean, diag std^2) with the sample mean and the unbiased standard deviation of each weight: q_d of a
    raw population, q_r of an aligned one. "low-rank" has the covariance diag(scale^2) + factor factor^T with the `rank`
    directions of largest variance (N networks have N - 1 at most: the provenance tells how many there are), and the
    same standard deviation of each weight. "mixture" has such a Gaussian for
    each part of the population, weighted by its share.

    Running statistics of norms are averaged over members (of each component), integers are the first member's.

    >>> population = Population.from_stacked({"w": torch.tensor([[1.0, 0.0], [3.0, 0.0]])})
    >>> found = fit(population)
    >>> found.mean, found.std
    ({'w': tensor([2., 0.])}, {'w': tensor([1.4142, 0.0000])})

    Args:
        population: the networks, at least 2.
        family: "diagonal", "low-rank" or "mixture".
        rank: number of directions of low-rank Gaussians.
        components: of a mixture: a number of k-means clusters, "chains" for one component per chain, or the component
            of each member (N,). A component of one network has no spread of its own: see `pooled`.
        model: tells which tensors are parameters and which are tied; see `uncertain` for what is done without it.
        options: see `FitOptions`; where the networks are read, as in `ExecutionOptions`, does not change the result.

    Raises:
        InputError: too few networks for a spread, or options that do not fit the family.
        SpecError: a network holds NaN or infinity, or the model is of another architecture.
    """
    asked = plan(family, rank, components, options)
    if len(population) < 2:
        raise InputError(f"a spread needs at least 2 networks, found {len(population)}: give more networks")
    layout = uncertain(population, model)
    labels = _labels(population, components) if asked.clusters is None else None
    groups = max(1, asked.clusters or 0) if labels is None else int(labels.max()) + 1
    columns = max(PROJECTED if labels is None else 0, asked.rank + asked.oversample if asked.rank else 0)
    with executor_for(options, **fit_bytes(population, layout, groups, columns)) as executor:
        if labels is None:
            limits = {"restarts": asked.restarts, "steps": asked.steps, "seed": asked.seed}
            labels = clusters(population, layout, asked.clusters or 0, **limits, executor=executor).labels
        found = _fitted(population, layout, labels, asked, executor)
    facts = asked.facts(family) | _rank(found.components, asked)
    told = _provenance(population, family, components, labels.bincount(), facts)
    return replace(found, provenance={**told, **found.provenance})


def _fitted(
    population: Population, layout: FlatLayout, groups: Tensor, asked: FitPlan, executor: Executor
) -> Posterior:
    """One Gaussian for each group of members."""
    beside = [name for name in layout.others if layout.spec[name].dtype.is_floating_point and layout.spec[name].size]
    found = moments(population, (*layout.names, *beside), groups, executor)
    gaussians = _gaussians(population, groups, layout, found, asked, executor)
    rest = [_rest(population, groups, group, layout, found) for group in range(len(found.counts))]
    told = {"constant_statistics": same} if (same := _constant(layout, found)) else {}
    return Posterior(tuple(gaussians), found.counts.double() / len(population), layout, tuple(rest), told)


def _constant(layout: FlatLayout, found: Moments) -> list[str]:
    """Running means that, with the variances beside them, are the same in all networks, up to rounding of a mean."""
    sizes = [layout.spec[name].size for name in found.names]
    means = dict(zip(found.names, found.mean.split(sizes, 1), strict=True))
    squares = dict(zip(found.names, found.squares.split(sizes, 1), strict=True))
    alone = bool((found.counts < 2).any())  # such a component shows no spread: it must agree with the others

    def still(name: str) -> bool:
        limit = _ROUNDING * torch.finfo(torch.float64).eps * means[name].abs()
        within = squares[name] <= limit.square() * found.counts[:, None]
        agree = (means[name] - means[name][:1]).abs() <= limit
        return bool(within.all()) and (not alone or bool(agree.all()))

    beside = {name: f"{name.removesuffix('running_mean')}running_var" for name in statistics_in(layout.others)}
    return [name for name, other in beside.items() if all(still(own) for own in (name, other) if own in means)]


def _labels(population: Population, components: Any) -> Tensor:
    """The component of each member as it was given, int64 (N,), from 0 up."""
    if components is None:
        return torch.zeros(len(population), dtype=torch.int64)
    if isinstance(components, str):
        chain = population.chain
        if components != "chains" or chain is None or bool((chain < 0).any()):
            what = "a population without known chains" if components == "chains" else repr(components)
            raise InputError(
                f'expected components as a number, "chains" or the component of each member, found {what}: give the '
                "chain of each member to Population, or a number of clusters"
            )
        components = chain
    try:
        labels = torch.as_tensor(components).cpu()
        what = f"{labels.dtype} of shape {tuple(labels.shape)}"
        fits = tuple(labels.shape) == (len(population),) and labels.dtype in _WHOLE
    except (TypeError, ValueError, RuntimeError):
        fits, what = False, f"a {type(components).__name__} of something else"
    if not fits:
        raise InputError(
            f"expected the component of each of {len(population)} members as integers, found {what}: give one integer "
            "per member"
        )
    found: Tensor = labels.unique(return_inverse=True)[1]
    return found


def _gaussians(
    population: Population, groups: Tensor, layout: FlatLayout, found: Moments, asked: FitPlan, executor: Executor
) -> list[Gaussian]:
    """One Gaussian for each group of networks; `groups` (members,) is the group of each."""
    size, dtype = layout.size, vector_dtype(layout)
    means = found.mean[:, :size]
    if asked.pooled:
        rows = Deviations(population, layout, means, groups, executor=executor)
        shape = _shape(rows, found.pooled_std()[:size], dtype, asked)
        return [Gaussian(mean.to(dtype), shape) for mean in means]
    made = []
    for group, (mean, std) in enumerate(zip(means, found.std()[:, :size], strict=True)):
        part = population if len(means) == 1 else population[(groups == group).nonzero().flatten()]
        rows = Deviations(part, layout, mean[None], executor=executor)
        made.append(Gaussian(mean.to(dtype), _shape(rows, std, dtype, asked)))
    return made


def _shape(rows: Deviations, std: Tensor, dtype: torch.dtype, asked: FitPlan) -> Covariance:
    """The spread of networks around the means of their groups, which together have this std (D,)."""
    narrow = std.to(dtype)
    if asked.shape == "diagonal":
        return Diagonal(narrow)
    factor = leading_factor(
        rows,
        rows.size,
        asked.rank,
        degrees=rows.degrees,
        oversample=asked.oversample,
        passes=asked.passes,
        like=narrow,
        seed=asked.seed,
    )
    if not asked.diagonal:
        return LowRank(torch.zeros_like(narrow), factor)
    variance = std.square()
    left = variance - factor.square().sum(1, dtype=torch.float64)
    left[left < _ROUNDING * torch.finfo(narrow.dtype).eps * variance] = 0.0
    return LowRank(left.sqrt().to(narrow), factor)


def _rest(population: Population, groups: Tensor, group: int, layout: FlatLayout, found: Moments) -> State:
    """What a network of this component has beside the vector: averages of statistics, the first member's integers.

    What is the same in all members is taken as it is, since an average may round.
    """
    own = population.member(int((groups == group).nonzero()[0]))
    sizes = [layout.spec[name].size for name in found.names]
    average = dict(zip(found.names, found.mean[group].split(sizes), strict=True))
    for name in constant_tensors(population, [name for name in layout.others if name in average]):
        del average[name]
    return {
        name: average[name].reshape(own[name].shape).to(own[name].dtype) if name in average else own[name]
        for name in layout.others
    }


def _rank(gaussians: Sequence[Gaussian], asked: FitPlan) -> dict[str, Any]:
    """The number of directions, or that of each component where they differ; what was asked for, if that is more."""
    ranks = [own.shape.factor.shape[1] for own in gaussians if isinstance(own.shape, LowRank)]
    if not ranks or set(ranks) == {asked.rank}:
        return {}
    return {"rank": ranks[0] if len(set(ranks)) == 1 else ranks, "rank_asked": asked.rank}


def _provenance(
    population: Population, family: str, components: Any, counts: Tensor, options: dict[str, Any]
) -> dict[str, Any]:
    said = int(components) if isinstance(components, Integral) else components
    said = said if said is None or isinstance(said, int | str) else "given"
    mixture = {} if said is None else {"components": said, "members": counts.tolist()}
    facts = {"family": family, "networks": len(population), "from": population.where, **mixture, **options}
    return {"fit": facts, "population": dict(population.provenance)}
