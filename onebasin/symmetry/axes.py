"""What an axis of a tensor is made of, and when two axes are the same.

An axis of length n is a *term*: an unknown `Atom`, a `Product` of factors (row-major, as after a flatten), a `Concat`
of pieces (as after `torch.cat`), `Uniform` (all entries along it are equal: nothing can be permuted wrongly) or
`Fixed` (addressed by position: an input, an output, an image row). `unify` says that two axes are walked in step.
Atoms that are split or tied get *bound* to other terms, as type variables do in a type checker; what is still an atom
in the end is one indivisible set of interchangeable units.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Any

MANY_PIECES = 64  # a concatenation of more single positions than this is only "positions": keeps the analysis linear


@dataclass(frozen=True, eq=False)
class Reason:
    """Why units may not be permuted: a phrase, the node where it happened, whether that explains it fully."""

    text: str
    node: Any = None
    explained: bool = True


_serial = itertools.count()


class Atom:
    """A set of `size` units whose inner structure is not (yet) known."""

    __slots__ = ("bound", "rigid", "serial", "size")

    def __init__(self, size: int, rigid: Reason | None = None) -> None:
        """Make a fresh atom; `rigid` says why its units may not be permuted, None if they may."""
        self.size, self.rigid, self.serial = size, rigid, next(_serial)
        self.bound: Term | None = None

    def __repr__(self) -> str:
        """Show serial number and size."""
        return f"a{self.serial}:{self.size}{'!' if self.rigid else ''}"


@dataclass(frozen=True)
class Uniform:
    """All entries along the axis are equal."""

    size: int


@dataclass(frozen=True)
class Fixed:
    """Entries along the axis are addressed by their position, for the reason given."""

    size: int
    reason: Reason | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Product:
    """A flattened axis: factors in row-major order."""

    factors: tuple[Term, ...]

    @property
    def size(self) -> int:
        """Product of the factors' sizes."""
        return math.prod(factor.size for factor in self.factors)


@dataclass(frozen=True)
class Concat:
    """A concatenated axis: pieces in order."""

    pieces: tuple[Term, ...]

    @property
    def size(self) -> int:
        """Sum of the pieces' sizes."""
        return sum(piece.size for piece in self.pieces)


@dataclass(frozen=True, eq=False)
class Family:
    """An axis whose term depends on the index along another axis of the same tensor, the one that holds `token`.

    `qkv.view(batch, 3, heads, width)` followed by `select` is three different things side by side, not one thing
    three times.
    """

    token: Enumerated | Parted
    members: tuple[Term, ...]

    @property
    def size(self) -> int:
        """Size of each member (they are all of one size)."""
        return self.members[0].size


@dataclass(frozen=True, eq=False)
class Enumerated:
    """A fixed axis each of whose positions is selected on its own; families hang on it."""

    size: int


@dataclass(frozen=True, eq=False)
class Parted:
    """A concatenated axis that is only ever read piece by piece; families hang on it, a member for each piece.

    `qkv.view(batch, 5, width)` followed by `[:, :3]`, `[:, 3:4]` and `[:, 4:]` is three heads of queries, a key and a
    value, whose widths have nothing to do with each other.
    """

    pieces: tuple[Term, ...]

    @property
    def size(self) -> int:
        """Sum of the pieces' sizes."""
        return sum(piece.size for piece in self.pieces)


Term = Atom | Uniform | Fixed | Product | Concat | Family | Enumerated | Parted


def product(factors: list[Term] | tuple[Term, ...]) -> Term:
    """Product of terms, flattened; factors of size one vanish beside others."""
    flat: list[Term] = []
    for factor in map(resolve, factors):
        flat.extend(factor.factors if isinstance(factor, Product) else [factor])
    if any(factor.size > 1 for factor in flat):
        flat = [factor for factor in flat if factor.size > 1]
    elif len(flat) > 1:
        flat = [next((factor for factor in flat if isinstance(factor, Atom)), flat[0])]
    merged: list[Term] = []
    for factor in flat:
        if merged and isinstance(factor, Uniform | Fixed) and type(merged[-1]) is type(factor):
            merged[-1] = resized(factor, merged[-1].size * factor.size)
        else:
            merged.append(factor)
    if not merged:
        return Uniform(1)
    return merged[0] if len(merged) == 1 else Product(tuple(merged))


def resized(term: Uniform | Fixed, size: int) -> Uniform | Fixed:
    """The same claim about an axis of another length."""
    return Uniform(size) if isinstance(term, Uniform) else Fixed(size, term.reason)


def concat(pieces: list[Term] | tuple[Term, ...]) -> Term:
    """Concatenation of terms, flattened.

    A loop, not a recursion: an axis that is cut unit by unit is bound to a unit and the rest, a thousand times deep.
    """
    flat: list[Term] = []
    todo = list(reversed(pieces))
    while todo:
        piece = _followed(todo.pop())
        if isinstance(piece, Product):
            piece = product(piece.factors)
        if isinstance(piece, Concat):
            todo.extend(reversed(piece.pieces))
        else:
            flat.append(piece)
    flat = [piece for piece in flat if piece.size > 0] or flat[:1]
    if len(flat) == 1:
        return flat[0]
    if len(flat) > MANY_PIECES and all(isinstance(piece, Uniform | Fixed | Enumerated) for piece in flat):
        return Fixed(sum(piece.size for piece in flat))
    return Concat(tuple(flat))


def _followed(term: Term) -> Term:
    while isinstance(term, Atom) and term.bound is not None:
        term = term.bound
    return term


def resolve(term: Term) -> Term:
    """Replace bound atoms by what they are bound to, all the way down."""
    found = _followed(term)
    if isinstance(found, Product):
        found = product(found.factors)
    elif isinstance(found, Concat):
        found = concat(found.pieces)
    if isinstance(term, Atom) and found is not term:
        term.bound = found  # the way is gone only once
    return found


def atoms(term: Term) -> list[Atom]:
    """All atoms of a term, left to right, repeated as they occur."""
    term = resolve(term)
    if isinstance(term, Atom):
        return [term]
    parts: tuple[Term, ...] = ()
    if isinstance(term, Product):
        parts = term.factors
    elif isinstance(term, Concat | Parted):
        parts = term.pieces
    elif isinstance(term, Family):
        parts = term.members
    return [atom for part in parts for atom in atoms(part)]


def rigidify(term: Term, reason: Reason) -> None:
    """Forbid permutations of every atom in `term`; the first reason given is kept, unless a later one is a doubt."""
    for atom in atoms(term):
        if atom.rigid is None or (atom.rigid.explained and not reason.explained):
            atom.rigid = reason
