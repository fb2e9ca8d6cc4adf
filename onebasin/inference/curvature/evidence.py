"""The curvature of the log likelihood at a network, in the form that is wanted, and the posterior it implies.

With curvature G and prior precision Lambda the Laplace approximation is N(theta, (G + Lambda)^-1), and its evidence is

    log p(data) = log p(data | theta) + 1/2 (log det Lambda - theta^T Lambda theta - log det(G + Lambda)).

Lambda has one value per tensor. It is chosen after G, so G is kept by its eigenvalues where that is possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from onebasin.errors import InputError
from onebasin.inference.curvature.diagonal import diagonal
from onebasin.inference.curvature.kronecker import kronecker_factors
from onebasin.inference.curvature.layers import known_layers, tensor_names
from onebasin.inference.curvature.rows import Seen, dense
from onebasin.posterior.diagonal import Diagonal
from onebasin.posterior.full import Full
from onebasin.posterior.gaussian import Shape
from onebasin.posterior.kronecker import Block, Kronecker

STRUCTURES = ("diagonal", "kfac", "full")
_LARGEST = 5000  # weights of a full matrix: 200 MB in float64
_WIDEST = 46.0  # a tuned precision is between exp(-46) and exp(46), about 1e-20 and 1e20


class Spectrum(NamedTuple):
    """Curvature of one tensor as a matrix (p, q): (left kron right) diag(values) (left kron right)^T, float64.

    Attributes:
        left: eigenvectors (p, p); None for the identity.
        right: eigenvectors (q, q); None for the identity.
        values: eigenvalues (p, q).
    """

    left: Tensor | None
    right: Tensor | None
    values: Tensor


class Curvature(Protocol):
    """A positive semi-definite matrix over the weights of some tensors."""

    def eigenvalues(self) -> list[Tensor]:
        """Eigenvalues of each block that is independent of the others."""

    def log_determinant(self, precision: Tensor) -> Tensor:
        """Log det(G + Lambda), for one value of Lambda per tensor (T,)."""

    def shape(self, precision: Tensor, temperature: float, dtype: torch.dtype) -> Shape:
        """Covariance temperature * (G + Lambda)^-1."""


@dataclass(frozen=True, eq=False)
class Blocks:
    """One spectrum per tensor.

    Attributes:
        spectra: in the order of the tensors.
        plain: all are in the basis of the weights themselves.
    """

    spectra: Sequence[Spectrum]
    plain: bool

    def eigenvalues(self) -> list[Tensor]:
        """Eigenvalues of each tensor."""
        return [spectrum.values.reshape(-1) for spectrum in self.spectra]

    def log_determinant(self, precision: Tensor) -> Tensor:
        """Sum of the logarithms of all eigenvalues."""
        pairs = zip(self.eigenvalues(), precision, strict=True)
        return torch.stack([(values + own).log().sum() for values, own in pairs]).sum()

    def shape(self, precision: Tensor, temperature: float, dtype: torch.dtype) -> Shape:
        """Diagonal, or Kronecker blocks."""
        blocks = []
        for (left, right, values), own in zip(self.spectra, precision, strict=True):
            if not bool((values + own > 0).all()):
                _refuse_flat(int((values + own <= 0).sum()))
            scale = ((values + own) / temperature).rsqrt().to(dtype)
            left, right = (None if side is None else side.to(dtype) for side in (left, right))
            blocks.append(Block(left, right, scale))
        return Diagonal(torch.cat([block.scale.reshape(-1) for block in blocks])) if self.plain else Kronecker(blocks)


@dataclass(frozen=True, eq=False)
class Dense:
    """The whole matrix.

    Attributes:
        matrix: G (d, d), float64.
        sizes: weights of each tensor.
    """

    matrix: Tensor
    sizes: Sequence[int]

    def eigenvalues(self) -> list[Tensor]:
        """All of them in one block."""
        return [_decomposed(self.matrix)[0]]

    def log_determinant(self, precision: Tensor) -> Tensor:
        """Of the sum, written out."""
        found: Tensor = torch.linalg.slogdet(self._total(precision)).logabsdet
        return found

    def shape(self, precision: Tensor, temperature: float, dtype: torch.dtype) -> Shape:
        """Full."""
        total = self._total(precision)
        if not bool((precision > 0).all()):
            values = torch.linalg.eigvalsh(total)
            _refuse_flat(int((values <= _noise(values)).sum()))
        return Full(Full.from_precision(total / temperature).factor.to(dtype))

    def _total(self, precision: Tensor) -> Tensor:
        each = precision.repeat_interleave(torch.tensor(self.sizes, device=precision.device))
        return self.matrix + torch.diag(each)


def curvature_of(seen: Seen | None, structure: str, names: Sequence[str], shapes: Sequence[Tensor]) -> Curvature:
    """The curvature over the tensors `names`; zero without data.

    Args:
        seen: a network and its data.
        structure: one of `STRUCTURES`. "diagonal" and "full" are exact parts of the generalised Gauss-Newton matrix;
            "kfac" has Kronecker factors for linear and convolution layers, and the exact diagonal for other tensors.
        names: the tensors.
        shapes: tensors of their shapes.
    """
    sizes = [value.numel() for value in shapes]
    if structure == "full":
        if sum(sizes) > _LARGEST:
            raise InputError(
                f"expected at most {_LARGEST} weights for a full covariance, found {sum(sizes)}: choose "
                'structure="kfac" or layers="last"'
            )
        zero = shapes[0].new_zeros(sum(sizes), sum(sizes), dtype=torch.float64)
        return Dense(_finite(zero if seen is None else dense(seen, names)), sizes)
    if seen is None:
        empty = [value.new_zeros(value.numel(), 1, dtype=torch.float64) for value in shapes]
        return Blocks([Spectrum(None, None, value) for value in empty], structure == "diagonal")
    return _blocks(seen, structure == "diagonal", names)


def _blocks(seen: Seen, plain: bool, names: Sequence[str]) -> Blocks:
    spectra: dict[str, Spectrum] = {}
    layers = {} if plain else known_layers(seen)
    wanted = {name: layer for name, layer in layers.items() if set(tensor_names(name)) & set(names)}
    for name, factors in kronecker_factors(seen, wanted).items() if wanted else ():
        weight, bias = tensor_names(name)
        values, left = _decomposed(factors.slopes)
        across, right = _decomposed(factors.inputs)
        spectra[weight] = Spectrum(left, right, torch.outer(values, across))
        spectra[bias] = Spectrum(left, None, values[:, None])
    others = [name for name in names if name not in spectra]
    for name, own in diagonal(seen, others).items():
        spectra[name] = Spectrum(None, None, _finite(own)[:, None])
    return Blocks([spectra[name] for name in names], plain)


def tuned(eigenvalues: Sequence[Tensor], squares: Tensor) -> Tensor:
    """The prior precision of each block that maximises the evidence, (blocks,).

    The derivative of the evidence by log lambda is 1/2 (sum_i g_i / (g_i + lambda) - lambda |theta|^2), which falls in
    lambda: there is one maximum, found by bisection.

    Args:
        eigenvalues: g of each block.
        squares: |theta|^2 of each block (blocks,).
    """
    low, high = torch.full_like(squares, -_WIDEST), torch.full_like(squares, _WIDEST)
    for _ in range(70):
        middle = (low + high) / 2
        known = torch.stack([(own / (own + value)).sum() for own, value in zip(eigenvalues, middle.exp(), strict=True)])
        rising = known > middle.exp() * squares
        low, high = torch.where(rising, middle, low), torch.where(rising, high, middle)
    return ((low + high) / 2).exp()


def log_evidence(curvature: Curvature, precision: Tensor, sizes: Sequence[int], squares: Tensor) -> Tensor:
    """What the evidence adds to the log likelihood at the mode; NaN for a flat prior.

    Args:
        curvature: G.
        precision: Lambda of each tensor (T,).
        sizes: weights of each tensor.
        squares: |theta|^2 of each tensor (T,).
    """
    counts = torch.tensor(sizes, dtype=torch.float64, device=precision.device)
    prior = (counts * precision.log() - precision * squares).sum()
    found = 0.5 * (prior - curvature.log_determinant(precision))
    return torch.where((precision > 0).all(), found, torch.nan)


def _decomposed(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, zero where they are rounding, and eigenvectors of a positive semi-definite matrix."""
    values, vectors = torch.linalg.eigh(_finite(factor))
    return torch.where(values > _noise(values), values, 0), vectors


def _noise(values: Tensor) -> Tensor:
    return torch.finfo(values.dtype).eps * len(values) * values.max()


def _finite(matrix: Tensor) -> Tensor:
    if not bool(torch.isfinite(matrix).all()):
        raise InputError(
            "expected a finite curvature at the trained networks, found NaN or infinity: train with a smaller rate, or "
            "start from other networks"
        )
    return matrix


def _refuse_flat(directions: int) -> None:
    if directions:
        raise InputError(
            f"expected data or a prior to bound every weight, found {directions} directions without either: give a "
            "prior, such as prior=1.0"
        )
