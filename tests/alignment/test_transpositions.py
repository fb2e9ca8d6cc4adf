"""Swaps and flips against brute force over whole groups, and generators against the law they promise."""

import itertools
import math
import time
from collections import Counter
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

import onebasin as ob
from onebasin.alignment.transpositions import (
    count_transpositions,
    element_with,
    expected_transpositions,
    permutation_with,
    probabilities,
    transpositions,
)
from onebasin.errors import InputError, SymmetryError
from tests.models import BATTERY

SIGNED = ob.Symmetry((ob.Space("u", 3, True, ("sign",), (), ()),))
HEADS = ob.Symmetry(
    (ob.Space("head", 2, True, (), (), ()), ob.Space("inside", 3, True, (), (("head", 2),), ())),
)


@cache
def discovered(name: str) -> ob.Symmetry:
    case = next(case for case in BATTERY if case.name == name)
    return ob.discover(case.build().eval(), case.inputs())


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def key(element: ob.Element) -> tuple[object, ...]:
    parts = [*element.orders.values(), *element.factors.values()]
    return tuple(tuple(part.reshape(-1).tolist()) for part in parts)


def distances(symmetry: ob.Symmetry, moves: list[ob.Element]) -> list[tuple[ob.Element, int]]:
    """Every element of the group with the least number of moves whose product it is, by breadth-first search."""
    found = {key(symmetry.identity()): (symmetry.identity(), 0)}
    edge = [symmetry.identity()]
    for depth in itertools.count(1):
        reached = {}
        for element in edge:
            for move in moves:
                made = symmetry.compose(move, element)
                if key(made) not in found:
                    reached[key(made)] = made
        if not reached:
            return list(found.values())
        found |= {code: (element, depth) for code, element in reached.items()}
        edge = list(reached.values())
    raise AssertionError("unreachable")


def swap(symmetry: ob.Symmetry, name: str, pair: tuple[int, int], copy: tuple[int, ...] = ()) -> ob.Element:
    element = symmetry.identity()
    first, second = pair
    element.orders[name][(*copy, first)], element.orders[name][(*copy, second)] = second, first
    return element


# ---------------------------------------------------------------------------------------------------- counting


def test_worked_example_of_the_paper() -> None:
    """1->4, 2->1, 3->5, 4->2, 5->3 is (1 4 2)(3 5)."""
    order = torch.tensor([4, 1, 5, 2, 3]) - 1
    found = transpositions(ob.Element({"u": order}, {}))
    assert (found.total, found.maximum, found.normalised) == (3, 4, 0.75)
    assert found.spaces["u"] == 3 and found.flips == {} and found.positions == {}


@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 9, 512])
def test_identity_and_one_long_cycle(n: int) -> None:
    assert count_transpositions(torch.arange(n)) == 0
    assert count_transpositions(torch.arange(n).roll(1)) == n - 1


@pytest.mark.parametrize("n", [4, 5])
def test_fewest_swaps_by_brute_force(n: int) -> None:
    symmetry = ob.Symmetry((ob.Space("u", n, True, (), (), ()),))
    group = distances(symmetry, [swap(symmetry, "u", pair) for pair in itertools.combinations(range(n), 2)])
    assert len(group) == math.factorial(n)
    for element, depth in group:
        assert transpositions(element).total == depth


def test_stirling_numbers_count_the_permutations() -> None:
    """How many permutations of 6 units have each number of transpositions: signless Stirling numbers, first kind."""
    orders = torch.tensor(list(itertools.permutations(range(6))))
    assert count_transpositions(orders).bincount().tolist() == [1, 15, 85, 225, 274, 120]
    assert [stirling(6)[6 - swaps] for swaps in range(6)] == [1, 15, 85, 225, 274, 120]


def test_fewest_swaps_and_flips_by_brute_force() -> None:
    """The 48 signed permutations of three units."""
    flips = [SIGNED.identity() for _ in range(3)]
    for unit, flip in enumerate(flips):
        flip.factors["u"][0, unit] = -1
    group = distances(SIGNED, [*flips, *[swap(SIGNED, "u", pair) for pair in itertools.combinations(range(3), 2)]])
    assert len(group) == 48
    for element, depth in group:
        found = transpositions(element, SIGNED)
        assert found.moves == depth
        assert found.flips["u"] == (element.factors["u"] < 0).sum() and found.moves == found.total + found.flips["u"]


