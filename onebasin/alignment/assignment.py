"""The best element for given gains: one assignment per space, nested where spaces are, signs included.

For gains G_c[x, y] (character c, new coordinate x, old coordinate y) the group's linear problem is

    max over elements of  sum_x sum_c chi_c(x) G_c[x, source(x)],

where chi_c(x) is the product of the unit's signs that character c sees. For one pair (x, y) the signs can be chosen
at once, so what remains is an assignment; for heads it is an assignment of heads whose gains are the values of the
assignments inside them. The answer is exact.

A *character* says which of a unit's signs a tensor sees; its value chi is their product. Signs that no character
mixes are chosen apart; those that are mixed are tried in all combinations.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onebasin.alignment.layout import BlockLayout
from onebasin.symmetry import Element, ExpandedElement, Space, sources

Character = tuple[int, ...]
Component = tuple[list[int], list[int]]
_REMEMBERED = 1 << 16  # pairs of copies whose children are remembered
_SMALL = 32  # up to so many units the solver takes less time than the reduction of its costs
_ENUMERATED = 8  # up to so many signs of one unit are tried in all combinations, more one after the other


def components(count: int, characters: list[Character]) -> list[Component]:
    """Groups of signs that no character mixes with others: (signs, characters that see them)."""
    groups = [{number} for number in range(count)]
    for character in characters:
        seen = {number for number, on in enumerate(character) if on}
        touched = [group for group in groups if group & seen]
        if touched:
            groups = [group for group in groups if not group & seen] + [set().union(*touched)]
    return [
        (sorted(group), [c for c, character in enumerate(characters) if any(character[g] for g in group)])
        for group in sorted(groups, key=min)
    ]


def _combos(count: int) -> Tensor | None:
    """All sign vectors (2^count, count), the unchanged one first; None when there are too many."""
    if count > _ENUMERATED:
        return None
    return torch.tensor(list(itertools.product((1.0, -1.0), repeat=count)), dtype=torch.float64).reshape(-1, count)


def _table(characters: list[Character], seen: list[int], members: list[int]) -> Tensor:
    """(characters, signs): which sign each character sees."""
    return torch.tensor([[characters[c][g] for g in members] for c in seen], dtype=torch.float64)


def _chi(signs: Tensor, table: Tensor) -> Tensor:
    """Value of each character at signs (generators, N): (characters, N)."""
    return torch.where(table.bool()[:, :, None], signs[None], torch.ones((), dtype=signs.dtype)).prod(1)


def _climb(best_signs: Tensor, table: Tensor) -> Tensor:
    """Signs (generators, N) for gains (characters, N), flipped one after the other while that helps."""
    signs = torch.ones(table.shape[1], best_signs.shape[1], dtype=torch.float64)
    for _ in range(2 * len(signs)):
        for g in range(len(signs)):
            pull = (best_signs * _chi(signs, table) * table[:, g : g + 1]).sum(0)  # what this sign contributes as it is
            signs[g] = torch.where(pull < 0, -signs[g], signs[g])
    return signs


def gains_under_best_signs(gains: Tensor, characters: list[Character], components: list[Component]) -> Tensor:
    """The gain of each pair of coordinates under its best signs: (N, N)."""
    plain = [c for c, character in enumerate(characters) if not any(character)]
    if not components and len(plain) == 1:
        return gains[0]
    gains = gains.cpu().double()  # some devices have no float64
    total = gains[plain].sum(0)
    for members, seen in components:
        if not seen:
            continue
        table = _table(characters, seen, members)
        combos = _combos(len(members))
        part = gains[seen]
        if len(seen) == 1:
            total = total + part[0].abs()
        elif combos is not None:
            rows = _chi(combos.T, table).T
            total = total + torch.stack([torch.tensordot(row, part, 1) for row in rows]).amax(0)
        else:
            flat = part.reshape(len(seen), -1)
            best = _chi(_climb(flat, table), table)
            total = total + (flat * best).sum(0).reshape(total.shape)
    return total


def best_signs(gains: Tensor, characters: list[Character], parts: list[Component], count: int) -> Tensor:
    """The best signs (count, N) for gains (characters, N)."""
    signs = torch.ones(count, gains.shape[1], dtype=torch.float32)
    for members, seen in parts:
        if not seen:
            continue
        table, combos = _table(characters, seen, members), _combos(len(members))
        if combos is None:
            signs[members] = _climb(gains[seen], table).float()
        else:
            signs[members] = combos[(_chi(combos.T, table).T @ gains[seen]).argmax(0)].T.float()
    return signs


Numbers = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class SpacePlacement:
    """One space at a vertex: the source of each coordinate (N,), and its signs (generators, N)."""

    source: Tensor
    signs: Tensor


Vertex = list[SpacePlacement]


@dataclass
class Solution:
    """A vertex under construction, and what it gains."""

    value: float
    parts: list[tuple[int, int, int, NDArray[np.int64]]] = field(default_factory=list)  # space, new, old copy, order


class Assignment:
    """The linear problem over all spaces that permute or carry signs."""

    def __init__(self, layout: BlockLayout, *, plain: bool = False) -> None:
        """Find each space's sign generators, the characters its axes see, and which spaces are nested in which.

        With `plain` every space also gets the character that sees no sign, for gains of standard deviations.
        """
        self.spaces: Sequence[Space] = layout.spaces
        numbers = {space.name: number for number, space in enumerate(self.spaces)}
        self.signs = [[g for g, kind in enumerate(space.generators) if kind.endswith("sign")] for space in self.spaces]
        self.moves = [
            (space.permutable and space.size > 1) or bool(flips)
            for space, flips in zip(self.spaces, self.signs, strict=True)
        ]
        self.characters: list[list[tuple[int, ...]]] = [[] for _ in self.spaces]
        for block in layout.blocks:
            for axis in block.axes:
                character = self.character(axis.space, axis.powers)
                for seen in (character, (0,) * len(character)) if plain else (character,):
                    if seen not in self.characters[axis.space]:
                        self.characters[axis.space].append(seen)
        self.parents = [[numbers.get(name) for name, _ in space.parents] for space in self.spaces]
        self.children: list[list[int]] = [[] for _ in self.spaces]
        self.roots: list[int] = []
        for number, parents in enumerate(self.parents):
            free = [parent for parent in parents if parent is not None]
            # Parents are listed from the outside in, so the last one that can move is the direct parent.
            (self.children[free[-1]] if free else self.roots).append(number)
        self.components = [components(len(s), c) for s, c in zip(self.signs, self.characters, strict=True)]
        self._copies_of: dict[tuple[int, int, tuple[int, int], tuple[int, int]], list[tuple[int, int]]] = {}
        self._families: dict[int, list[int]] = {}
        self._identity: Vertex | None = None
        self._seen = [
            [[g for g, on in enumerate(character) if on] for character in characters] for characters in self.characters
        ]
        self.single_signs = [self._single_signs(number) for number in range(len(self.spaces))]

    @classmethod
    def of(cls, layout: BlockLayout, *, plain: bool = False) -> Assignment:
        """The assignment of a layout, made once."""
        key = (cls, plain)
        if key not in layout.derived:
            layout.derived[key] = cls(layout, plain=plain)
        assignment: Assignment = layout.derived[key]
        return assignment

    def _single_signs(self, space: int) -> list[tuple[int, int]] | None:
        """(sign, character that sees it alone) for a root on its own whose signs meet in no character; else None."""
        alone = self.spaces[space].copies == 1 and not self.children[space] and space in self.roots
        if not alone or any(len(seen) > 1 or len(members) > 1 for members, seen in self.components[space]):
            return None
        return [(members[0], seen[0]) for members, seen in self.components[space] if seen]

    def character(self, space: int, powers: tuple[int, ...]) -> tuple[int, ...]:
        """The character of a leg with these powers: which of the space's signs it sees."""
        return tuple(powers[g] % 2 for g in self.signs[space])

    def size(self, space: int) -> int:
        """Number of coordinates: copies * units."""
        return self.spaces[space].copies * self.spaces[space].size

    @property
    def widest(self) -> int:
        """The largest number of coordinates of a space."""
        return max((self.size(space) for space in range(len(self.spaces))), default=0)

    @cached_property
    def exchangeable(self) -> list[Tensor]:
        """For every space (N, N): which coordinates can take each other's place."""
        return [self._exchangeable(number) for number in range(len(self.spaces))]

    @cached_property
    def classes(self) -> list[Tensor | None]:
        """For every space the sets of such coordinates, (sets, N) of zeros and ones; None where it is one set."""
        rows = [same.unique(dim=0) for same in self.exchangeable]
        return [None if len(sets) == 1 else sets for sets in rows]

    def _exchangeable(self, number: int) -> Tensor:
        space = self.spaces[number]
        free = torch.ones(1, 1)
        kinds = [parent is not None and self.spaces[parent].permutable for parent in self.parents[number]]
        sizes = [size for _, size in space.parents]
        for size, moves in zip([*sizes, space.size], [*kinds, space.permutable], strict=True):
            free = torch.kron(free, torch.ones(size, size) if moves else torch.eye(size))
        return free

    def family(self, root: int) -> list[int]:
        """A space and all that are nested in it."""
        if root not in self._families:
            self._families[root] = self._family(root)
        return self._families[root]

    def _family(self, root: int) -> list[int]:
        return [root, *itertools.chain.from_iterable(self.family(child) for child in self.children[root])]

    def identity(self) -> Vertex:
        """The vertex that moves nothing."""
        if self._identity is None:
            self._identity = [
                SpacePlacement(
                    torch.arange(self.size(number)),
                    torch.ones(len(self.signs[number]), self.size(number), dtype=torch.float32),
                )
                for number in range(len(self.spaces))
            ]
        return list(self._identity)

    def chi(self, place: SpacePlacement, space: int, character: int) -> Tensor | None:
        """The signs (N,) that a character sees; None where all are 1."""
        seen = self._seen[space][character]
        if len(seen) == 1:
            return place.signs[seen[0]]
        return place.signs[seen].prod(0) if seen else None

    def taken(self, matrix: Tensor, place: SpacePlacement, space: int, character: int) -> float:
        """What a place takes of gains (N, N): the sum of chi(x) * matrix[x, source(x)]."""
        rows = torch.arange(len(place.source), device=matrix.device)
        picked = matrix[rows, place.source.to(matrix.device)].cpu().double()
        chi = self.chi(place, space, character)
        return float(picked.sum() if chi is None else (picked * chi.to(picked)).sum())

    def best(self, gains: Sequence[Tensor], root: int) -> tuple[dict[int, SpacePlacement], float]:
        """Solve the tree of spaces under a root, which has no parents that move.

        Gains are per space (characters, N, N), rows in new coordinates, columns in old ones.

        Returns:
            The placements of the root and of all spaces nested in it, and the value they reach.
        """
        family = self.family(root)
        merged = {
            space: gains_under_best_signs(gains[space], self.characters[space], self.components[space]).cpu().numpy()
            for space in family
        }
        solution = self._solve_root(root, merged)
        places = {}
        for space in family:
            source = self._sources(space, solution)
            rows = torch.arange(len(source), device=gains[space].device)
            picked = gains[space][:, rows, source.to(gains[space].device)].double().cpu()
            flips = best_signs(picked, self.characters[space], self.components[space], len(self.signs[space]))
            places[space] = SpacePlacement(source, flips)
        return places, solution.value

    def _solve_root(self, root: int, gains: dict[int, Numbers]) -> Solution:
        """Solve each copy of a root: its parents, if any, are rigid."""
        whole = Solution(0.0)
        for copy in range(self.spaces[root].copies):
            part = self._solve(root, (copy, copy), gains)
            whole.value += part.value
            whole.parts += part.parts
        return whole

    def _solve(self, space: int, copies: tuple[int, int], gains: dict[int, Numbers]) -> Solution:
        """The assignment of one (new, old) pair of copies of a space, children included."""
        n = self.spaces[space].size
        new, old = copies
        gain = gains[space][new * n : (new + 1) * n, old * n : (old + 1) * n]
        inside: dict[tuple[int, int], Solution] = {}
        if self.children[space]:
            gain = gain.copy()
            pairs = (
                itertools.product(range(n), repeat=2) if self.spaces[space].permutable else ((i, i) for i in range(n))
            )
            for i, j in pairs:
                inside[i, j] = self._inside(space, (new, i), (old, j), gains)
                gain[i, j] += inside[i, j].value
        order = assign(gain) if self.spaces[space].permutable else np.arange(n)
        solution = Solution(float(gain[np.arange(n), order].sum()), [(space, new, old, order)])
        for i, j in enumerate(order) if inside else ():
            solution.parts += inside[i, int(j)].parts
        return solution

    def _inside(self, space: int, new: tuple[int, int], old: tuple[int, int], gains: dict[int, Numbers]) -> Solution:
        """All children of unit new[1] in copy new[0], when it comes from unit old[1] of copy old[0]."""
        whole = Solution(0.0)
        for child in self.children[space]:
            for pair in self._copies(space, child, new, old):
                part = self._solve(child, pair, gains)
                whole.value += part.value
                whole.parts += part.parts
        return whole

    def _copies(self, space: int, child: int, new: tuple[int, int], old: tuple[int, int]) -> list[tuple[int, int]]:
        """Copies (new, old) of a child that lie in these units; rigid parents keep their index."""
        key = (space, child, new, old)
        if key not in self._copies_of:
            if len(self._copies_of) >= _REMEMBERED:
                self._copies_of.clear()
            self._copies_of[key] = self._find_copies(space, child, new, old)
        return self._copies_of[key]

    def _find_copies(self, space: int, child: int, new: tuple[int, int], old: tuple[int, int]) -> list[tuple[int, int]]:
        names = [name for name, _ in self.spaces[space].parents]
        sizes = [size for _, size in self.spaces[space].parents]
        where: list[dict[str, int]] = []
        for copy, unit in (new, old):
            outer = map(int, np.unravel_index(copy, sizes))
            where.append({**dict(zip(names, outer, strict=True)), self.spaces[space].name: unit})
        parents = self.spaces[child].parents
        free = [(name, size) for name, size in parents if name not in where[0]]
        pairs = []
        for values in itertools.product(*[range(size) for _, size in free]):
            both = [{**place, **dict(zip([name for name, _ in free], values, strict=True))} for place in where]
            indices = [tuple(place[name] for name, _ in parents) for place in both]
            new_copy, old_copy = (int(np.ravel_multi_index(index, [s for _, s in parents])) for index in indices)
            pairs.append((new_copy, old_copy))
        return pairs

    def _sources(self, space: int, solution: Solution) -> Tensor:
        n = self.spaces[space].size
        source = np.arange(self.size(space))
        for number, new, old, order in solution.parts:
            if number == space:
                source[new * n : (new + 1) * n] = old * n + order
        return torch.from_numpy(source)

    def element(self, vertex: Vertex) -> Element:
        """The vertex as an Element; scales are 1."""
        orders, factors = {}, {}
        for number, space in enumerate(self.spaces):
            shape = (*[size for _, size in space.parents], space.size)
            if space.permutable:
                orders[space.name] = (vertex[number].source % space.size).reshape(shape)
            if space.generators:
                table = torch.ones(len(space.generators), self.size(number), dtype=torch.float64)
                table[self.signs[number]] = vertex[number].signs.double()
                factors[space.name] = table.reshape(len(space.generators), *shape)
        return Element(orders, factors)

    def vertex(self, element: Element, layout: BlockLayout) -> Vertex:
        """The permutations and signs of an Element."""
        wide = ExpandedElement(layout.symmetry, element)
        return [
            SpacePlacement(
                sources(wide, number)[0],
                wide.factors[number][self.signs[number], 0].reshape(len(self.signs[number]), self.size(number)).float(),
            )
            for number in range(len(self.spaces))
        ]


