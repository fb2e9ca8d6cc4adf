"""Gaussians over flat weight vectors, and the covariances they can have."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from onebasin.errors import InputError

LOG_TWO_PI = math.log(2 * math.pi)


class Covariance(Protocol):
    """A covariance matrix (D, D) of weights, stored by a few tensors and seldom written out.

    Attributes:
        kind: the name under which the covariance is stored.
    """

    kind: ClassVar[str]

    @property
    def size(self) -> int:
        """D."""

    def std(self) -> Tensor:
        """Standard deviation of each weight (D,): the root of the diagonal of the covariance."""

    def noise(self, count: int, generator: torch.Generator) -> Tensor:
        """Draws (count, D) with mean zero."""

    def times_root(self, rows: Tensor) -> Tensor:
        """Rows (..., D) times a root S of the covariance S S^T, (..., R) in the dtype of the rows."""

    def log_density(self, offset: Tensor) -> Tensor:
        """Log density of offsets (..., D) from the centre, float64 (...)."""

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that define the covariance; `from_tensors` makes an equal one of them."""

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """The covariance whose `tensors` these are."""


@dataclass(frozen=True, eq=False)
class Gaussian:
    """N(centre, covariance), over weight vectors (D,).

    >>> gaussian = Gaussian(torch.zeros(3), Diagonal(torch.ones(3)))
    >>> gaussian.draw_flat(2, torch.Generator().manual_seed(0)).shape
    torch.Size([2, 3])
    """

    centre: Tensor
    covariance: Covariance

    def __post_init__(self) -> None:
        if tuple(self.centre.shape) != (self.covariance.size,):
            raise InputError(
                f"expected a centre ({self.covariance.size},) for a {self.covariance.kind} covariance of that size, "
                f"found {tuple(self.centre.shape)}: give both the same number of weights"
            )

    @property
    def size(self) -> int:
        """D."""
        return self.covariance.size

    def draw_flat(self, count: int, generator: torch.Generator) -> Tensor:
        """Draws (count, D) in the dtype of the centre."""
        return self.centre + self.covariance.noise(count, generator).to(self.centre)

    def log_density(self, flat: Tensor) -> Tensor:
        """Log density of weight vectors (..., D), float64 (...)."""
        return self.covariance.log_density(flat.double() - self.centre.double())


def standard_normal(size: Sequence[int], like: Tensor, generator: torch.Generator) -> Tensor:
    """Standard normal numbers in the dtype and on the device of `like`, whichever device the generator lives on."""
    return torch.randn(tuple(size), generator=generator, dtype=like.dtype, device=generator.device).to(like.device)


def check_vector(values: Tensor, what: str) -> None:
    """Refuse standard deviations that are no vector of finite numbers from zero up."""
    if values.dim() != 1 or not bool((torch.isfinite(values) & (values >= 0)).all()):
        problem = f"shape {tuple(values.shape)}" if values.dim() != 1 else "negative or non-finite numbers"
        raise InputError(f"expected {what} as a vector (D,) of finite numbers >= 0, found {problem}: correct them")


def check_spread(std: Tensor) -> None:
    """Refuse to give the density of a Gaussian without spread in some direction: it has none."""
    if not bool((std > 0).all()):
        raise InputError(
            f"a density needs positive standard deviations, found {int((std == 0).sum())} weights with zero: draw from "
            "the Gaussian instead, or give these weights a small spread"
        )


def one_of_each(gaussians: Sequence[Gaussian], generators: Sequence[torch.Generator]) -> Tensor:
    """One draw from every Gaussian with a generator of its own, (n, D)."""
    pairs = zip(gaussians, generators, strict=True)
    return torch.cat([gaussian.draw_flat(1, generator) for gaussian, generator in pairs])


