"""Scalings of logits, and isotonic maps of probabilities, fitted to held-out examples.

    temperature: z / T,    vector: a * z + c,    matrix: A z + c,

one map for all members of a population, chosen so that their *average* predictive has the least negative
log-likelihood; a single member is the ordinary scaling of Guo et al. (2017). Vector and matrix are held to the best
temperature by a ridge as in ODIR (Kull et al., 2019): with K classes,

    ridge (mean of squared off-diagonal entries + mean of (A_kk - 1/T)^2 + mean of c_k^2),

so a large ridge gives the temperature. Logits are (members, examples, classes).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from onebasin.errors import InputError
from onebasin.metrics.calibration import COLDEST, HOTTEST, best_temperature
from onebasin.metrics.probabilities import as_class_numbers, as_probabilities

SCALINGS = ("temperature", "vector", "matrix")
_GRID, _GOLDEN = 17, (math.sqrt(5) - 1) / 2
_COLD, _HOT = 1e-3, 1e3  # temperatures among which the one of a population is looked for
_CLOSE = 1e-10  # of the logarithm of a temperature
_ITERATIONS = 200


@dataclass(frozen=True, eq=False)
class Scaling:
    """The map z -> matrix z + shift of logits.

    >>> Scaling(torch.tensor([[2.0, 0.0], [0.0, 1.0]]).double(), torch.tensor([0.0, 3.0]).double())(torch.ones(1, 2))
    tensor([[2., 4.]], dtype=torch.float64)

    Attributes:
        matrix: float64 (classes, classes).
        shift: float64 (classes,).
    """

    matrix: Tensor
    shift: Tensor

    @classmethod
    def of_temperature(cls, temperature: float, classes: int) -> Scaling:
        """The map z -> z / T."""
        return cls(torch.eye(classes, dtype=torch.float64) / temperature, torch.zeros(classes, dtype=torch.float64))

    @property
    def diagonal(self) -> Tensor | None:
        """The factors of the logits (classes,) where no logit is mixed with another, else None."""
        factors = self.matrix.diagonal()
        return factors if torch.equal(self.matrix, torch.diag(factors)) else None

    @property
    def temperature(self) -> float | None:
        """T where the map divides by it and does nothing else, else None."""
        factors = self.diagonal
        alone = factors is not None and bool((factors == factors[0]).all()) and not bool(self.shift.any())
        return 1 / float(factors[0]) if alone and factors is not None else None

    def __call__(self, logits: Tensor) -> Tensor:
        """Scaled logits (..., classes), float64."""
        matrix, shift = self.matrix.to(logits.device), self.shift.to(logits.device)
        return logits.double() @ matrix.T + shift


@dataclass(frozen=True, eq=False)
class Isotonic:
    """Ascending maps of the probability of each class, piecewise linear, and a division by their sum.

    Attributes:
        knots: of each class its distinct probabilities at which the map bends, ascending float64 (k,).
        values: those of the map there (k,).
    """

    knots: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    def __call__(self, probabilities: Tensor) -> Tensor:
        """Calibrated probabilities (examples, classes), float64."""
        exact = as_probabilities(probabilities)
        columns = [
            torch.from_numpy(np.interp(column.cpu().numpy(), knots.cpu().numpy(), values.cpu().numpy()))
            for column, knots, values in zip(exact.T, self.knots, self.values, strict=True)
        ]
        raised = torch.stack(columns, 1).to(exact.device)
        total = raised.sum(1, keepdim=True)
        return torch.where(total > 0, raised / total, exact)


def fit_scaling(
    logits: Tensor, targets: Tensor, method: str = "temperature", *, ridge: float = 0.01, shift: bool = True
) -> Scaling:
    """Return the scaling of logits that gives the average predictive its least mean negative log-likelihood.

    Of one member the problem is convex. Of several the temperature is looked for on a grid of `_GRID` and by golden
    section around its best place; vector and matrix start from there, by L-BFGS.

    >>> z = torch.tensor([[[1.0, 0.0]]]).expand(1, 4, 2)
    >>> round(fit_scaling(z, torch.tensor([0, 0, 0, 1])).temperature, 6) == round(1 / math.log(3), 6)
    True

    Args:
        logits: (members, examples, classes).
        targets: class numbers (examples,).
        method: one of `SCALINGS`.
        ridge: how strongly vector and matrix are held to the temperature.
        shift: whether vector and matrix add a vector to the logits.

    Raises:
        InputError: no temperature is best, because every example is right.
    """
    if method not in SCALINGS:
        raise InputError(f"expected a scaling out of {', '.join(SCALINGS)}, found {method!r}: give 'temperature'")
    if not ridge >= 0:
        raise InputError(f"expected a ridge >= 0, found {ridge}: 0.01 is a start")
    z = _as_members(logits)
    goals = as_class_numbers(targets, z)
    classes = z.shape[2]
    temperature = _best_temperature(z, goals)
    found = Scaling.of_temperature(temperature, classes)
    if method == "temperature":
        return found
    start = 1 / temperature
    flat = torch.full((classes,), start, dtype=torch.float64, device=z.device)
    weights = (flat if method == "vector" else torch.diag(flat)).clone().requires_grad_()
    offset = torch.zeros(classes, dtype=torch.float64, device=z.device, requires_grad=shift)
    descent = torch.optim.LBFGS(
        [weights, offset] if shift else [weights],
        max_iter=_ITERATIONS,
        tolerance_grad=1e-8,
        tolerance_change=1e-11,
        line_search_fn="strong_wolfe",
    )

    def slope() -> Tensor:
        descent.zero_grad()
        with torch.enable_grad():
            own = torch.diag(weights) if method == "vector" else weights
            rest = own - torch.diag(own.diagonal())
            held = rest.square().sum() / max(1, classes * (classes - 1))
            held = held + (own.diagonal() - start).square().mean() + offset.square().mean()
            loss = _nll(z @ own.T + offset, goals) + ridge * held
            loss.backward()
        return loss.detach()

    descent.step(slope)
    own = weights.detach()
    return Scaling((torch.diag(own) if method == "vector" else own).cpu(), offset.detach().cpu())


def fit_isotonic(probabilities: Tensor, targets: Tensor) -> Isotonic:
    """Return ascending maps of probabilities: for each class isotonic regression of its outcomes (Zadrozny and Elkan).

    With n examples a value v of the regression at probability p becomes (n v + p) / (n + 1), as if one more example
    had come out just as it was said: so nothing that was possible becomes impossible, which would cost without bound.

    >>> found = fit_isotonic(torch.tensor([[0.9, 0.1]] * 4), torch.tensor([0, 0, 0, 1]))
    >>> found(torch.tensor([[0.9, 0.1]]))  # (4 * 0.75 + 0.9) / 5
    tensor([[0.7800, 0.2200]], dtype=torch.float64)

    Args:
        probabilities: (examples, classes).
        targets: class numbers (examples,).
    """
    from sklearn.isotonic import isotonic_regression

    exact = as_probabilities(probabilities)
    goals = as_class_numbers(targets, exact)
    knots, values = [], []
    for label in range(exact.shape[1]):
        places, where, counts = exact[:, label].unique(return_inverse=True, return_counts=True)
        hits = torch.zeros_like(places).index_add_(0, where, (goals == label).double())
        shares = (hits / counts).cpu().numpy()
        fitted = isotonic_regression(shares, sample_weight=counts.cpu().numpy(), y_min=0, y_max=1)
        smooth = (len(exact) * torch.from_numpy(fitted).to(places) + places) / (len(exact) + 1)
        knots.append(places)
        values.append(smooth)
    return Isotonic(tuple(knots), tuple(values))


def scaled_nll(logits: Tensor, targets: Tensor, scaling: Scaling) -> Tensor:
    """Negative log-likelihood of each example under the average predictive of scaled members, float64 (examples,)."""
    z = _as_members(logits)
    return _losses(scaling(z), as_class_numbers(targets, z))


def _best_temperature(z: Tensor, goals: Tensor) -> float:
    alone = len(z) == 1
    best = best_temperature(z[0], goals) if alone else _searched(lambda t: float(_nll(z / math.exp(t), goals)))
    if best <= max(COLDEST, 0 if alone else _COLD):
        found = "that are all right" if alone else "on which whole votes of the members predict best"
        raise InputError(
            f"expected examples for which some temperature is best, found {len(goals)} {found}, so that the lowest is: "
            "give more held-out examples"
        )
    return min(best, HOTTEST)


def _searched(value: Callable[[float], float]) -> float:
    """The temperature exp(t) of least value: the best on a grid of t, then golden section between its neighbours."""
    step = math.log(_HOT / _COLD) / (_GRID - 1)
    grid = [math.log(_COLD) + step * number for number in range(_GRID)]
    place = min(range(_GRID), key=lambda number: value(grid[number]))
    if place == 0:
        return _COLD
    low, high = grid[place] - step, grid[place] + step
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    below, above = value(left), value(right)
    while high - low > _CLOSE:
        if below <= above:
            high, right, above = right, left, below
            left = high - _GOLDEN * (high - low)
            below = value(left)
        else:
            low, left, below = left, right, above
            right = low + _GOLDEN * (high - low)
            above = value(right)
    return math.exp((low + high) / 2)


def _nll(logits: Tensor, goals: Tensor) -> Tensor:
    return _losses(logits, goals).mean()


def _losses(logits: Tensor, goals: Tensor) -> Tensor:
    """-log of the mean over members of softmax(logits)[target], (examples,)."""
    logs = logits.log_softmax(2).gather(2, goals.expand(len(logits), -1)[..., None]).squeeze(2)
    return math.log(len(logits)) - logs.logsumexp(0)


def _as_members(logits: Tensor) -> Tensor:
    z = logits.detach().double()
    if z.dim() != 3 or not z.numel() or z.shape[2] < 2 or not bool(z.isfinite().all()):
        raise InputError(
            f"expected finite logits (members, examples, classes) of at least two classes, found shape "
            f"{tuple(z.shape)} with {int((~z.isfinite()).sum())} entries that are not finite; give one network as "
            "logits[None]"
        )
    return z
