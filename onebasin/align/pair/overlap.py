"""The overlap <a, g.b> of two networks as a polynomial in relaxed elements, and its gradient.

An element enters through one matrix per space and character, X_c[x, y] = chi_c(x) if coordinate x comes from y. Each
block of a tensor with k feet contributes a polynomial of degree k,

    sum  A[x1, ..., xk, r]  X[x1, y1] ... X[xk, yk]  B[y1, ..., yk, r],

which also makes sense between the vertices, for convex combinations of such matrices. Blocks with one foot are
linear: their Gram matrices are formed once.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onebasin.align.board import Block, Board, Foot
from onebasin.align.pair.assign import Assignment, Place

Point = Place | Tensor  # where a space stands: a vertex, or relaxed matrices (characters, N, N)


@dataclass(frozen=True)
class Touch:
    """A foot as the overlap sees it: the space, the number of the character among the space's, its dims."""

    space: int
    character: int
    dims: tuple[int, ...]


@dataclass
class Piece:
    """Blocks with the same feet, as arrays of both networks.

    They are (N_1, ..., N_k, rest) and touch i has the dim (i,), unless feet share a dim (in a grouped convolution both
    axes know the group): then the block's own dims are kept.
    """

    touches: tuple[Touch, ...]
    a: Tensor
    b: Tensor

    @property
    def entangled(self) -> bool:
        """Whether feet share dims."""
        return any(touch.dims != (number,) for number, touch in enumerate(self.touches))