def test_heads_by_brute_force() -> None:
    """All 72 elements of two heads of three units: swaps of whole heads and swaps inside one head."""
    inner = [swap(HEADS, "inside", pair, (h,)) for h in range(2) for pair in itertools.combinations(range(3), 2)]
    group = distances(HEADS, [swap(HEADS, "head", (0, 1)), *inner])
    assert len(group) == 72
    for element, depth in group:
        found = transpositions(element, HEADS)
        assert found.total == found.moves == depth
        assert found.maximum == 1 + 2 * 2


def test_positions_by_acting_on_labels() -> None:
    """Let the element move a tensor of labels, and follow the labels."""
    symmetry = discovered("attention_fused")
    name = next(space.name for space in symmetry.spaces if space.parents)
    space = symmetry[name]
    legs = [leg for leg in space.legs if leg.tensor == "qkv.bias"]
    for seed in range(20):
        element = symmetry.random(seed, freedoms=["permutation"])
        found = transpositions(element, symmetry)
        labels = {key: torch.arange(math.prod(s)).reshape(s).double() for key, s in symmetry.shapes.items()}
        moved = symmetry.apply(element, labels)["qkv.bias"].long()
        start, width = legs[0].grid.runs[0][0], space.copies * space.size
        order = moved[start : start + width] - start
        assert found.positions[name] == count_transpositions(order)
        plain = {s.name for s in symmetry.spaces if s.permutable and not s.parents}
        assert plain and all(found.positions[other] == found.spaces[other] for other in plain)


def test_positions_of_random_heads() -> None:
    """Heads make H_h cycles on average and each of those H_n of units: h n - H_h H_n places."""
    symmetry = ob.Symmetry((ob.Space("head", 4, True, (), (), ()), ob.Space("in", 6, True, (), (("head", 4),), ())))
    found = transpositions(symmetry.random(0, members=20_000), symmetry).positions["in"].double()
    cycles = [sum(1 / k for k in range(1, n + 1)) for n in (4, 6)]
    assert abs(found.mean() - (24 - cycles[0] * cycles[1])) < 4 * found.std() / math.sqrt(len(found))


def test_mean_and_spread_over_random_permutations() -> None:
    orders = torch.rand(2000, 512, generator=seeded(0), dtype=torch.float64).argsort(-1)
    found = count_transpositions(orders).double()
    mean, spread = expected_transpositions(512)
    assert (round(mean, 2), round(spread, 2)) == (505.18, 2.27)
    assert abs(found.mean() - mean) < 4 * spread / math.sqrt(2000)
    assert abs(found.std() - spread) < 4 * spread / math.sqrt(2 * 2000)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_mean_and_spread_by_listing(n: int) -> None:
    found = count_transpositions(torch.tensor(list(itertools.permutations(range(n))))).double()
    mean, spread = expected_transpositions(n)
    assert mean == pytest.approx(float(found.mean()), abs=1e-12)
    assert spread == pytest.approx(float(found.std(correction=0)), abs=1e-12)


@pytest.mark.parametrize(
    "name", ["residual_mlp", "resnet_bn", "grouped", "lstm", "decoder_gqa", "tied_autoencoder_tanh"]
)
def test_totals_of_discovered_symmetries(name: str) -> None:
    """Expected total and spread for random elements; a batch is its members one by one; the inverse is as far."""
    symmetry = discovered(name)
    batch = symmetry.random(0, members=3000)
    found = transpositions(batch, symmetry)
    total = found.total.double()
    assert abs(total.mean() - found.expected) < 4 * found.spread / math.sqrt(3000)
    assert found.maximum == sum(s.copies * (s.size - 1) for s in symmetry.spaces if s.permutable)
    assert torch.equal(transpositions(batch).total, found.total)
    assert torch.equal(transpositions(symmetry.invert(batch), symmetry).moves, found.moves)
    for index in range(3):
        one = transpositions(batch.member(index), symmetry)
        assert (one.total, one.moves) == (found.total[index], found.moves[index])
        assert all(one.positions[space] == count[index] for space, count in found.positions.items())


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 40), seed=st.integers(0, 2**31))
def test_inverse_and_relabelling(n: int, seed: int) -> None:
    order, labels = torch.rand(2, n, generator=seeded(seed), dtype=torch.float64).argsort(-1)
    relabelled = torch.empty_like(order)
    relabelled[labels] = labels[order]
    assert count_transpositions(order) == count_transpositions(order.argsort()) == count_transpositions(relabelled)