Solver = Callable[..., tuple[NDArray[np.int64], NDArray[np.int64]]]


@lru_cache
def _solver() -> Solver:
    """Scipy's solver of assignments, without the rest of `scipy.optimize` where its file can be loaded by itself.

    The package takes a third of the time of importing torch, and the solver nothing.
    """
    try:
        import scipy

        places = [str(Path(path) / "optimize") for path in scipy.__path__]
        spec = PathFinder.find_spec("_lsap", places)
        assert spec is not None and spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        solver: Solver = module.linear_sum_assignment
    except Exception:  # another layout of scipy
        from scipy.optimize import linear_sum_assignment

        return linear_sum_assignment  # type: ignore[no-any-return]
    return solver


def assign(gain: Numbers) -> NDArray[np.int64]:
    """The permutation that maximises sum_i gain[i, order[i]]."""
    linear_sum_assignment = _solver()
    if len(gain) <= _SMALL:
        short: NDArray[np.int64] = linear_sum_assignment(gain, maximize=True)[1]
        return short
    # Costs whose rows and columns have a zero each: the solver starts without that and takes a third longer.
    cost = gain.max(1, keepdims=True) - gain
    cost -= cost.min(0)
    order: NDArray[np.int64] = linear_sum_assignment(cost)[1]
    return order