class Overlap:
    """f(X) for a fixed pair of networks; the first may be any State, a sum of networks for instance.

    Values are in units of the largest weights of both, `unit`.
    """

    def __init__(
        self,
        board: Board,
        assignment: Assignment,
        a: Mapping[str, Tensor],
        b: Mapping[str, Tensor],
        *,
        std: tuple[Mapping[str, Tensor], Mapping[str, Tensor]] | None = None,
    ) -> None:
        """Cut both networks into blocks; computing is done in float32, or in float64 if `b` is.

        Args:
            board: the symmetry, laid out.
            assignment: its linear problem; made with `plain=True` if `std` is given.
            a: the network that stays, or a sum of networks.
            b: the network that moves.
            std: standard deviations of both, whose overlap is added; they move like weights but see no sign.
        """
        self.assignment = assignment
        example = b[board.tensors[0]] if board.tensors else torch.zeros(0)
        self.dtype, self.device = torch.promote_types(torch.float32, example.dtype), example.device
        self.linear = [
            torch.zeros(len(seen), n, n, dtype=self.dtype, device=self.device)
            for seen, n in zip(assignment.characters, map(assignment.size, range(len(board.spaces))), strict=True)
        ]
        found: dict[tuple[Touch, ...], list[tuple[Tensor, Tensor]]] = {}
        sizes = _largest(board, a), _largest(board, b)  # products of very small or large weights would leave float32
        self.unit = sizes[0] * sizes[1]
        for left, right in [(a, b), *([std] if std else [])]:
            for block in board.blocks:
                feet = _active(assignment, block)
                if feet:
                    pair = [
                        block.take((x[block.tensor] / size)[None].to(self.device, self.dtype))[0]
                        for x, size in zip((left, right), sizes, strict=True)
                    ]
                    self._sort_in(feet, pair, found, signed=left is a)
        self.pieces = [
            Piece(touches, torch.cat([x for x, _ in pairs], -1), torch.cat([y for _, y in pairs], -1))
            for touches, pairs in found.items()
        ]
        self.degree = max((len(piece.touches) for piece in self.pieces), default=1)

    def _sort_in(
        self,
        feet: list[Foot],
        pair: list[Tensor],
        found: dict[tuple[Touch, ...], list[tuple[Tensor, Tensor]]],
        *,
        signed: bool,
    ) -> None:
        """Add a block to the linear part, or to the pieces of its kind."""
        dims = [foot.dims for foot in feet]
        characters = [self._character(foot, signed) for foot in feet]
        if len(set().union(*dims)) == sum(map(len, dims)):
            pair = [_flat(array, dims) for array in pair]
            dims = [(number,) for number in range(len(feet))]
        if len(feet) == 1:
            self.linear[feet[0].space][characters[0]] += pair[0] @ pair[1].T
            return
        touches = tuple(
            Touch(foot.space, character, where) for foot, character, where in zip(feet, characters, dims, strict=True)
        )
        found.setdefault(touches, []).append((pair[0], pair[1]))

    def _character(self, foot: Foot, signed: bool) -> int:
        seen = self.assignment.character(foot.space, foot.powers)
        return self.assignment.characters[foot.space].index(seen if signed else (0,) * len(seen))

    def gradient(self, points: Sequence[Point], wanted: Sequence[int] | None = None) -> list[Tensor]:
        """Derivative by each space's matrices: (characters, N, N); left at the linear part where not wanted."""
        gains = list(self.linear)
        for piece in self.pieces:
            for number, touch in enumerate(piece.touches):
                if wanted is None or touch.space in wanted:
                    fresh = gains[touch.space] is self.linear[touch.space]
                    gains[touch.space] = self._add_slope(gains[touch.space], fresh, piece, number, points)
        return gains

    def _add_slope(self, gains: Tensor, fresh: bool, piece: Piece, number: int, points: Sequence[Point]) -> Tensor:
        """Add a piece's derivative, into the same memory unless that is the linear part's."""
        character = piece.touches[number].character
        if fresh and len(gains) == 1 and not piece.entangled:
            left, right = self._sides(piece, number, points)
            return torch.addmm(gains[0], left, right.T)[None]
        gains = gains.clone() if fresh else gains
        if piece.entangled:
            gains[character] += self._slope(piece, number, points)
        else:
            left, right = self._sides(piece, number, points)
            gains[character].addmm_(left, right.T)
        return gains

    def value(self, points: Sequence[Point]) -> float:
        """The overlap at a point."""
        total = self.dot(self.linear, points)
        for piece in self.pieces:
            slope = self._slope(piece, 0, points)
            touch = piece.touches[0]
            total += _entry(slope, points[touch.space], touch.character, self.assignment, touch.space)
        return total

    def _slope(self, piece: Piece, number: int, points: Sequence[Point]) -> Tensor:
        """Derivative of a piece by the matrix of one of its feet: (N, N)."""
        if piece.entangled:
            return self._slope_entangled(piece, number, points)
        left, right = self._sides(piece, number, points)
        return left @ right.T

    def _sides(self, piece: Piece, number: int, points: Sequence[Point]) -> tuple[Tensor, Tensor]:
        """Both networks as (N, everything else), the second moved along all other feet."""
        moved = piece.b
        for other, touch in enumerate(piece.touches):
            if other != number:
                moved = self._move(moved, other, touch, points[touch.space])
        n = moved.shape[number]
        return piece.a.movedim(number, 0).reshape(n, -1), moved.movedim(number, 0).reshape(n, -1)

    def _move(self, array: Tensor, dim: int, touch: Touch, point: Point) -> Tensor:
        """Act with one space on one dim."""
        if isinstance(point, Tensor):
            turned: Tensor = torch.tensordot(point[touch.character], array, ([1], [dim]))
            return turned.movedim(0, dim)
        moved = array.index_select(dim, point.source.to(self.device))
        chi = self.assignment.chi(point, touch.space, touch.character)
        if chi is None:
            return moved
        return moved * chi.to(moved).reshape([-1 if axis == dim else 1 for axis in range(moved.dim())])

    def _slope_entangled(self, piece: Piece, number: int, points: Sequence[Point]) -> Tensor:
        """The same where feet share dims: a lower letter per dim in new coordinates, an upper one in old ones."""
        count = piece.a.dim() - 1
        low, high = string.ascii_lowercase[:count], string.ascii_uppercase[:count]
        terms, arrays = [low + "z", high + "z"], [piece.a, piece.b]
        for other, touch in enumerate(piece.touches):
            if other != number:
                sizes = [piece.a.shape[dim] for dim in touch.dims]
                matrix = self.matrix(touch.space, points[touch.space])[touch.character]
                arrays.append(matrix.reshape(*sizes, *sizes))
                terms.append("".join(low[dim] for dim in touch.dims) + "".join(high[dim] for dim in touch.dims))
        mine = piece.touches[number].dims
        result = "".join(low[dim] for dim in mine) + "".join(high[dim] for dim in mine)
        slope = torch.einsum(",".join(terms) + "->" + result, *arrays)
        return slope.reshape(self.linear[piece.touches[number].space].shape[1:])

    def matrix(self, space: int, point: Point) -> Tensor:
        """A point as matrices (characters, N, N)."""
        if isinstance(point, Tensor):
            return point
        made = torch.zeros_like(self.linear[space])
        rows = torch.arange(len(point.source), device=self.device)
        for character in range(len(made)):
            chi = self.assignment.chi(point, space, character)
            made[character, rows, point.source.to(self.device)] = 1.0 if chi is None else chi.to(made)
        return made

    def blend(self, space: int, old: Point, new: Point, length: float) -> Tensor:
        """(1 - length) old + length new, as matrices."""
        made = self.matrix(space, old) * (1 - length)
        if isinstance(new, Tensor):
            return made.add_(new, alpha=length)
        rows, columns = torch.arange(len(new.source), device=self.device), new.source.to(self.device)
        for character in range(len(made)):
            chi = self.assignment.chi(new, space, character)
            made[character, rows, columns] += length if chi is None else length * chi.to(made)
        return made

    def inner(self, gains: Sequence[Tensor], points: Sequence[Point], space: int) -> float:
        """<gains, point> of one space."""
        return sum(
            _entry(part, points[space], character, self.assignment, space)
            for character, part in enumerate(gains[space])
        )

    def dot(self, gains: Sequence[Tensor], points: Sequence[Point]) -> float:
        """<gains, point> of all spaces."""
        return sum(self.inner(gains, points, space) for space in range(len(points)))


def _entry(matrix: Tensor, point: Point, character: int, assignment: Assignment, space: int) -> float:
    """<matrix, X_character>."""
    if isinstance(point, Tensor):
        return float(torch.dot(matrix.reshape(-1), point[character].reshape(-1)))
    return assignment.taken(matrix, point, space, character)


def _largest(board: Board, state: Mapping[str, Tensor]) -> float:
    """The largest weight, 1 if there is none."""
    found = [float(state[name].abs().max()) for name in board.tensors if state[name].numel()]
    return max(found, default=0.0) or 1.0


def _active(assignment: Assignment, block: Block) -> list[Foot]:
    """Feet of spaces that move. A parent without a sign here is left to the children that carry its index."""
    feet = [foot for foot in block.feet if assignment.moves[foot.space]]
    return [
        foot
        for foot in feet
        if any(assignment.character(foot.space, foot.powers))
        or not any(set(foot.dims) < set(other.dims) for other in feet)
    ]


def _flat(array: Tensor, dims: list[tuple[int, ...]]) -> Tensor:
    """(*dims, rest) -> (N_1, ..., N_k, everything else)."""
    used = [dim for group in dims for dim in group]
    others = [dim for dim in range(array.dim()) if dim not in used]
    sizes = [torch.Size([array.shape[dim] for dim in group]).numel() for group in dims]
    return array.permute(*used, *others).reshape(*sizes, -1)