def test_heads_relabelled_inside() -> None:
    """The count over places ignores how units are numbered in each head; the count per space does not."""
    exchanged = swap(HEADS, "head", (0, 1))
    names = swap(HEADS, "inside", (0, 2), (1,))
    renamed = HEADS.compose(HEADS.compose(names, exchanged), HEADS.invert(names))
    before, after = transpositions(exchanged, HEADS), transpositions(renamed, HEADS)
    assert before.positions["inside"] == after.positions["inside"] == 3
    assert (before.total, after.total) == (1, 3)


def test_nothing_to_permute() -> None:
    symmetry = ob.Symmetry((ob.Space("one", 1, True, (), (), ()), ob.Space("rigid", 3, False, ("sign",), (), ())))
    element = symmetry.random(2)
    found = transpositions(element, symmetry)
    assert (found.total, found.maximum, found.normalised, found.expected, found.spread) == (0, 0, 0, 0, 0)
    assert found.flips["rigid"] == (element.factors["rigid"] < 0).sum() > 0
    assert transpositions(symmetry.random(1, members=2)).total.tolist() == [0, 0]
    nothing = transpositions(ob.Element({}, {}, 5))
    assert nothing.total.tolist() == [0] * 5 == nothing.moves.tolist()


def test_spaces_the_element_leaves_out() -> None:
    found = transpositions(ob.Element({"head": torch.tensor([1, 0])}, {}), HEADS)
    assert found.spaces == {"head": 1, "inside": 0} and found.positions == {"head": 1, "inside": 3}
    assert "1 swaps of at most 5; at random 2.8 ± 1.1." in repr(found)
    assert "On average 0.0 swaps of at most 5;" in repr(transpositions(HEADS.identity(7)))


@pytest.mark.parametrize("order", [torch.tensor([0, 0, 1]), torch.tensor([0, 1, 3]), torch.tensor([0.0, 1.0, 2.0])])
def test_no_permutation_is_refused(order: Tensor) -> None:
    with pytest.raises(SymmetryError, match="'u'"):
        transpositions(ob.Element({"u": order}, {}))
    with pytest.raises(SymmetryError, match="'u'"):
        transpositions(ob.Element({"u": order}, {}), SIGNED)


def test_many_members_quickly() -> None:
    batch = ob.Element({"u": torch.rand(1000, 512, generator=seeded(0)).argsort(-1)}, {}, 1000)
    best = math.inf
    for _ in range(3):  # the best of three: other work shares the cores
        start = time.perf_counter()
        transpositions(batch)
        best = min(best, time.perf_counter() - start)
    assert best < 0.8


# ---------------------------------------------------------------------------------------------------- drawing


@cache
def stirling(n: int) -> list[int]:
    """Exact numbers of permutations of n units with 0, 1, ..., n cycles."""
    row = [1]
    for size in range(n):
        row = [size * a + b for a, b in zip([*row, 0], [0, *row], strict=True)]
    return row


def draws(n: int, swaps: int, many: int, method: str = "uniform") -> Tensor:
    generator = seeded(n * 1000 + swaps)
    return torch.stack([permutation_with(n, swaps, generator, method=method) for _ in range(many)])


@pytest.mark.parametrize("method", ["uniform", "paper"])
@pytest.mark.parametrize(
    ("n", "swaps"), [(1, 0), (5, 0), (5, 1), (5, 4), (512, 1), (512, 300), (512, 511), (4096, 2048)]
)
def test_exactly_that_many(n: int, swaps: int, method: str) -> None:
    order = permutation_with(n, swaps, 0, method=method)
    assert torch.equal(order.sort().values, torch.arange(n))
    assert count_transpositions(order) == swaps
    assert torch.equal(order, permutation_with(n, swaps, 0, method=method))


@pytest.mark.parametrize("swaps", [1, 2, 3, 4])
def test_uniform_is_uniform(swaps: int) -> None:
    counts = Counter(map(tuple, draws(5, swaps, 4000).tolist()))
    cells = stirling(5)[5 - swaps]
    assert len(counts) == cells
    assert stats.chisquare(list(counts.values())).pvalue > 1e-3


def test_paper_is_not_uniform() -> None:
    """With 2 cycles of 5 units, 4 + 1 has 30 permutations and 3 + 2 has 20; the paper draws 4 + 1 in 2 of 8 cases."""
    for swaps in (2, 3):
        counts = Counter(map(tuple, draws(5, swaps, 4000, "paper").tolist()))
        observed = [*counts.values(), *[0] * (stirling(5)[5 - swaps] - len(counts))]
        assert stats.chisquare(observed).pvalue < 1e-10
    longest = (draws(5, 3, 4000, "paper") == torch.arange(5)).sum(1) == 1
    assert stats.binomtest(int(longest.sum()), 4000, 2 / 8).pvalue > 1e-3


