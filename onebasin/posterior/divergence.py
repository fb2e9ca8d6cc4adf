"""Divergences of two posteriors over the same weights: Kullback-Leibler and 2-Wasserstein.

Covariances are diag(scale^2) + factor factor^T, and only (K, K) systems are solved, so D may be in the millions. Where
there is no closed form the answer says so: as an interval of certain bounds, or as a Monte-Carlo interval.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from onebasin.errors import InputError
from onebasin.posterior.gaussian import Covariance, Diagonal, Gaussian, LowRank, check_spread
from onebasin.posterior.posterior import Posterior
from onebasin.state import check_spec


class ScaleFactor(NamedTuple):
    """Covariance diag(scale^2) + factor factor^T, float64."""

    scale: Tensor  # (D,)
    factor: Tensor  # (D, K), K may be 0


def spread_of(covariance: Covariance) -> ScaleFactor:
    """The parts of a diagonal or low-rank covariance, float64.

    >>> import torch
    >>> spread_of(Diagonal(torch.ones(2))).factor.shape
    torch.Size([2, 0])
    """
    if isinstance(covariance, Diagonal):
        scale = covariance.scale.double()
        return ScaleFactor(scale, scale.new_zeros(len(scale), 0))
    if isinstance(covariance, LowRank):
        return ScaleFactor(covariance.scale.double(), covariance.factor.double())
    raise InputError(
        f"expected diagonal or low-rank Gaussians, found a {covariance.kind} one: draw networks from it, and fit a "
        "diagonal Gaussian to them"
    )


_DENSE = 2048  # up to so many weights covariances are written out


def squared_bures(a: ScaleFactor, b: ScaleFactor) -> tuple[float, float]:
    """Lower and upper bound of the squared Bures metric; they are equal where it has a closed form.

    It is the part of the 2-Wasserstein distance of Gaussians that their covariances A and B make,

        d^2(A, B) = tr A + tr B - 2 tr (A^1/2 B A^1/2)^1/2.

    With no directions it is |scale_a - scale_b|^2. If both independent parts are multiples s and t of the identity (0
    also), all happens in the span of both factors but for (D - rank) (s - t)^2. Otherwise x = scale_a z + F u and
    y = scale_b z + G R u, with R the best rotation, is a coupling: above lies

        |scale_a - scale_b|^2 + |F|^2 + |G|^2 - 2 |F^T G|_*,

    and below lie the distances of the marginals, sum_i (std_a - std_b)_i^2.
    """
    if not (a.factor.shape[1] or b.factor.shape[1]):
        exact = float((a.scale - b.scale).square().sum())
        return exact, exact
    if _isotropic(a) and _isotropic(b):
        exact = _in_the_span(a, b)
        return exact, exact
    if len(a.scale) <= _DENSE:
        exact = _dense(_covariance(a.scale, a.factor), _covariance(b.scale, b.factor))
        return exact, exact
    low = float((_std(a) - _std(b)).square().sum())
    directions = a.factor.square().sum() + b.factor.square().sum() - 2 * _nuclear(a.factor.T @ b.factor)
    return low, max(low, float((a.scale - b.scale).square().sum() + directions.clamp(min=0)))


def _isotropic(spread: ScaleFactor) -> bool:
    return bool((spread.scale == spread.scale[0]).all())


def _in_the_span(a: ScaleFactor, b: ScaleFactor) -> float:
    """Both covariances are multiples of the identity outside of the span of their factors."""
    together = torch.cat([a.factor, b.factor], 1)
    if together.shape[1] >= len(together):
        return _dense(_covariance(a.scale, a.factor), _covariance(b.scale, b.factor))
    basis = torch.linalg.qr(together).Q
    rank = basis.shape[1]
    inside = [_covariance(spread.scale[:rank], basis.T @ spread.factor) for spread in (a, b)]
    outside: float = (len(together) - rank) * float(a.scale[0] - b.scale[0]) ** 2
    return _dense(inside[0], inside[1]) + outside


def _covariance(scale: Tensor, factor: Tensor) -> Tensor:
    return torch.diag(scale.square()) + factor @ factor.T


def _dense(a: Tensor, b: Tensor) -> float:
    """d^2 of two matrices: tr (A^1/2 B A^1/2)^1/2 is the nuclear norm of A^1/2 B^1/2."""
    return max(0.0, float(a.trace() + b.trace() - 2 * _nuclear(_root(a) @ _root(b))))


def _root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    root: Tensor = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
    return root


def _nuclear(matrix: Tensor) -> Tensor:
    total: Tensor = torch.linalg.svdvals(matrix).sum()
    return total


def _std(spread: ScaleFactor) -> Tensor:
    return (spread.scale.square() + spread.factor.square().sum(1)).sqrt()


_DRAWN_BYTES = 1 << 28


@dataclass(frozen=True)
class Divergence:
    """A number and how well it is known.

    Attributes:
        value: the divergence; an upper bound where the method is "bounds".
        low: a lower bound; of a Monte-Carlo estimate, two standard errors below.
        high: an upper bound; of a Monte-Carlo estimate, two standard errors above.
        method: "closed form", "bounds" or "Monte Carlo".
    """

    value: float
    low: float
    high: float
    method: str

    def __float__(self) -> float:
        return self.value

    def __str__(self) -> str:
        if self.method == "closed form":
            return f"{self.value:.6g}"
        return f"{self.value:.6g} ({self.low:.6g} to {self.high:.6g}, {self.method})"


def kl(p: Posterior, q: Posterior, *, samples: int = 200, generator: torch.Generator | None = None) -> Divergence:
    """Kullback-Leibler divergence KL(p | q) = E_p[log p - log q] over the uncertain weights, in nats.

    Exact for Gaussians; for mixtures an average over draws from each component of p, with its standard error.

    Args:
        p: where the expectation is taken.
        q: what it is compared with; both need a density, so low-rank Gaussians need their diagonal.
        samples: draws from each component of p, where there are mixtures.
        generator: for these draws; they need one.
    """
    _check(p, q)
    if len(p.components) == len(q.components) == 1:
        exact = gaussian_kl(p.components[0], q.components[0])
        return Divergence(exact, exact, exact, "closed form")
    if generator is None or samples < 2:
        raise InputError(
            f"expected a generator and at least 2 samples for the divergence of mixtures, found {samples} samples and "
            f"{'a' if generator else 'no'} generator: give generator=torch.Generator().manual_seed(0)"
        )
    mean, variance = 0.0, 0.0
    for weight, component in zip(p.weights.tolist(), p.components, strict=True):
        gaps = _log_ratios(p, q, component, samples, generator)
        mean += weight * float(gaps.mean())
        variance += weight**2 * float(gaps.var()) / samples
    error = math.sqrt(variance)
    return Divergence(mean, mean - 2 * error, mean + 2 * error, "Monte Carlo")


def wasserstein2(p: Posterior, q: Posterior) -> Divergence:
    """2-Wasserstein distance: the root of the least E|x - y|^2 over all couplings of x from p and y from q.

    Exact for Gaussians that are diagonal, or low rank without a diagonal part or with one that is a multiple of the
    identity, and for any up to 2,048 weights. Other low-rank Gaussians get bounds: above by the coupling that takes
    independent parts and directions apart, below by the marginals. Mixtures get bounds too: above by the best
    transport between whole components (Delon and Desolneux, 2020), below by means and marginal deviations.
    """
    _check(p, q)
    if len(p.components) == len(q.components) == 1:
        low, high = _squared(p.components[0], q.components[0])
        method = "closed form" if low == high else "bounds"
    else:
        pairs = [[_squared(left, right)[1] for right in q.components] for left in p.components]
        high = _transported(torch.tensor(pairs, dtype=torch.float64), p.weights, q.weights)
        low, method = min(high, _marginal(p, q)), "bounds"
    return Divergence(math.sqrt(high), math.sqrt(low), math.sqrt(high), method)


def gaussian_kl(p: Gaussian, q: Gaussian) -> float:
    """KL(p | q) of two Gaussians in closed form.

    In units of q's scale, with G its factor and [G; I] = [Q; P] R, the inverse covariance of q is I - Q Q^T, and
    det(I + G G^T) = det(R)^2. What is small comes from sums of squares, not from a difference of large numbers:
    v^T (I - Q Q^T) v = |v - Q y|^2 + |P y|^2 for y = Q^T v; for its diagonal see `_left_alone`.
    """
    left, right = spread_of(p.covariance), spread_of(q.covariance)
    for spread in (left, right):
        check_spread(spread.scale)
    unit = right.scale
    along, factor = right.factor / unit[:, None], left.factor / unit[:, None]
    basis: Tensor = torch.linalg.qr(_above_identity(along)).Q
    gap = ((q.centre.double() - p.centre.double()) / unit)[:, None]
    independent = ((left.scale / unit).square() * _left_alone(along, basis[: len(unit)])).sum()
    trace = independent + _quadratic(factor, basis) + _quadratic(gap, basis)
    return float(0.5 * (trace - len(unit)) + _half_log_determinant(right) - _half_log_determinant(left))


def _above_identity(along: Tensor) -> Tensor:
    """[G; I], whose columns have the inner products I + G^T G."""
    return torch.cat([along, torch.eye(along.shape[1], dtype=along.dtype, device=along.device)])


def _left_alone(along: Tensor, basis: Tensor) -> Tensor:
    """Diagonal of (I + G G^T)^-1, (D,): 1 - |q_i|^2, with q_i the rows of Q.

    Where |q_i|^2 > 1/2, as of fewer than 2 K rows, it is 1 / (1 + g_i^T (I + H^T H)^-1 g_i), with H the other rows
    of G, which does not lose the digits that the difference from 1 does.
    """
    diagonal = 1 - basis.square().sum(1)
    heavy = (diagonal < 0.5).nonzero().flatten()
    if not len(heavy):
        return diagonal
    light = torch.linalg.qr(_above_identity(along.index_fill(0, heavy, 0.0)), mode="r").R
    for number, row in enumerate(heavy.tolist()):
        remaining = torch.cat([along[heavy[:number]], along[heavy[number + 1 :]], light])
        root = torch.linalg.qr(remaining, mode="r").R
        solved = torch.linalg.solve_triangular(root.T, along[row][:, None], upper=False)
        diagonal[row] = 1 / (1 + solved.square().sum())
    return diagonal


def _quadratic(columns: Tensor, basis: Tensor) -> Tensor:
    """Sum over columns v of v^T (I + G G^T)^-1 v, with `basis` [Q; P]."""
    padded = torch.cat([columns, columns.new_zeros(basis.shape[1], columns.shape[1])])
    left = padded - basis @ (basis.T @ padded)
    return (left - basis @ (basis.T @ left)).square().sum()  # once more, for what rounding left in the span


def _half_log_determinant(spread: ScaleFactor) -> Tensor:
    root: Tensor = torch.linalg.qr(_above_identity(spread.factor / spread.scale[:, None]), mode="r").R
    return spread.scale.log().sum() + root.diagonal().abs().log().sum()


def _squared(p: Gaussian, q: Gaussian) -> tuple[float, float]:
    """Lower and upper bound of the squared distance of two Gaussians; equal where it is known."""
    gap = float((p.centre.double() - q.centre.double()).square().sum())
    low, high = squared_bures(spread_of(p.covariance), spread_of(q.covariance))
    return gap + low, gap + high


def _marginal(p: Posterior, q: Posterior) -> float:
    """|mean - mean|^2 + |std - std|^2: a lower bound whatever the distributions (Gelbrich, 1990)."""
    means, spreads = p.flat_mean - q.flat_mean, p.flat_std - q.flat_std
    return float(means.square().sum() + spreads.square().sum())


def _transported(costs: Tensor, left: Tensor, right: Tensor) -> float:
    """The least cost of moving weights (M,) onto weights (L,) at costs (M, L)."""
    from scipy.optimize import linprog

    rows, columns = costs.shape
    unit = float(costs.max())  # the solver's tolerances are those of costs about 1
    if unit == 0:
        return 0.0
    sums = torch.cat(
        [torch.eye(rows).repeat_interleave(columns, 1), torch.eye(columns).repeat(1, rows)]
    )  # of each row, and of each column
    totals = torch.cat([left.double() / left.double().sum(), right.double() / right.double().sum()])
    solution = linprog(costs.reshape(-1).numpy() / unit, A_eq=sums.numpy(), b_eq=totals.cpu().numpy(), method="highs")
    return max(0.0, float(solution.fun)) * unit


def _log_ratios(p: Posterior, q: Posterior, component: Gaussian, samples: int, generator: torch.Generator) -> Tensor:
    """The differences log p - log q at draws from one component of p, float64 (samples,)."""
    size = max(1, min(samples, _DRAWN_BYTES // (8 * max(1, component.size))))
    gaps = []
    for start in range(0, samples, size):
        drawn = component.draw_flat(min(size, samples - start), generator)
        gaps.append(_log_density(p, drawn) - _log_density(q, drawn))
    return torch.cat(gaps)


def _log_density(posterior: Posterior, flat: Tensor) -> Tensor:
    """Log densities of weight vectors (n, D), float64 (n,)."""
    each = torch.stack([component.log_density(flat) for component in posterior.components])
    return torch.logsumexp(each + posterior.weights.to(each).log()[:, None], 0)


def _check(p: Posterior, q: Posterior) -> None:
    check_spec(q.spec, p.spec, where="the second posterior")
    if p.layout.names != q.layout.names:
        raise InputError(
            f"expected posteriors over the same weights, found {len(p.layout.names)} uncertain tensors in the first "
            f"and {len(q.layout.names)} in the second: fit both with the same model"
        )
