"""A density fitted to a crowd: raw and aligned ones by the same code, in memory or from disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from onebasin.cluster import Cluster, cluster_for
from onebasin.errors import InputError
from onebasin.norms import statistics_in
from onebasin.population import Population, constant_tensors
from onebasin.posterior.bounds import fit_bytes
from onebasin.posterior.clusters import PROJECTED, clusters
from onebasin.posterior.coordinates import Coordinates
from onebasin.posterior.deviations import Deviations
from onebasin.posterior.diagonal import Diagonal
from onebasin.posterior.family import Options, Plan, plan
from onebasin.posterior.gaussian import Gaussian, Shape
from onebasin.posterior.low_rank import LowRank
from onebasin.posterior.moments import Moments, moments
from onebasin.posterior.posterior import Posterior
from onebasin.posterior.sketch import leading_factor
from onebasin.posterior.uncertain import uncertain, vector_dtype
from onebasin.state import State

_WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_ROUNDING = 64  # times the precision: a smaller part of a variance is not known from a difference


def fit(
    population: Population,
    family: str = "diagonal",
    *,
    rank: int | None = None,
    components: int | str | Sequence[int] | Tensor | None = None,
    model: nn.Module | None = None,
    **options: Unpack[Options],
) -> Posterior:
    """Fit a Gaussian, or a mixture of Gaussians, to a crowd of networks; the crowd is read in blocks and never held.

    "diagonal" is N(mean, diag std^2) with the sample mean and the unbiased standard deviation of each weight: q_d of a
    raw crowd, q_r of an aligned one. "low-rank" has the covariance diag(scale^2) + factor factor^T with the `rank`
    directions of largest variance (N networks have N - 1 at most: the provenance tells how many there are), and the
    same standard deviation of each weight. "mixture" has such a Gaussian for
    each part of the crowd, weighted by its share.

    Running statistics of norms are averaged over members (of each component), integers are the first member's.

    >>> crowd = Population.from_stacked({"w": torch.tensor([[1.0, 0.0], [3.0, 0.0]])})
    >>> found = fit(crowd)
    >>> found.mean, found.std
    ({'w': tensor([2., 0.])}, {'w': tensor([1.4142, 0.0000])})

    Args:
        population: the networks, at least 2.
        family: "diagonal", "low-rank" or "mixture".
        rank: number of directions of low-rank Gaussians.
        components: of a mixture: a number of k-means clusters, "chains" for one component per chain, or the component
            of each member (N,). A component of one network has no spread of its own: see `pooled`.
        model: tells which tensors are parameters and which are tied; see `uncertain` for what is done without it.
        options: see `family.Options`; where the crowd is read is said as in `Places`, and does not change the result.

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
    with cluster_for(options, **fit_bytes(population, layout, groups, columns)) as cluster:
        if labels is None:
            limits = {"restarts": asked.restarts, "steps": asked.steps, "seed": asked.seed}
            labels = clusters(population, layout, asked.clusters or 0, **limits, cluster=cluster).labels
        found = _fitted(population, layout, labels, asked, cluster)
    facts = asked.facts(family) | _rank(found.components, asked)
    told = _provenance(population, family, components, labels.bincount(), facts)
    return replace(found, provenance={**told, **found.provenance})


def _fitted(population: Population, layout: Coordinates, groups: Tensor, asked: Plan, cluster: Cluster) -> Posterior:
    """One Gaussian for each group of members."""
    beside = [name for name in layout.others if layout.spec[name].dtype.is_floating_point and layout.spec[name].size]
    found = moments(population, (*layout.names, *beside), groups, cluster)
    gaussians = _gaussians((population, groups), layout, found, asked, cluster)
    rest = [_rest(population, groups, group, layout, found) for group in range(len(found.counts))]
    told = {"constant_statistics": same} if (same := _constant(layout, found)) else {}
    return Posterior(tuple(gaussians), found.counts.double() / len(population), layout, tuple(rest), told)


def _constant(layout: Coordinates, found: Moments) -> list[str]:
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
    crowd: tuple[Population, Tensor], layout: Coordinates, found: Moments, asked: Plan, cluster: Cluster
) -> list[Gaussian]:
    """One for each group; `crowd` are the networks and the group of each."""
    population, groups = crowd
    size, dtype = layout.size, vector_dtype(layout)
    means = found.mean[:, :size]
    if asked.pooled:
        rows = Deviations(population, layout, means, groups, cluster=cluster)
        shape = _shape(rows, found.pooled_std()[:size], dtype, asked)
        return [Gaussian(mean.to(dtype), shape) for mean in means]
    made = []
    for group, (mean, std) in enumerate(zip(means, found.std()[:, :size], strict=True)):
        part = population if len(means) == 1 else population[(groups == group).nonzero().flatten()]
        rows = Deviations(part, layout, mean[None], cluster=cluster)
        made.append(Gaussian(mean.to(dtype), _shape(rows, std, dtype, asked)))
    return made


def _shape(rows: Deviations, std: Tensor, dtype: torch.dtype, asked: Plan) -> Shape:
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


def _rest(population: Population, groups: Tensor, group: int, layout: Coordinates, found: Moments) -> State:
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


def _rank(gaussians: Sequence[Gaussian], asked: Plan) -> dict[str, Any]:
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