@dataclass(frozen=True, eq=False)
class Diagonal:
    """Covariance diag(std^2).

    >>> Diagonal(torch.ones(2)).log_density(torch.zeros(2)).item()
    -1.837877...

    Attributes:
        scale: the standard deviations (D,).
    """

    scale: Tensor
    kind: ClassVar[str] = "diagonal"

    def __post_init__(self) -> None:
        check_vector(self.scale, "standard deviations")

    @property
    def size(self) -> int:
        """D."""
        return len(self.scale)

    def std(self) -> Tensor:
        """Standard deviation of each weight (D,)."""
        return self.scale

    def noise(self, count: int, generator: torch.Generator) -> Tensor:
        """Draws (count, D) with mean zero."""
        return self.scale * standard_normal((count, self.size), self.scale, generator)

    def times_root(self, rows: Tensor) -> Tensor:
        """Rows (..., D) times diag(std), (..., D)."""
        return rows * self.scale.to(rows)

    def log_density(self, offset: Tensor) -> Tensor:
        """Log density of offsets (..., D), float64 (...)."""
        check_spread(self.scale)
        scale = self.scale.double()
        whitened = offset.double() / scale
        return -0.5 * (whitened.square().sum(-1) + self.size * LOG_TWO_PI) - scale.log().sum()

    def tensors(self) -> dict[str, Tensor]:
        """The standard deviations."""
        return {"scale": self.scale}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Invert `tensors`."""
        return cls(tensors["scale"])


@dataclass(frozen=True, eq=False)
class LowRank:
    """Covariance diag(scale^2) + factor factor^T; draws are scale * z1 + factor z2 with standard normal z1, z2.

    >>> LowRank(torch.zeros(2), torch.tensor([[3.0], [4.0]])).std()
    tensor([3., 4.])

    Attributes:
        scale: standard deviations (D,) of the independent part.
        factor: directions (D, K); K may be 0.
    """

    scale: Tensor
    factor: Tensor
    kind: ClassVar[str] = "low_rank"

    def __post_init__(self) -> None:
        check_vector(self.scale, "standard deviations")
        if self.factor.dim() != 2 or len(self.factor) != len(self.scale):
            raise InputError(
                f"expected a factor ({len(self.scale)}, K), one row per weight, found {tuple(self.factor.shape)}: "
                "transpose it, or give as many rows as there are standard deviations"
            )

    @property
    def size(self) -> int:
        """D."""
        return len(self.scale)

    def std(self) -> Tensor:
        """Standard deviation of each weight (D,)."""
        return (self.scale.square() + self.factor.square().sum(1)).sqrt()

    def noise(self, count: int, generator: torch.Generator) -> Tensor:
        """Draws (count, D) with mean zero."""
        independent = standard_normal((count, self.size), self.scale, generator)
        along = standard_normal((count, self.factor.shape[1]), self.factor, generator)
        return self.scale * independent + along @ self.factor.T

    def times_root(self, rows: Tensor) -> Tensor:
        """Rows (..., D) times [diag(scale), factor], (..., D + K)."""
        return torch.cat([rows * self.scale.to(rows), rows @ self.factor.to(rows)], dim=-1)

    def log_density(self, offset: Tensor) -> Tensor:
        """Log density of offsets (..., D), float64 (...), at the cost of a (K, K) system.

        With e = offset / scale and G = factor / scale, and y the solution of (I + G^T G) y = G^T e,

            offset^T covariance^-1 offset = |e - G y|^2 + |y|^2,    det covariance = prod scale^2 det(I + G^T G):

        sums of squares, which Woodbury's difference of two large numbers is not.
        """
        check_spread(self.scale)
        scale = self.scale.double()
        whitened = offset.double() / scale
        along = self.factor.double() / scale[:, None]
        inner = torch.eye(along.shape[1], dtype=along.dtype, device=along.device) + along.T @ along
        root = torch.linalg.cholesky(inner)
        fitted = torch.cholesky_solve((whitened @ along).unsqueeze(-1), root).squeeze(-1)
        distance: Tensor = (whitened - fitted @ along.T).square().sum(-1) + fitted.square().sum(-1)
        half_log_determinant = float(scale.log().sum() + root.diagonal().log().sum())
        return -0.5 * distance - 0.5 * self.size * LOG_TWO_PI - half_log_determinant

    def tensors(self) -> dict[str, Tensor]:
        """Standard deviations and directions."""
        return {"scale": self.scale, "factor": self.factor}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Invert `tensors`."""
        return cls(tensors["scale"], tensors["factor"])


