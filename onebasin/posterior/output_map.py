"""Affine maps of a model's outputs, folded into the weights of its last layers: of networks and of posteriors.

If the output is the sum of the results W_l h_l + b_l of its last layers, then

    A output + c = sum_l (A W_l) h_l + (A b_l) + c:

rows of weights are mixed, and one bias takes the shift. That is linear in the weights, so a Gaussian over them stays
one: its centre moves like a network, its covariance C becomes J C J^T, J being the map without its shift.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from onebasin.errors import InputError
from onebasin.posterior.gaussian import Block, Covariance, Diagonal, Full, Gaussian, Kronecker, LowRank, Partial
from onebasin.posterior.layout import FlatLayout
from onebasin.posterior.posterior import Posterior
from onebasin.state import State


@dataclass(frozen=True, eq=False)
class OutputMap:
    """The map output -> matrix output + shift, for outputs of which the units are those of the last layers.

    >>> double = OutputMap((("weight", "bias"),), 2 * torch.eye(1).double(), torch.ones(1).double())
    >>> double.of_networks({"weight": torch.ones(1, 1, 3), "bias": torch.ones(1, 1)})
    {'weight': tensor([[[2., 2., 2.]]]), 'bias': tensor([[3.]])}

    Attributes:
        layers: state-dict names of the weight of each last layer and of its bias, None where it has none.
        matrix: float64 (units, units).
        shift: float64 (units,); zeros where no layer has a bias.
    """

    layers: tuple[tuple[str, str | None], ...]
    matrix: Tensor
    shift: Tensor

    def __post_init__(self) -> None:
        if bool(self.shift.any()) and all(bias is None for _, bias in self.layers):
            raise InputError("expected a last layer with a bias to take a shift of the outputs, found none: leave it 0")

    def of_networks(self, stacked: Mapping[str, Tensor]) -> State:
        """Networks (n, *shape) with the map folded in, computed in float64 and kept in their dtypes."""
        moved = self._linear(stacked)
        if bool(self.shift.any()):
            name = next(bias for _, bias in self.layers if bias is not None)
            exact = self._mixed(stacked[name]) + self.shift.to(moved[name].device)
            moved[name] = exact.to(stacked[name].dtype)
        return moved

    def of_posterior(self, posterior: Posterior) -> Posterior:
        """The posterior whose draws are the moved draws of this one.

        Raises:
            InputError: the covariance would not keep its form, as where rows of independent weights are mixed.
        """
        layout = posterior.layout
        components, buffers = [], []
        for component, own in zip(posterior.components, posterior.buffers, strict=True):
            wide = {name: value[None] for name, value in own.items()}
            whole = self.of_networks(layout.laid_out(component.centre[None], wide))
            centre = torch.cat([whole[name].reshape(-1) for name in layout.names])
            components.append(Gaussian(centre, self._covariance(component.covariance, layout)))
            buffers.append({name: whole[name][0] for name in layout.buffer_names})
        return replace(
            posterior,
            components=tuple(components),
            buffers=tuple(buffers),
            provenance={**posterior.provenance, "calibrated": True},
        )

    @property
    def _diagonal(self) -> bool:
        return torch.equal(self.matrix, torch.diag(self.matrix.diagonal()))

    def _mixed(self, rows: Tensor) -> Tensor:
        """The matrix times rows (n, units, ...), float64."""
        flat = rows.double().reshape(*rows.shape[:2], -1)
        matrix = self.matrix.to(flat.device)
        if self._diagonal:  # exact where a factor is 1, and no sum of zeros
            return (matrix.diagonal()[:, None] * flat).reshape(rows.shape)
        return (matrix @ flat).reshape(rows.shape)

    def _linear(self, stacked: Mapping[str, Tensor]) -> State:
        names = {name for layer in self.layers for name in layer if name is not None}
        return {name: self._mixed(value).to(value.dtype) if name in names else value for name, value in stacked.items()}

    def _vectors(self, vectors: Tensor, layout: FlatLayout) -> Tensor:
        """J times vectors (n, D)."""
        buffers = {
            name: torch.zeros(len(vectors), *layout.spec[name].shape, dtype=vectors.dtype, device=vectors.device)
            for name in layout.buffer_names
        }
        whole = self._linear(layout.laid_out(vectors, buffers))
        return torch.cat([whole[name].reshape(len(vectors), -1) for name in layout.names], 1)

    def _covariance(self, covariance: Covariance, layout: FlatLayout) -> Covariance:
        if not self._diagonal:
            return self._turned(covariance, layout)
        factors = self._vectors(torch.ones(1, layout.size, dtype=torch.float64), layout)[0]
        return _scaled(covariance, factors)

    def _turned(self, covariance: Covariance, layout: FlatLayout) -> Covariance:
        """J C J^T for a matrix that mixes rows: only a full covariance keeps its form."""
        inner = covariance.inner if isinstance(covariance, Partial) else covariance
        if not isinstance(inner, Full):
            raise InputError(
                f"expected a full covariance to mix classes, found a {covariance.kind} one, which would not keep its "
                'form: choose method="vector" or "temperature", or calibrate networks drawn from the posterior'
            )
        columns = inner.factor.T.double()
        if isinstance(covariance, Partial):
            columns = columns.new_zeros(len(columns), covariance.size).index_copy(1, covariance.places, columns)
        moved = self._vectors(columns, layout)
        if isinstance(covariance, Partial):
            kept = moved.index_select(1, covariance.places)
            if not torch.allclose(kept.square().sum(), moved.square().sum(), rtol=1e-12):
                raise InputError(
                    "expected all weights of the last layer to be uncertain, found some that are fixed: choose "
                    'method="temperature"'
                )
            moved = kept
        turned = Full.from_covariance(moved.T @ moved)
        turned = Full(turned.factor.to(inner.factor.dtype))
        if isinstance(covariance, Partial):
            return Partial(turned, covariance.places, covariance.size)
        return turned


def _scaled(covariance: Covariance, factors: Tensor) -> Covariance:
    """The covariance of weights that are multiplied by factors, float64 (D,); each tensor keeps its dtype."""
    own = factors.to(next(iter(covariance.tensors().values())).device)
    if isinstance(covariance, Diagonal):
        return Diagonal(_times(covariance.scale, own.abs()))
    if isinstance(covariance, LowRank):
        return LowRank(_times(covariance.scale, own.abs()), _times(covariance.factor, own[:, None]))
    if isinstance(covariance, Full):
        return Full(_times(_times(covariance.factor, own[:, None]), own.sign()[None]))  # the diagonal stays positive
    if isinstance(covariance, Partial):
        return Partial(_scaled(covariance.inner, own[covariance.places]), covariance.places, covariance.size)
    if isinstance(covariance, Kronecker):
        pieces = own.split([block.scale.numel() for block in covariance.blocks])
        return Kronecker([
            _block(block, piece.reshape(block.scale.shape))
            for block, piece in zip(covariance.blocks, pieces, strict=True)
        ])  # fmt: skip
    raise InputError(
        f"expected a covariance of a kind that is known, found {covariance.kind}: calibrate networks drawn from it"
    )


def _block(block: Block, factors: Tensor) -> Block:
    """A block whose weights are multiplied by factors (p, q), where its eigenvectors stay what they are."""
    rows = block.left is not None and not bool((factors == factors[:1]).all())
    columns = block.right is not None and not bool((factors == factors[:, :1]).all())
    if rows or columns:
        raise InputError(
            "expected one factor for all classes of a Kronecker covariance, whose eigenvectors would not stay "
            'orthonormal, found several: choose method="temperature", or calibrate networks drawn from the posterior'
        )
    return Block(block.left, block.right, _times(block.scale, factors.abs()))


def _times(values: Tensor, factors: Tensor) -> Tensor:
    return (values.double() * factors).to(values.dtype)
