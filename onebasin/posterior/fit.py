"""A density fitted to a population: raw and aligned ones by the same code, in memory or from disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from onebasin.errors import InputError
from onebasin.functional import statistics_in
from onebasin.parallel import Executor, executor_for
from onebasin.population import Population
from onebasin.posterior.families import GAUSSIANS, ROUNDING, FitOptions
from onebasin.posterior.gaussian import Gaussian, LowRank
from onebasin.posterior.layout import FlatLayout, flat_layout, vector_dtype
from onebasin.posterior.mixture import clusters
from onebasin.posterior.moments import Deviations, Moments, moments
from onebasin.posterior.posterior import Posterior
from onebasin.state import State

MIXTURE = "mixture"
FAMILIES = (*GAUSSIANS, MIXTURE)
_OF_MIXTURES = frozenset({"covariance", "pooled", "restarts", "steps", "seed"})
_COUNTS = {"rank": 1, "passes": 0, "oversample": 0, "restarts": 1, "steps": 1, "seed": None}  # whole numbers, least
_SWITCHES = ("diagonal", "pooled")
_WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def fit(
    population: Population,
    family: str = "diagonal",
    *,
    rank: int | None = None,
    components: int | str | Sequence[int] | Tensor | None = None,
    model: nn.Module | None = None,
    passes: int = 2,
    oversample: int = 10,
    diagonal: bool = True,
    covariance: str = "diagonal",
    pooled: bool = False,
    restarts: int = 10,
    steps: int = 50,
    seed: int = 0,
    workers: int | None = None,
    executor: str | Executor | None = None,
) -> Posterior:
    """Fit a Gaussian, or a mixture of Gaussians, to a population; it is read in blocks and never held.

    "diagonal" is N(mean, diag std^2) with the sample mean and the unbiased standard deviation of each weight: q_d of a
    raw population, q_r of an aligned one. "low-rank" has the covariance diag(scale^2) + factor factor^T with the `rank`
    directions of largest variance (N networks have N - 1 at most: the provenance tells how many there are), and the
    same standard deviation of each weight. "mixture" has such a Gaussian for
    each part of the population, weighted by its share.

    Running statistics of norms are averaged over members (of each component), integers are the first member's.

    >>> population = Population.from_stacked({"w": torch.tensor([[1.0, 0.0], [3.0, 0.0]])})
    >>> posterior = fit(population)
    >>> posterior.mean, posterior.std
    ({'w': tensor([2., 0.])}, {'w': tensor([1.4142, 0.0000])})

    Args:
        population: the networks, at least 2.
        family: "diagonal", "low-rank" or "mixture".
        rank: number of directions of low-rank Gaussians.
        components: of a mixture: a number of k-means clusters, "chains" for one component per chain, or the component
            of each member (N,). A component of one network has no spread of its own: see `pooled`.
        model: tells which tensors are parameters and which are tied; without it their names and values do, see
            `flat_layout`.
        passes: of low rank: power passes over the population; more for directions whose variances differ little.
        oversample: of low rank: directions that are searched beyond the rank.
        diagonal: of low rank: keep what the directions leave of each weight's variance as independent noise. False
            leaves it out: draws then stay in the plane of the directions, and there is no density.
        covariance: of a mixture: "diagonal" or "low-rank" components.
        pooled: of a mixture: all components share one spread, that of members around their component's mean.
        restarts: of a mixture by k-means: starts that are tried.
        steps: of a mixture by k-means: steps at most.
        seed: seed of random projections and starts.
        workers: processes that read the networks; the result does not depend on their number.
        executor: "local" or the address of a Ray cluster, or an open Executor.

    Raises:
        InputError: too few networks for a spread, or an option that the family does not read.
        SpecError: a network holds NaN or infinity, or the model is of another architecture.
    """
    options = FitOptions(
        rank=rank, passes=passes, oversample=oversample, diagonal=diagonal, covariance=covariance, pooled=pooled,
        restarts=restarts, steps=steps, seed=seed,
    )  # fmt: skip
    read = _check(family, components, options)
    if len(population) < 2:
        raise InputError(f"a spread needs at least 2 networks, found {len(population)}: give more networks")
    layout = flat_layout(population, model)
    kind = covariance if family == MIXTURE else family
    with executor_for(workers, executor) as opened:
        count = _cluster_count(components)
        if count is None:
            labels = _labels(population, components)
        else:
            limits = {"restarts": restarts, "steps": steps, "seed": seed}
            labels = clusters(population, layout, count, **limits, executor=opened).labels
        posterior = _fitted(population, layout, labels, kind, options, opened)
    facts = {name: getattr(options, name) for name in sorted(read)} | _rank(posterior.components, rank)
    provenance = _provenance(population, family, components, labels.bincount(), facts)
    return replace(posterior, provenance={**provenance, **posterior.provenance})


def _cluster_count(components: object) -> int | None:
    """The number of clusters, None where components are given in another way."""
    return int(components) if isinstance(components, Integral) else None


def _check(family: str, components: object, options: FitOptions) -> frozenset[str]:
    """Raise `InputError` where options do not go together; return the names of those that the family reads."""
    if family not in (*GAUSSIANS, MIXTURE):
        known = ", ".join((*GAUSSIANS, MIXTURE))
        raise InputError(f'expected a family out of {known}, found {family!r}: give "diagonal"')
    kind = options.covariance if family == MIXTURE else family
    if kind not in GAUSSIANS:
        raise InputError(f'expected a covariance out of {", ".join(GAUSSIANS)}, found {kind!r}: give "diagonal"')
    read = GAUSSIANS[kind].options | (_OF_MIXTURES if family == MIXTURE else frozenset())
    for option in fields(options):
        name, value = option.name, getattr(options, option.name)
        if name in _SWITCHES and not isinstance(value, bool):
            raise InputError(f"expected {name} as True or False, found {value!r}: give {option.default}")
        if name in _COUNTS and value is not None:
            least = _COUNTS[name]
            whole = isinstance(value, Integral) and not isinstance(value, bool)
            if not whole or (least is not None and value < least):
                from_on = "" if least is None else f" from {least} on"
                raise InputError(f"expected {name} as a whole number{from_on}, found {value!r}: give 2")
        if name not in read and value != option.default:
            raise InputError(f"fit of {family!r} with {kind!r} Gaussians does not read {name}={value!r}: leave it out")
    if "rank" in read and options.rank is None:
        raise InputError(f"expected a rank for {kind!r} Gaussians, found none: give one, such as rank=20")
    if isinstance(components, bool) or (family == MIXTURE) != (components is not None):
        raise InputError(
            f"expected components for a mixture and for nothing else, found components={components!r} with {family!r}: "
            'give a number of clusters, "chains", or the component of each member to family="mixture"'
        )
    return read


def _fitted(
    population: Population, layout: FlatLayout, groups: Tensor, kind: str, options: FitOptions, executor: Executor
) -> Posterior:
    """One Gaussian for each group of members."""
    specs = {name: layout.spec[name] for name in layout.buffer_names}
    averaged = [name for name, spec in specs.items() if spec.dtype.is_floating_point and spec.size]
    known = moments(population, (*layout.names, *averaged), groups, executor)
    gaussians = _gaussians(population, groups, layout, known, kind, options, executor)
    buffers = [_buffers(population, groups, group, layout, known) for group in range(len(known.counts))]
    provenance = {"constant_statistics": constant} if (constant := _constant(layout, known)) else {}
    return Posterior(tuple(gaussians), known.counts.double() / len(population), layout, tuple(buffers), provenance)


def _constant(layout: FlatLayout, known: Moments) -> list[str]:
    """Running means that, with the variances beside them, are the same in all networks, up to rounding of a mean."""
    sizes = [layout.spec[name].size for name in known.names]
    means = dict(zip(known.names, known.mean.split(sizes, 1), strict=True))
    squares = dict(zip(known.names, known.squares.split(sizes, 1), strict=True))
    alone = bool((known.counts < 2).any())  # such a component shows no spread: it must agree with the others

    def still(name: str) -> bool:
        limit = ROUNDING * torch.finfo(torch.float64).eps * means[name].abs()
        within = squares[name] <= limit.square() * known.counts[:, None]
        agree = (means[name] - means[name][:1]).abs() <= limit
        return bool(within.all()) and (not alone or bool(agree.all()))

    pairs = [(name, f"{name.removesuffix('running_mean')}running_var") for name in statistics_in(layout.buffer_names)]
    return [pair[0] for pair in pairs if all(still(name) for name in pair if name in means)]


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
    numbered: Tensor = labels.unique(return_inverse=True)[1]
    return numbered


def _gaussians(
    population: Population,
    groups: Tensor,
    layout: FlatLayout,
    known: Moments,
    kind: str,
    options: FitOptions,
    executor: Executor,
) -> list[Gaussian]:
    """One Gaussian for each group of networks; `groups` (members,) is the group of each."""
    size, dtype, estimate = layout.size, vector_dtype(layout), GAUSSIANS[kind].estimate
    means = known.mean[:, :size]
    if options.pooled:
        rows = Deviations(population, layout, means, groups, executor=executor)
        covariance = estimate(rows, known.pooled_std()[:size], dtype, options)
        return [Gaussian(mean.to(dtype), covariance) for mean in means]
    gaussians = []
    for group, (mean, std) in enumerate(zip(means, known.std()[:, :size], strict=True)):
        part = population if len(means) == 1 else population[(groups == group).nonzero().flatten()]
        rows = Deviations(part, layout, mean[None], executor=executor)
        gaussians.append(Gaussian(mean.to(dtype), estimate(rows, std, dtype, options)))
    return gaussians


def _buffers(population: Population, groups: Tensor, group: int, layout: FlatLayout, known: Moments) -> State:
    """The buffers of a network of this component: averages of statistics, the first member's integers.

    What is the same in all members is taken as it is, since an average may round.
    """
    first = population.member(int((groups == group).nonzero()[0]))
    sizes = [layout.spec[name].size for name in known.names]
    average = dict(zip(known.names, known.mean[group].split(sizes), strict=True))
    for name in population.constant_tensors([name for name in layout.buffer_names if name in average]):
        del average[name]
    return {
        name: average[name].reshape(first[name].shape).to(first[name].dtype) if name in average else first[name]
        for name in layout.buffer_names
    }


def _rank(gaussians: Sequence[Gaussian], asked: int | None) -> dict[str, Any]:
    """The number of directions, or that of each component where they differ; what was asked for, if that is more."""
    ranks = [gaussian.covariance.factor.shape[1] for gaussian in gaussians if isinstance(gaussian.covariance, LowRank)]
    if not ranks or set(ranks) == {asked}:
        return {}
    return {"rank": ranks[0] if len(set(ranks)) == 1 else ranks, "rank_asked": asked}


def _provenance(
    population: Population, family: str, components: Any, counts: Tensor, options: dict[str, Any]
) -> dict[str, Any]:
    said = int(components) if isinstance(components, Integral) else components
    said = said if said is None or isinstance(said, int | str) else "given"
    mixture = {} if said is None else {"components": said, "members": counts.tolist()}
    facts = {"family": family, "networks": len(population), "from": population.where, **mixture, **options}
    return {"fit": facts, "population": dict(population.provenance)}