@dataclass(frozen=True, eq=False)
class Full:
    """Covariance factor factor^T.

    >>> Full.from_covariance(torch.tensor([[4.0, 2.0], [2.0, 2.0]])).factor
    tensor([[2., 0.],
            [1., 1.]])

    Attributes:
        factor: lower triangular (D, D).
    """

    factor: Tensor
    kind: ClassVar[str] = "full"

    def __post_init__(self) -> None:
        check_square(self.factor, "a lower triangular factor")

    @classmethod
    def from_covariance(cls, covariance: Tensor) -> Self:
        """The shape with this covariance (D, D); computed in float64, kept in the given dtype."""
        check_square(covariance, "a covariance")
        return cls(_root(covariance.double(), "covariance").to(covariance.dtype))

    @classmethod
    def from_precision(cls, precision: Tensor) -> Self:
        """The shape whose covariance is the inverse of this matrix (D, D).

        With the rows and columns of the precision reversed, P' = R R^T gives P^-1 = L L^T for L = (R^-T)': lower
        triangular, and the covariance itself is never formed.
        """
        check_square(precision, "a precision")
        root = _root(precision.double().flip(0, 1), "precision")
        identity = torch.eye(len(root), dtype=root.dtype, device=root.device)
        inverse = torch.linalg.solve_triangular(root, identity, upper=False)
        return cls(inverse.T.flip(0, 1).to(precision.dtype))

    @property
    def size(self) -> int:
        """D."""
        return len(self.factor)

    def std(self) -> Tensor:
        """Standard deviation of each weight (D,)."""
        return self.factor.square().sum(1).sqrt()

    def noise(self, count: int, generator: torch.Generator) -> Tensor:
        """Draws (count, D) with mean zero."""
        return standard_normal((count, self.size), self.factor, generator) @ self.factor.T

    def times_root(self, rows: Tensor) -> Tensor:
        """Rows (..., D) times the factor, (..., D)."""
        return rows @ self.factor.to(rows)

    def log_density(self, offset: Tensor) -> Tensor:
        """Log density of offsets (..., D), float64 (...)."""
        factor = self.factor.double()
        check_spread(factor.diagonal())
        rows = offset.double().reshape(-1, self.size)
        whitened = torch.linalg.solve_triangular(factor, rows.T, upper=False)
        distance = whitened.square().sum(0).reshape(offset.shape[:-1])
        density: Tensor = -0.5 * (distance + self.size * LOG_TWO_PI) - factor.diagonal().log().sum()
        return density

    def tensors(self) -> dict[str, Tensor]:
        """The factor."""
        return {"factor": self.factor}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Invert `tensors`."""
        return cls(tensors["factor"])


def check_square(matrix: Tensor, what: str) -> None:
    """Refuse what is no square matrix of finite numbers."""
    if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1] or not bool(torch.isfinite(matrix).all()):
        raise InputError(
            f"expected {what} as a square matrix of finite numbers, found shape {tuple(matrix.shape)}"
            f"{'' if bool(torch.isfinite(matrix).all()) else ' with NaN or infinity'}: correct it"
        )


def _root(matrix: Tensor, what: str) -> Tensor:
    root: Tensor
    root, failed = torch.linalg.cholesky_ex(matrix)
    if int(failed):
        raise InputError(
            f"expected a positive definite {what}, found one that is not (at row {int(failed) - 1}): "
            "add something to its diagonal, such as a prior"
        )
    return root


class Block(NamedTuple):
    """The covariance of one tensor, flattened as a matrix X (p, q), row by row.

    (left kron right) diag(scale^2) (left kron right)^T, so draws are X = left (scale * Z) right^T. The product
    A kron B of two covariances is the case in which scale^2 is the outer product of their eigenvalues.

    Attributes:
        left: orthonormal eigenvectors (p, p) in the columns; None for the identity.
        right: eigenvectors (q, q); None for the identity.
        scale: standard deviations (p, q) along the products of eigenvectors.
    """

    left: Tensor | None
    right: Tensor | None
    scale: Tensor

    def rotated(self, matrix: Tensor) -> Tensor:
        """From coordinates in the eigenbasis (..., p, q) to weights."""
        matrix = matrix if self.left is None else self.left.to(matrix.dtype) @ matrix
        return matrix if self.right is None else matrix @ self.right.to(matrix.dtype).T

    def unrotated(self, matrix: Tensor) -> Tensor:
        """From weights (..., p, q) to coordinates in the eigenbasis."""
        matrix = matrix if self.left is None else self.left.to(matrix.dtype).T @ matrix
        return matrix if self.right is None else matrix @ self.right.to(matrix.dtype)

    def std(self) -> Tensor:
        """Standard deviation of each weight (p, q)."""
        left, right = (None if side is None else side.square() for side in (self.left, self.right))
        return Block(left, right, self.scale).rotated(self.scale.square()).sqrt()


class Kronecker:
    """A block for each tensor, in the order of the flat vector; tensors are independent of each other.

    >>> Kronecker([Block(None, None, torch.ones(2, 3)), Block(None, None, torch.ones(2, 1))]).size
    8
    """

    kind: ClassVar[str] = "kronecker"

    def __init__(self, blocks: list[Block]) -> None:
        self.blocks = tuple(blocks)
        for block in self.blocks:
            check_vector(block.scale.reshape(-1), "standard deviations")
            for side, length in zip((block.left, block.right), block.scale.shape, strict=True):
                if side is not None:
                    check_square(side, "eigenvectors")
                if side is not None and len(side) != length:
                    raise InputError(
                        f"expected {length} eigenvectors for standard deviations {tuple(block.scale.shape)}, found "
                        f"{len(side)}: give left and right sides that fit them"
                    )

    @property
    def size(self) -> int:
        """D."""
        return sum(block.scale.numel() for block in self.blocks)

    def std(self) -> Tensor:
        """Standard deviation of each weight (D,)."""
        return torch.cat([block.std().reshape(-1) for block in self.blocks])

    def noise(self, count: int, generator: torch.Generator) -> Tensor:
        """Draws (count, D) with mean zero."""
        drawn = []
        for block in self.blocks:
            free = standard_normal((count, *block.scale.shape), block.scale, generator)
            drawn.append(block.rotated(block.scale * free).reshape(count, -1))
        return torch.cat(drawn, dim=1)

    def times_root(self, rows: Tensor) -> Tensor:
        """Rows (..., D) in the eigenbasis of each block, times its standard deviations there, (..., D)."""
        pieces = rows.split([block.scale.numel() for block in self.blocks], dim=-1)
        scaled = [
            block.unrotated(piece.reshape(*piece.shape[:-1], *block.scale.shape)) * block.scale.to(piece)
            for block, piece in zip(self.blocks, pieces, strict=True)
        ]
        return torch.cat([own.flatten(-2) for own in scaled], dim=-1)

    def log_density(self, offset: Tensor) -> Tensor:
        """Log density of offsets (..., D), float64 (...)."""
        pieces = offset.double().split([block.scale.numel() for block in self.blocks], dim=-1)
        total = offset.new_full(offset.shape[:-1], -0.5 * self.size * LOG_TWO_PI, dtype=torch.float64)
        for block, piece in zip(self.blocks, pieces, strict=True):
            scale = block.scale.double()
            check_spread(scale)
            whitened = block.unrotated(piece.reshape(*piece.shape[:-1], *scale.shape)) / scale
            total = total - 0.5 * whitened.square().sum((-2, -1)) - scale.log().sum()
        return total

    def tensors(self) -> dict[str, Tensor]:
        """The sides and scales of all blocks, numbered."""
        return {
            f"{index}.{name}": value
            for index, block in enumerate(self.blocks)
            for name, value in block._asdict().items()
            if value is not None
        }

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Invert `tensors`."""
        count = sum(name.endswith(".scale") for name in tensors)
        sides = [(tensors.get(f"{index}.left"), tensors.get(f"{index}.right")) for index in range(count)]
        return cls([Block(*pair, tensors[f"{index}.scale"]) for index, pair in enumerate(sides)])