@pytest.mark.parametrize(("n", "swaps"), [(20, 7), (64, 40), (512, 256)])
def test_unmoved_units(n: int, swaps: int) -> None:
    """Fixed points: k (1 - 1/k)^i for the paper's generator, n c(n - 1, k - 1) / c(n, k) for the uniform one."""
    k = n - swaps
    exact = {"paper": k * (1 - 1 / k) ** swaps, "uniform": n * stirling(n - 1)[k - 1] / stirling(n)[k]}
    for method, mean in exact.items():
        fixed = (draws(n, swaps, 600, method) == torch.arange(n)).sum(1).double()
        assert abs(fixed.mean() - mean) < 4 * fixed.std() / math.sqrt(600), method
    assert abs(exact["paper"] - exact["uniform"]) > 0.4


def test_element_with() -> None:
    symmetry = discovered("decoder_gqa")
    fibred = next(space for space in symmetry.spaces if space.parents and space.permutable)
    for method in ("uniform", "paper"):
        element = element_with(symmetry, {"gate": 5, fibred.name: 3}, 0, method)
        found = transpositions(element, symmetry)
        assert {name: int(count) for name, count in found.spaces.items() if count} == {"gate": 5, fibred.name: 3}
        assert found.moves == 8
        assert all(bool((factor == 1).all()) for factor in element.factors.values())
    state = {name: torch.randn(shape, generator=seeded(1)) for name, shape in symmetry.shapes.items()}
    moved = symmetry.apply(element, state)
    assert (moved["gate.weight"] != state["gate.weight"]).any()
    assert count_transpositions(element_with(SIGNED, 2, seeded(0)).orders["u"]) == 2


def test_element_with_is_uniform_over_copies() -> None:
    """Two copies of three units with 2 swaps: (2, 0), (1, 1), (0, 2) have 2, 9 and 2 orders."""
    generator = seeded(3)
    made = [element_with(HEADS, {"inside": 2}, generator).orders["inside"].reshape(-1).tolist() for _ in range(3000)]
    counts = Counter(map(tuple, made))
    assert len(counts) == 13
    assert stats.chisquare(list(counts.values())).pvalue > 1e-3


def test_bad_requests() -> None:
    for n, swaps in ((5, 5), (5, -1), (0, 0)):
        with pytest.raises(InputError, match="transpositions, found"):
            permutation_with(n, swaps, 0)
    with pytest.raises(InputError, match="0 to 4 transpositions, found 5"):
        element_with(HEADS, {"inside": 5}, 0)
    with pytest.raises(InputError, match="'uniform' or 'paper'"):
        permutation_with(5, 2, 0, method="fast")
    with pytest.raises(InputError, match=r"one permutable space, found 2.*head, inside"):
        element_with(HEADS, 1, 0)
    with pytest.raises(SymmetryError, match="no space is called 'tail'"):
        element_with(HEADS, {"tail": 1}, 0)
    with pytest.raises(SymmetryError, match="rigid"):
        element_with(ob.Symmetry((ob.Space("u", 3, False, ("sign",), (), ()),)), {"u": 1}, 0)
    with pytest.raises(InputError, match="at least 1 unit"):
        expected_transpositions(0)


@pytest.mark.parametrize("sizes", [[(1, 5)], [(1, 3), (2, 3)], [(1, 1)], [(3, 2), (1, 4)]])
def test_chances_of_totals_are_those_of_all_permutations(sizes: list[tuple[int, int]]) -> None:
    counts = torch.ones(1, dtype=torch.float64)
    for copies, units in sizes:
        orders = torch.tensor(list(itertools.permutations(range(units))))
        one = count_transpositions(orders).bincount(minlength=units).double() / len(orders)
        for _ in range(copies):
            longer = torch.zeros(len(counts) + units - 1, dtype=torch.float64)
            for total, chance in enumerate(counts):
                longer[total : total + units] += chance * one
            counts = longer
    expected = counts[: 1 + sum(copies * (units - 1) for copies, units in sizes)]
    assert probabilities(sizes).tolist() == pytest.approx(expected.tolist(), abs=1e-15)
