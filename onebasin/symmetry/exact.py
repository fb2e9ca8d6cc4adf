"""Exact linear algebra over the rationals and over GF(2), for small sparse systems."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Number = Fraction | int
Row = dict[Key, Number]


class System(Generic[Key]):
    """Homogeneous linear equations in unknowns named by keys; `modulus` 0 for the rationals, 2 for GF(2).

    Equalities and zeros, which are nearly all equations, go into a union-find; only the rest is eliminated.
    """

    def __init__(self, modulus: int = 0) -> None:
        """Start without unknowns."""
        self.modulus = modulus
        self._parent: dict[Key, Key] = {}
        self._zero: set[Key] = set()
        self._rows: list[Row[Key]] = []

    def add(self, terms: Iterable[tuple[Key, Number]]) -> None:
        """Say that a linear combination is 0."""
        row: Row[Key] = {}
        for key, coefficient in terms:
            self._find(key)
            row[key] = self._reduce(row.get(key, 0) + coefficient)
        row = {key: coefficient for key, coefficient in row.items() if coefficient}
        if len(row) == 1:
            self._zero.add(self._find(next(iter(row))))
        elif len(row) == 2 and sum(row.values()) in ((0, 2) if self.modulus else (0,)):
            self._join(*row)
        elif row:
            self._rows.append(row)

    def _reduce(self, number: Number) -> Number:
        return number % self.modulus if self.modulus else number

    def _find(self, key: Key) -> Key:
        parent = self._parent.setdefault(key, key)
        while parent != key:
            self._parent[key] = self._parent[parent]
            key, parent = parent, self._parent[parent]
        return key

    def _join(self, left: Key, right: Key) -> None:
        left, right = self._find(left), self._find(right)
        if left != right:
            self._parent[right] = left
            if right in self._zero:
                self._zero.add(left)

    def __iter__(self) -> Iterator[Key]:
        """The unknowns."""
        return iter(list(self._parent))

    def solutions(self, columns: Sequence[Key], zero: Iterable[Key] = ()) -> list[list[int]]:
        """A reduced basis of the solutions as seen on `columns` (what other unknowns do is projected away).

        Unknowns in `zero` are 0 as well.

        Each basis vector is integer and primitive; it has a leading column in which all others are 0, earlier columns
        first.
        """
        roots_of_zero = {self._find(key) for key in (*self._zero, *zero)}
        rows = []
        for row in self._rows:
            merged: Row[Key] = {}
            for key, coefficient in row.items():
                root = self._find(key)
                if root not in roots_of_zero:
                    merged[root] = self._reduce(merged.get(root, Fraction(0)) + coefficient)
            rows.append({key: coefficient for key, coefficient in merged.items() if coefficient})
        roots = {key: self._find(key) for key in columns}
        seen = dict.fromkeys(root for root in roots.values() if root not in roots_of_zero)
        basis = self._null_space(rows, list(seen))
        dense = [[vector.get(roots[key], Fraction(0)) for key in columns] for vector in basis]
        return [_primitive(vector, self.modulus) for vector in self.echelon(dense)]

    def _null_space(self, rows: list[Row[Key]], wanted: list[Key]) -> list[Row[Key]]:
        """Null vectors of the eliminated system; unknowns that are in no row are free by themselves."""
        pivots: dict[Key, Row[Key]] = {}
        for row in rows:
            for pivot, known in pivots.items():
                if pivot in row:
                    row = self._minus(row, known, row[pivot])
            if not row:
                continue
            pivot = next(iter(row))
            inverse: Number = 1 / Fraction(row[pivot]) if not self.modulus else 1
            row = self._minus({}, row, -inverse)
            for other, known in pivots.items():
                if pivot in known:
                    pivots[other] = self._minus(known, row, known[pivot])
            pivots[pivot] = row
        free = dict.fromkeys([key for row in pivots.values() for key in row if key not in pivots])
        free.update(dict.fromkeys(key for key in wanted if key not in pivots))
        basis: list[Row[Key]] = []
        for key in free:
            basis.append({key: 1})
            basis[-1].update({pivot: self._reduce(-row[key]) for pivot, row in pivots.items() if key in row})
        return basis

    def _minus(self, row: Row[Key], other: Row[Key], factor: Number) -> Row[Key]:
        made = dict(row)
        for key, value in other.items():
            made[key] = self._reduce(made.get(key, Fraction(0)) - factor * value)
        return {key: value for key, value in made.items() if value}

    def echelon(self, vectors: list[list[Number]]) -> list[list[Number]]:
        """Reduced row echelon form; zero rows are left out."""
        rows = [list(vector) for vector in vectors]
        done: list[list[Number]] = []
        width = len(rows[0]) if rows else 0
        for column in range(width):
            pivot = next((row for row in rows if row[column]), None)
            if pivot is None:
                continue
            rows = [row for row in rows if row is not pivot]
            if not self.modulus:
                pivot = [Fraction(value) / pivot[column] for value in pivot]
            rows = [self._cleared(row, pivot, column) for row in rows]
            done = [self._cleared(row, pivot, column) for row in done]
            done.append(pivot)
        return done

    def _cleared(self, row: list[Number], pivot: list[Number], column: int) -> list[Number]:
        factor = row[column]
        if not factor:
            return row
        return [self._reduce(a - factor * b) for a, b in zip(row, pivot, strict=True)]


def rank(vectors: Sequence[Sequence[int]], modulus: int = 0) -> int:
    """Rank of integer vectors.

    >>> rank([[1, 1], [2, 2]]), rank([[1, 1], [1, -1]], modulus=2)
    (1, 1)
    """
    system: System[int] = System(modulus)
    return len(system.echelon([[Fraction(x % modulus if modulus else x) for x in vector] for vector in vectors]))


def sparse_rank(rows: Iterable[Mapping[Key, int]], modulus: int = 0) -> int:
    """Rank of sparse integer rows, over the rationals or modulo 2.

    >>> sparse_rank([{"a": 1, "b": 1}, {"a": 2, "b": 2}, {"b": 1, "c": -1}])
    2
    """
    pivots: dict[Key, dict[Key, Number]] = {}
    for given in rows:
        row: dict[Key, Number] = {key: value % modulus if modulus else value for key, value in given.items()}
        row = {key: value for key, value in row.items() if value}
        while known := next((key for key in row if key in pivots), None):
            factor = row[known]
            for key, value in pivots[known].items():
                left = row.get(key, 0) - factor * value
                row[key] = left % modulus if modulus else left
                if not row[key]:
                    del row[key]
        if row:
            pivot, leading = next(iter(row.items()))
            pivots[pivot] = {key: value if modulus else Fraction(value) / leading for key, value in row.items()}
    return len(pivots)


def _primitive(vector: list[Number], modulus: int) -> list[int]:
    if modulus:
        return [int(value) % modulus for value in vector]
    factor = math.lcm(*[value.denominator for value in vector])
    whole = [int(value * factor) for value in vector]
    divisor = math.gcd(*whole) or 1
    return [value // divisor for value in whole]
