"""Two networks: the element that moves one onto the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from onebasin.alignment.assign import Assignment
from onebasin.alignment.balance import balancing
from onebasin.alignment.layout import BlockLayout
from onebasin.alignment.search import Found, Overlap, is_better, polish, search
from onebasin.errors import InputError, SpecError
from onebasin.parallel import threads_for
from onebasin.state import State, as_state, check_finite, is_statistic
from onebasin.symmetry import Element, Symmetry

Spreads = tuple[Mapping[str, Tensor], Mapping[str, Tensor]]
EFFORTS = ("full", "cheap", "thorough")
MATCH_SCALES = ("reference", "keep")
_NEAR = 0.25  # part of the overlap that is there from the start, from which networks count as close
_SAME = 1e-9  # what is left of a distance when only rounding is left
_ROUNDING = 1e-12  # of the squared norms: a distance that differs by less is the same
_HALF = 0.5  # part of a barrier that is left by the move, below which networks are not unrelated
_NULLS = 3  # searches against scrambled copies that say what unrelated networks reach


class Verdict(NamedTuple):
    """What one network is to another.

    Attributes:
        word: "already aligned"; "moved"; "partly alike"; or "independent".
        reason: the number, the threshold and the margin that decided, as a sentence without its full stop.
        thresholds: overlaps above which networks count as partly alike and as moved; None where they decided nothing.
    """

    word: str
    reason: str
    thresholds: tuple[float, float] | None = None


@dataclass(frozen=True, eq=False)
class Match:
    """What `match` found.

    Attributes:
        element: moves b onto a: `symmetry.apply(element, b)` lies close to a and computes the function of b.
        before: overlap <a, b> over all weights, in the scale in which they were compared.
        after: overlap <a, g.b>, in the same scale.
        distance_before: |a - b|^2 over all weights as they were given.
        distance_after: |a - g.b|^2, likewise.
        iterations: Frank-Wolfe steps; 0 where growing was better or enough.
        sweeps: coordinate sweeps of the polish.
        gap: what the last Frank-Wolfe step could still have gained if the overlap were linear there; 0 without one: no
            space by itself can gain anything.
        exact: the overlap was linear in the element, so that a single assignment gave the true optimum.
    """

    element: Element
    before: float
    after: float
    distance_before: float
    distance_after: float
    iterations: int
    sweeps: int
    gap: float
    exact: bool
    _reached: float
    _moved: bool
    _unrelated: Callable[[], tuple[float, ...]]

    @cached_property
    def null(self) -> tuple[float, float]:
        """Mean and spread of the overlap that networks like b reach when they have nothing to do with a.

        The search is repeated on copies of b whose weights have changed places within each tensor: equally large and
        unrelated. To be compared with `after`. It takes three times as long as the match itself and is done when first
        asked for.
        """
        values = torch.tensor(self._unrelated(), dtype=torch.float64) + (self.after - self._reached)
        return float(values.mean()), float(values.std())

    @property
    def thresholds(self) -> tuple[float, float]:
        """The overlaps above which `after` counts as "partly alike" and as "moved".

        With m and s of `null` and r the overlap that the search reached, moved is m + max(4 s, 5 % of r), and partly
        alike m + max(8 s, 3 % of r) where that is less: three draws know their spread only roughly.
        """
        mean, spread = self.null
        reached = abs(self._reached)
        moved = mean + max(4 * spread, 0.05 * reached)
        return min(moved, mean + max(8 * spread, 0.03 * reached)), moved

    @property
    def verdict(self) -> str:
        """What `judged` says without a barrier: "already aligned", "moved", "partly alike" or "independent"."""
        return self.judged().word

    def judged(self, barrier: tuple[float, float] | None = None) -> Verdict:
        """What b is to a, with the numbers that decided.

        Args:
            barrier: of the loss on the straight path from a to b, and to g.b, where it was measured. A barrier that
                the move takes below half of what it was speaks against "independent", whatever the overlap says.
        """
        if not self._moved:
            return Verdict("already aligned", "no order or sign of its units brings B closer to A")
        if self.distance_after <= _SAME * self.distance_before:
            return Verdict("moved", "moved, B is A up to rounding")
        (mean, spread), (alike, moved) = self.null, self.thresholds
        reach = f"overlap {_short(self.after)}, unrelated networks {_short(mean)} ± {_short(spread)}; "
        reach += f"partly alike above {_short(alike)}, " if alike < moved else ""
        reach += f"moved above {_short(moved)}"
        word = "moved" if self.after > moved else "partly alike" if self.after > alike else "independent"
        if barrier is not None:
            before, after = barrier
            falls = before > 0 and after < _HALF * before
            reach += f"; the loss barrier between A and B goes from {_short(before)} to {_short(after)} when B is moved"
            if word == "independent" and falls:
                word = "partly alike"
                reach += ", less than half, which unrelated networks do not show"
        return Verdict(word, reach, (alike, moved))

    def __repr__(self) -> str:
        """Say what was gained; the verdict is left out because it takes another search."""
        return (
            f"Match(overlap {self.before:.6g} -> {self.after:.6g}, distance {self.distance_before:.6g} -> "
            f"{self.distance_after:.6g}, {self.iterations} steps, {self.sweeps} sweeps, gap {self.gap:.2g})"
        )


def match(
    a: Mapping[str, Tensor] | nn.Module,
    b: Mapping[str, Tensor] | nn.Module,
    symmetry: Symmetry,
    *,
    effort: str = "full",
    restarts: int = 0,
    seed: int = 0,
    scale: str = "reference",
    std: Spreads | None = None,
) -> Match:
    """Find the element g of the symmetry that brings g.b closest to a, over permutations, signs and scales.

    Maximises <a, g.b> from the barycentre of the group: by growing (one space after the other, the rest in the
    mean) and by Frank-Wolfe with exact line search, then by coordinate ascent; the best is kept. Positive scales
    have no best overlap: both networks are first brought to their lightest form (`balance`) and compared there;
    then b is given the scales of a, or keeps its own where it is closer with them. Where neither is closer than b
    was, the search is repeated with scales as they are: g.b is never farther from a than b.

    Args:
        a: the network that stays; a State or a module.
        b: the network that moves. Neither is changed.
        symmetry: found by `discover` for their architecture.
        effort: "full"; "cheap" for coordinate ascent from where b is: often stuck; "thorough" for Frank-Wolfe also
            where it takes long and seldom helps, in wide feed-forward networks.
        restarts: further searches from random places; the best result is kept.
        seed: for the restarts and the verdict.
        scale: "reference" as above; "keep" leaves all scales as they are.
        std: standard deviations of a and b, when they are means of posteriors: their overlap counts as well, so that
            the squared Wasserstein distance of the two diagonal Gaussians is what is made small. Move the second with
            `symmetry.apply(found.element, std_b, kind="std")`.

    Raises:
        SpecError: a network does not fit the symmetry, or holds NaN.
    """
    if effort not in EFFORTS or scale not in MATCH_SCALES or restarts < 0:
        raise InputError(
            f"expected effort in {EFFORTS}, scale in {MATCH_SCALES} and restarts >= 0, found {effort!r}, {scale!r} and "
            f"{restarts}"
        )
    left, right = as_state(a), as_state(b)
    board = BlockLayout.of(symmetry)
    _check(symmetry, left, right, std)
    bare, kept = _lightest(symmetry, left, right, std) if scale == "reference" and symmetry.dimensions else (None, None)
    first, second, spreads = kept or (left, right, std)
    assignment = Assignment(board, plain=std is not None)
    with threads_for(assignment.widest):
        overlap = Overlap(board, assignment, first, second, std=spreads)
        found = _search(overlap, effort, restarts, seed)
        home = overlap.value(assignment.identity())
    moved = is_better(found.value, home)
    element = assignment.element(found.vertex) if moved else symmetry.identity()
    after = _inner(board, first, symmetry.apply(element, second))
    element, distance, closer = _scaled(board, (left, right), std, element, bare)
    if bare is not None and not closer:
        # Closer in the lightest form, farther in every scale that is offered: an order for the scales as they are.
        return match(left, right, symmetry, effort=effort, restarts=restarts, seed=seed, scale="keep", std=std)
    return Match(
        element,
        _inner(board, first, second),
        after,
        _distance(board, left, right),
        distance,
        found.steps,
        found.sweeps,
        found.gap,
        overlap.degree == 1,
        found.value * overlap.unit,
        moved,
        partial(_unrelated, board, (first, second, spreads), effort, seed),
    )


def _scaled(
    board: BlockLayout,
    pair: tuple[State, State],
    std: Spreads | None,
    element: Element,
    bare: tuple[Element, Element] | None,
) -> tuple[Element, float, bool]:
    """The element with the scales of a, or with those of b if that is closer, and |a - g.b|^2 of the means.

    Closeness counts deviations where they are given, as the search did; also returned is whether the moved network is
    no farther from a than b was.
    """
    symmetry, (a, b) = board.symmetry, pair
    choices = [element]
    if bare is not None:
        choices.append(symmetry.compose(symmetry.invert(bare[0]), symmetry.compose(element, bare[1])))

    def apart(choice: Element, state: State) -> float:
        found = _distance(board, a, state)
        if std is not None:
            found += _distance(board, std[0], symmetry.apply(choice, std[1], kind="std"))
        return found

    moved = [symmetry.apply(choice, b) for choice in choices]
    gaps = [apart(choice, state) for choice, state in zip(choices, moved, strict=True)]
    best = min(range(len(choices)), key=lambda n: (not math.isfinite(gaps[n]), gaps[n]))
    check_finite(moved[best], where="the moved network")
    slack = _ROUNDING * (_inner(board, a, a) + _inner(board, b, b))
    closer = gaps[best] <= apart(symmetry.identity(), b) + slack
    return choices[best], _distance(board, a, moved[best]), closer


def _unrelated(
    board: BlockLayout, sides: tuple[State, State, Spreads | None], effort: str, seed: int
) -> tuple[float, ...]:
    """Overlaps reached by copies of b whose weights have changed places inside each tensor."""
    a, b, std = sides
    generator, assignment = torch.Generator().manual_seed(seed), Assignment(board, plain=std is not None)
    reached = []
    for _ in range(_NULLS):
        places = {name: torch.randperm(b[name].numel(), generator=generator) for name in board.tensors}

        def shuffled(state: Mapping[str, Tensor], places: Mapping[str, Tensor] = places) -> State:
            return {n: state[n].reshape(-1)[p.to(state[n].device)].reshape(state[n].shape) for n, p in places.items()}

        spreads = None if std is None else (std[0], shuffled(std[1]))
        with threads_for(assignment.widest):
            overlap = Overlap(board, assignment, a, shuffled(b), std=spreads)
            reached.append(_search(overlap, effort, 0, seed).value * overlap.unit)
    return tuple(reached)


def _short(value: float) -> str:
    """Four digits, thousands apart.

    >>> _short(10472.3), _short(324.93), _short(0.26)
    ('10,472', '324.9', '0.26')
    """
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def check_network(board: BlockLayout, state: Mapping[str, Tensor], *, where: str) -> None:
    """Raise unless a network fits the symmetry, is finite, and has no negative variance; `board` knows statistics."""
    board.check(state, where=where)
    check_finite({name: state[name] for name in board.symmetry.shapes}, where=where)
    for block in board.blocks:
        if any(foot.shift for foot in block.feet) and bool((state[block.tensor] < 0).any()):
            raise SpecError(f"{where} has negative variances in {block.tensor}: its batch norm cannot be run")


def _check(symmetry: Symmetry, a: State, b: State, std: Spreads | None) -> None:
    board = BlockLayout.of(symmetry, statistics=True)
    check_network(board, a, where="the first network")
    check_network(board, b, where="the second network")
    for where, state in zip(("the first std", "the second std"), std or (), strict=False):
        board.check(state, where=where)
        check_finite(dict(state), where=where)


def _lightest(
    symmetry: Symmetry, a: State, b: State, std: Spreads | None
) -> tuple[tuple[Element, Element], tuple[State, State, tuple[State, State] | None]]:
    """Both networks in their lightest form, and the elements that bring them there."""
    board = BlockLayout.of(symmetry, statistics=True)
    bare = lightest(board, a), lightest(board, b)
    spreads = (
        (symmetry.apply(bare[0], std[0], kind="std"), symmetry.apply(bare[1], std[1], kind="std")) if std else None
    )
    return bare, (symmetry.apply(bare[0], a), symmetry.apply(bare[1], b), spreads)


def lightest(board: BlockLayout, state: Mapping[str, Tensor]) -> Element:
    """The scales that balance one network; `board` must know the statistics."""
    return balancing(board, {name: tensor[None] for name, tensor in state.items()}).member(0)


def _search(overlap: Overlap, effort: str, restarts: int, seed: int) -> Found:
    generator = torch.Generator().manual_seed(seed)
    found = None
    if effort != "cheap":
        found = search(overlap, restarts=restarts, generator=generator, thorough=effort == "thorough")
    home = overlap.assignment.identity()
    if found is not None and overlap.value(home) < _NEAR * found.value:
        return found
    vertex, value, sweeps = polish(overlap, home)  # networks that are close already: climb from there as well
    if found is not None and found.value >= value:
        return found
    return Found(vertex, value, 0 if found is None else found.steps, 0.0 if found is None else found.gap, sweeps)


def weights_of(board: BlockLayout) -> list[str]:
    """Names of all tensors that count as weights: statistics of batch norms and constants do not."""
    symmetry = board.symmetry
    return [name for name in symmetry.shapes if not is_statistic(name) and name not in symmetry.frozen]


def _inner(board: BlockLayout, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """<a, b> over all weights; products as precise as the weights, sums in float64."""
    return sum(float((x * y).sum(dtype=torch.float64)) for x, y in _pairs(board, a, b))


def _distance(board: BlockLayout, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """|a - b|^2 over all weights, likewise."""
    return sum(float((x - y).square().sum(dtype=torch.float64)) for x, y in _pairs(board, a, b))


def _pairs(board: BlockLayout, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Both networks' weights on the CPU, since some devices have no float64; at least float32."""
    for name in weights_of(board):
        if a[name].is_floating_point():
            dtype = torch.promote_types(torch.float32, torch.promote_types(a[name].dtype, b[name].dtype))
            yield a[name].to("cpu", dtype), b[name].to("cpu", dtype)
