"""Laplace approximations: a Gaussian around each trained network, as wide as the posterior is curved there.

    N(theta, T (G + Lambda)^-1),    G = sum_n J_n^T H_n J_n

with the generalised Gauss-Newton matrix G of the log likelihood and the precision Lambda of the prior.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from onebasin.errors import InputError
from onebasin.inference.curvature import STRUCTURES, Curvature, Seen, curvature_of, last_layer, log_evidence, tuned
from onebasin.inference.kernel import ChainPlan, Draws, Info, Stage, StepIndex, check_counts
from onebasin.inference.seeds import Streams
from onebasin.inference.target import Target
from onebasin.inference.training import TrainedMethod
from onebasin.posterior import Covariance, Diagonal, Full, Gaussian, Kronecker, Partial, one_of_each
from onebasin.state import State

_SHAPES: dict[str, type[Covariance]] = {"diagonal": Diagonal, "kfac": Kronecker, "full": Full}


@dataclass(frozen=True, kw_only=True)
class Laplace(TrainedMethod):
    """Laplace approximations: a Gaussian around each trained network, as wide as the posterior is curved there.

    Attributes:
        draws: networks from each Gaussian.
        structure: "kfac", Kronecker factors for linear and convolution layers and the exact diagonal for other tensors;
            "diagonal"; or "full", for at most 5,000 weights.
        layers: "all", or "last": only the last module that holds weights is uncertain.
        prior_precision: None for the prior that was given; a number; "marginal" for the number that maximises the
            evidence; "per-layer" for one such number per tensor (not with "full").
        temperature: T, which multiplies the covariance.
    """

    name: ClassVar[str] = "laplace"
    draws: int = 100
    structure: str = "kfac"
    layers: str = "all"
    prior_precision: float | str | None = None
    temperature: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(1, draws=self.draws)
        if self.structure not in STRUCTURES:
            raise InputError(
                f'expected a structure out of {", ".join(STRUCTURES)}, found {self.structure!r}: give structure="kfac"'
            )
        if self.layers not in ("all", "last"):
            raise InputError(f'expected layers "all" or "last", found {self.layers!r}: give layers="last"')
        if not self.temperature > 0:
            raise InputError(f"expected a temperature above 0, found {self.temperature}: 1 gives the posterior")
        precision = self.prior_precision
        if isinstance(precision, str):
            if precision not in ("marginal", "per-layer") or (precision == "per-layer" and self.structure == "full"):
                raise InputError(
                    'expected prior_precision to be None, a number, "marginal", or "per-layer" with structure "kfac" '
                    f'or "diagonal", found {precision!r} with {self.structure!r}: give prior_precision="marginal"'
                )
        elif precision is not None and not precision > 0:
            raise InputError(f"expected a positive prior_precision, found {precision}: give a number above 0")

    def plan(self, target: Target) -> ChainPlan:
        """Train, fit, draw."""
        fitted = Stage("laplace", LaplaceKernel(target, self), 0)
        return ChainPlan((self.training(target, optimum=True), fitted), self.draws, (0,))


class Fitted(NamedTuple):
    """One Gaussian per chain.

    Attributes:
        position: the trained networks (chains, D).
        buffers: what they carry beside the weights.
        shape: the tensors of each chain's shape, by name (chains, ...).
        precision: the prior precision of each uncertain tensor, float64 (chains, T).
        evidence: the Laplace approximation of the log evidence, float64 (chains,); NaN for a flat prior.
    """

    position: Tensor
    buffers: State
    shape: State
    precision: Tensor
    evidence: Tensor


@dataclass(frozen=True, eq=False)
class LaplaceKernel:
    """A Gaussian around each network, fitted at the start; nothing moves afterwards."""

    target: Target
    method: Laplace = Laplace()

    def __post_init__(self) -> None:
        if self.target.outputs is None and self.target.prior.flat:
            raise InputError(
                "expected a likelihood with outputs, whose curvature is known, or a prior alone, found neither: give a "
                "prior, or use HMC, SGHMC or VI for a density of your own"
            )
        precision = self.method.prior_precision
        if self.target.outputs is None and isinstance(precision, str):
            raise InputError(
                f"expected data to choose the prior precision by, found prior_precision={precision!r} and no data: "
                "leave it out, or give data"
            )

    def init(self, start: Draws, streams: Streams) -> Fitted:
        """Fit a Gaussian around each network."""
        networks = [self._network(start, chain) for chain in range(len(start.position))]
        names = self._names(networks[0])
        shapes, precisions, evidences = [], [], []
        likelihood = self.target(start.position, start.buffers).log_likelihood
        for chain, seen in enumerate(networks):
            own = self.target.layout.split(start.position[chain])
            weights = [own[name] for name in names]
            curvature = self._curvature(seen, names, weights)
            sizes = [value.numel() for value in weights]
            squares = torch.stack([value.double().square().sum() for value in weights])
            precision = self._precision(curvature, names, squares)
            shape = curvature.shape(precision, self.method.temperature, start.position.dtype)
            shapes.append(self._placed(shape, names).tensors())
            precisions.append(precision)
            evidences.append(likelihood[chain] + log_evidence(curvature, precision, sizes, squares))
        stacked = {name: torch.stack([shape[name] for shape in shapes]) for name in shapes[0]}
        return Fitted(start.position, start.buffers, stacked, torch.stack(precisions), torch.stack(evidences))

    def _curvature(self, seen: Seen | None, names: list[str], weights: list[Tensor]) -> Curvature:
        try:
            return curvature_of(seen, self.method.structure, names, weights)
        except RuntimeError as error:  # some operations have no derivative under vmap, those of LSTM and GRU for one
            raise InputError(
                f"the curvature of this model could not be computed ({error}): choose layers='last', or another method"
            ) from error

    def step(self, state: Fitted, step_index: StepIndex, streams: Streams) -> tuple[Fitted, Info]:
        """Nothing: a Gaussian does not move."""
        return state, self.summary(state)

    def summary(self, state: Fitted) -> Info:
        """The evidence, and the prior precision it stands for (the geometric mean of several)."""
        return {"log_evidence": state.evidence, "prior_precision": state.precision.log().mean(1).exp()}

    def components(self, state: Fitted) -> list[Gaussian]:
        """The Gaussian of each chain."""
        kind = Partial if self.method.layers == "last" else _SHAPES[self.method.structure]
        shapes = [
            kind.from_tensors({name: value[chain] for name, value in state.shape.items()})
            for chain in range(len(state.position))
        ]
        return [Gaussian(centre, shape) for centre, shape in zip(state.position, shapes, strict=True)]

    def draw(self, state: Fitted, streams: Streams) -> Draws:
        """One network from each Gaussian."""
        position = one_of_each(self.components(state), streams.each("draw"))
        return Draws(position, state.buffers, self.target.log_density(position, state.buffers))

    def _network(self, start: Draws, chain: int) -> Seen | None:
        target = self.target
        if target.outputs is None or target.likelihood is None:
            return None
        buffers = {name: value[chain] for name, value in start.buffers.items()}
        return Seen(target, target.outputs, target.likelihood, target.layout.split(start.position[chain]), buffers)

    def _names(self, seen: Seen | None) -> list[str]:
        """The tensors that are uncertain."""
        names = self.target.layout.names
        if self.method.layers == "all":
            return list(names)
        if seen is None:
            raise InputError('expected data to find the last layer with, found none: choose layers="all"')
        last = last_layer(seen)
        return [name for name in names if name in last]

    def _precision(self, curvature: Curvature, names: list[str], squares: Tensor) -> Tensor:
        """The prior precision of each uncertain tensor (T,), float64."""
        given = self.method.prior_precision
        if given == "per-layer":
            return tuned(curvature.eigenvalues(), squares)
        if given == "marginal":
            return tuned([torch.cat(curvature.eigenvalues())], squares.sum()[None]).expand_as(squares)
        if given is not None:
            return torch.full_like(squares, float(given))
        own = self.target.layout.split(self.target.prior.precision)
        return torch.stack([own[name].reshape(-1)[0].double() for name in names])

    def _placed(self, shape: Covariance, names: list[str]) -> Covariance:
        """The shape in the flat vector of all weights."""
        if self.method.layers == "all":
            return shape
        layout = self.target.layout
        places = layout.split(torch.arange(layout.size, device=layout.device))
        return Partial(shape, torch.cat([places[name].reshape(-1) for name in names]), layout.size)
