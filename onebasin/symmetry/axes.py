"""What an axis is made of, and when two axes are the same: unification of terms.

An axis is a term over *atoms*, sets of units whose inner structure is not known. A view of an axis as (a, b) makes it a
product, position = i_a * size_b + i_b; a concatenation makes it a sequence of pieces. A permutation of the units of an
atom permutes every axis whose term holds that atom. So x + y keeps its meaning under all permutations iff both axes
have the same term, and `unify` finds the most general term that both can be, as unification does in type inference:
(4 x 3) and (2 x 6) meet in (2 x 2 x 3). A cut binds the atoms that it goes through, and binding is for good: every
tensor that holds them is cut alike, whether it was met before or will be met later.

Two claims are about one tensor and bind nothing: `Uniform`, all entries are equal, agrees with every term; `Fixed`,
entries are addressed by their position (an input, a constant that differs from unit to unit), makes what it meets
rigid. Where two terms have no common refinement (`StructureClash`) both become rigid: that misses a symmetry, and never
invents one, while guessing a refinement would. Cost: the number of pieces and factors; `MANY_PIECES` and `DEEPEST`
bound axes that are cut position by position.
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
    resolved = _followed(term)
    if isinstance(resolved, Product):
        resolved = product(resolved.factors)
    elif isinstance(resolved, Concat):
        resolved = concat(resolved.pieces)
    if isinstance(term, Atom) and resolved is not term:
        term.bound = resolved  # chains of bindings are shortened, as in a union-find
    return resolved


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


DEEPEST = 128  # cuts inside of cuts; each takes three frames of Python's stack, which has a thousand


class StructureClash(Exception):  # noqa: N818 - not an error of the user's, but an outcome that rules deal with
    """Two descriptions of one axis have no common refinement."""


def _bind(atom: Atom, term: Term) -> Term:
    """Bind an atom to `term`; Uniform and Fixed are claims about one tensor, not about the class: they become atoms."""
    bound = _instantiate(term, atom.rigid)
    if bound is not atom:
        atom.bound = bound
        if atom.rigid is not None:
            rigidify(bound, atom.rigid)
    return bound


def whole(term: Term) -> Term:
    """A term as one description of the axis, not piece by piece."""
    term = resolve(term)
    return concat(term.pieces) if isinstance(term, Parted) else term


def _instantiate(term: Term, rigid: Reason | None) -> Term:
    term = whole(term)
    if isinstance(term, Uniform):
        return Atom(term.size, rigid)
    if isinstance(term, Fixed | Enumerated):
        reason = term.reason if isinstance(term, Fixed) else None
        return Atom(term.size, rigid or reason or Reason("it is tied to fixed positions"))
    if isinstance(term, Product):
        return product([_instantiate(factor, rigid) for factor in term.factors])
    if isinstance(term, Concat):
        return concat([_instantiate(piece, rigid) for piece in term.pieces])
    return term


def unify(left: Term, right: Term, reason: Reason, depth: int = 0) -> Term:
    """Say that two axes are walked in step; return the finest common description.

    `reason` explains why units end up rigid if one side is fixed; `depth` counts cuts inside of cuts.

    Raises:
        StructureClash: there is no common refinement; nothing sound can be said.
    """
    left, right = whole(left), whole(right)
    if left is right:
        return left
    if left.size != right.size:
        raise StructureClash(f"lengths {left.size} and {right.size}")
    # The order matters: equal entries agree with anything; positions make rigid whatever is not uniform; and only what
    # neither is may be bound, since a binding holds for all tensors.
    for one, other in ((left, right), (right, left)):
        if isinstance(one, Uniform):
            return other
    for one, other in ((left, right), (right, left)):
        if isinstance(one, Fixed | Enumerated):
            rigidify(other, (one.reason if isinstance(one, Fixed) else None) or reason)
            return _distinguished(other)
    for one, other in ((left, right), (right, left)):
        if isinstance(one, Atom):
            return _bind(one, other)
    if depth > DEEPEST:
        raise StructureClash(
            f"more than {DEEPEST} cuts, each inside of the one before, as of neighbours with neighbours"
        )
    return _unify_compounds(left, right, reason, depth + 1)


def _distinguished(term: Term) -> Term:
    """A term with equal entries (copies of units) that something fixed has met: they are equal no more."""
    term = resolve(term)
    if isinstance(term, Uniform):
        return term if term.size == 1 else Fixed(term.size)
    if isinstance(term, Product):
        return product([_distinguished(factor) for factor in term.factors])
    if isinstance(term, Concat):
        return concat([_distinguished(piece) for piece in term.pieces])
    return term


def _unify_compounds(left: Term, right: Term, reason: Reason, depth: int) -> Term:
    if isinstance(left, Concat) and isinstance(right, Concat):
        return _unify_concats(left, right, reason, depth)
    if isinstance(left, Product) and isinstance(right, Product):
        return _unify_products(left, right, reason, depth)
    concatenated, flattened = (left, right) if isinstance(left, Concat) else (right, left)
    if not (isinstance(concatenated, Concat) and isinstance(flattened, Product)):
        raise StructureClash(f"{left} and {right}")
    pieces: list[Term] = []
    rest: Term = flattened
    for piece in concatenated.pieces[:-1]:
        head, rest = split_at(rest, piece.size)
        pieces.append(unify(piece, head, reason, depth))
    return concat([*pieces, unify(concatenated.pieces[-1], rest, reason, depth)])


def _unify_concats(left: Concat, right: Concat, reason: Reason, depth: int) -> Term:
    pieces: list[Term] = []
    rest_left, rest_right = list(left.pieces), list(right.pieces)
    while rest_left and rest_right:
        one, other = resolve(rest_left.pop(0)), resolve(rest_right.pop(0))
        if one.size > other.size:
            one, tail = split_at(one, other.size)
            rest_left.insert(0, tail)
        elif other.size > one.size:
            other, tail = split_at(other, one.size)
            rest_right.insert(0, tail)
        pieces.append(unify(one, other, reason, depth))
    return concat(pieces)


def _unify_products(left: Product, right: Product, reason: Reason, depth: int) -> Term:
    """Refine from the fastest-moving factor outwards: (4, 3) and (2, 6) meet in (2, 2, 3)."""
    factors: list[Term] = []
    rest_left, rest_right = list(left.factors), list(right.factors)
    while rest_left and rest_right:
        one, other = resolve(rest_left.pop()), resolve(rest_right.pop())
        if one.size > other.size:
            head, one = split_off(one, other.size)
            rest_left.append(head)
        elif other.size > one.size:
            head, other = split_off(other, one.size)
            rest_right.append(head)
        factors.insert(0, unify(one, other, reason, depth))
    for term in rest_left + rest_right:  # what is left can only be of size one
        factors.insert(0, term)
    return product(factors)


def split_off(term: Term, inner: int) -> tuple[Term, Term]:
    """Write a term as outer x inner, the inner part `inner` long.

    Raises:
        StructureClash: the term has no such factor.
    """
    term = whole(term)
    if inner == term.size:
        return Uniform(1), term
    if inner == 1:
        return term, Uniform(1)
    if inner == 0 or term.size % inner:
        raise StructureClash(f"{term.size} is no multiple of {inner}")
    if isinstance(term, Uniform | Fixed):
        return resized(term, term.size // inner), resized(term, inner)
    if isinstance(term, Enumerated):
        return Fixed(term.size // inner), Fixed(inner)
    if isinstance(term, Atom):
        outer_atom, inner_atom = Atom(term.size // inner, term.rigid), Atom(inner, term.rigid)
        term.bound = Product((outer_atom, inner_atom))
        return outer_atom, inner_atom
    if isinstance(term, Product):
        return _split_product(term, inner)
    if isinstance(term, Concat):
        halves = [split_off(piece, inner) for piece in term.pieces]
        common = halves[0][1]
        for _, other in halves[1:]:
            common = unify(common, other, Reason("pieces of one concatenation are viewed as rows of one matrix"))
        return concat([Fixed(1) if outer.size == 1 else outer for outer, _ in halves]), common
    raise StructureClash(f"{term} cannot be viewed as {term.size // inner} x {inner}")


def _split_product(term: Product, inner: int) -> tuple[Term, Term]:
    taken: list[Term] = []
    rest = list(term.factors)
    while inner > 1:
        factor = resolve(rest.pop())
        if factor.size > inner:
            head, factor = split_off(factor, inner)
            rest.append(head)
        if inner % factor.size:
            raise StructureClash(f"{inner} is no multiple of {factor.size}")
        inner //= factor.size
        taken.insert(0, factor)
    return product(rest), product(taken)


def split_at(term: Term, first: int) -> tuple[Term, Term]:
    """Write a term as a concatenation whose first part is `first` long.

    Raises:
        StructureClash: the cut goes through a factor.
    """
    term = whole(term)
    rest = term.size - first
    if isinstance(term, Uniform | Fixed):
        return resized(term, first), resized(term, rest)
    if isinstance(term, Enumerated):
        return Fixed(first), Fixed(rest)
    if first == 0:
        return Fixed(0), term
    if rest == 0:
        return term, Fixed(0)
    if isinstance(term, Atom):
        head, tail = Atom(first, term.rigid), Atom(rest, term.rigid)
        term.bound = Concat((head, tail))
        return head, tail
    if isinstance(term, Concat):
        return _split_concat(term, first)
    if isinstance(term, Product):
        inner = math.prod(factor.size for factor in term.factors[1:])
        if first % inner:
            raise StructureClash(f"a cut at {first} goes through a factor of {inner}")
        left, right = split_at(term.factors[0], first // inner)
        return product([_position(left), *term.factors[1:]]), product([_position(right), *term.factors[1:]])
    raise StructureClash(f"{term} cannot be cut at {first}")


def _position(term: Term) -> Term:
    """A single unit cut out of an outer factor is a position, whatever it was before."""
    return Fixed(1) if term.size == 1 and not isinstance(term, Uniform) else term


def _split_concat(term: Concat, first: int) -> tuple[Term, Term]:
    head: list[Term] = []
    rest = list(term.pieces)
    while first > 0:
        piece = resolve(rest.pop(0))
        if piece.size > first:
            piece, tail = split_at(piece, first)
            rest.insert(0, tail)
        first -= piece.size
        head.append(piece)
    return concat(head), concat(rest) if rest else Fixed(0)