_INNER: dict[str, type[Covariance]] = {own.kind: own for own in (Diagonal, LowRank, Full, Kronecker)}


@dataclass(frozen=True, eq=False)
class Partial:
    """A covariance of the entries `places`, such as those of the last layer; zero spread elsewhere.

    >>> Partial(Diagonal(torch.ones(1)), torch.tensor([2]), 4).std()
    tensor([0., 0., 1., 0.])

    Attributes:
        inner: the covariance of the entries that vary.
        places: where they are in the flat vector, int64 (inner.size,), each once.
        size: D.
    """

    inner: Covariance
    places: Tensor
    size: int
    kind: ClassVar[str] = "partial"

    def __post_init__(self) -> None:
        places = self.places.tolist() if self.places.dim() == 1 else []
        valid = all(type(place) is int and 0 <= place < self.size for place in places)
        if len(places) != self.inner.size or len(set(places)) < len(places) or not valid:
            raise InputError(
                f"expected {self.inner.size} different places out of {self.size} weights, found {len(places)}, "
                f"{len(set(places))} of them different: give one place per weight of the inner covariance"
            )

    def std(self) -> Tensor:
        """Standard deviation of each weight (D,)."""
        inner = self.inner.std()
        return inner.new_zeros(self.size).index_copy(0, self.places, inner)

    def noise(self, count: int, generator: torch.Generator) -> Tensor:
        """Draws (count, D) with mean zero."""
        inner = self.inner.noise(count, generator)
        return inner.new_zeros(count, self.size).index_copy(1, self.places, inner)

    def times_root(self, rows: Tensor) -> Tensor:
        """The entries that vary of rows (..., D), times the root of the inner covariance, (..., R)."""
        return self.inner.times_root(rows.index_select(-1, self.places))

    def log_density(self, offset: Tensor) -> Tensor:
        """Log density of the entries that vary, float64 (...); the other entries of the offset do not count."""
        return self.inner.log_density(offset.index_select(-1, self.places))

    def tensors(self) -> dict[str, Tensor]:
        """The places, the size, and the inner tensors under the name of their kind."""
        inner = {f"{self.inner.kind}.{name}": value for name, value in self.inner.tensors().items()}
        return {"places": self.places, "size": torch.tensor(self.size), **inner}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Invert `tensors`."""
        inner = {name: value for name, value in tensors.items() if name not in ("places", "size")}
        kind = next(iter(inner), "").split(".")[0]
        covariance = _INNER[kind].from_tensors({name.removeprefix(f"{kind}."): value for name, value in inner.items()})
        return cls(covariance, tensors["places"], int(tensors["size"]))
