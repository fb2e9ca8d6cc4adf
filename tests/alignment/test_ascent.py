"""The quick way between vertices against the general one, plain coordinate ascent, and moved networks."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment
from torch import Tensor

import onebasin as ob
from onebasin.alignment.ascent import Ascent
from onebasin.alignment.assignment import Assignment, SpacePlacement, Vertex, assign
from onebasin.alignment.layout import BlockLayout
from onebasin.alignment.match import Overlap, barycentre, descend, grow, match, nearest, polish, search
from tests.alignment.test_layout import random_state
from tests.alignment.test_match import RIGID, case, overlap_of

NAMES = ["mlp_relu", "mlp_tanh", "resnet_bn", "encoder_prenorm_relu", "residual_mlp", "conv_flatten"]


def overlap(name: str, seed: int = 0) -> tuple[ob.Symmetry, BlockLayout, Overlap, Ascent]:
    symmetry = case(name)
    layout = BlockLayout.of(symmetry)
    a, b = random_state(symmetry, 2 * seed), random_state(symmetry, 2 * seed + 1)
    made = Overlap(layout, Assignment.of(layout), a, b)
    assert made.ascent is not None
    return symmetry, layout, made, made.ascent


def general(name: str, seed: int = 0) -> Overlap:
    """The same overlap without the quick way."""
    made = overlap(name, seed)[2]
    made.__dict__["ascent"] = None
    return made


@pytest.mark.parametrize("name", NAMES)
def test_gains_and_values_are_those_of_the_general_way(name: str) -> None:
    symmetry, layout, quick, ascent = overlap(name)
    slow = general(name)
    for seed in range(3):
        element = symmetry.random(seed, freedoms=RIGID)
        vertex = quick.assignment.vertex(element, layout)
        ascent.stand(vertex)
        for space, expected in enumerate(slow.gradient(vertex)):
            torch.testing.assert_close(ascent.gains(space), expected, rtol=1e-9, atol=1e-9)
        assert ascent.value(vertex) == pytest.approx(slow.value(vertex), rel=1e-9)
        assert ascent.value_of_mean() == pytest.approx(slow.value(barycentre(slow)), rel=1e-9, abs=1e-9)
        a, b = random_state(symmetry, 0), random_state(symmetry, 1)
        gained = overlap_of(symmetry, a, symmetry.apply(element, b)) - overlap_of(symmetry, a, b)
        still = quick.value(quick.assignment.identity())
        assert (quick.value(vertex) - still) * quick.unit == pytest.approx(gained)


@pytest.mark.parametrize("name", NAMES)
def test_growing_polishing_and_descending_lead_where_they_did(name: str) -> None:
    for seed in range(3):
        quick, slow = overlap(name, seed)[3], general(name, seed)
        vertex, value = quick.grow()
        expected = grow(slow)
        assert all(torch.equal(a.source, b.source) for a, b in zip(vertex, expected, strict=True))
        assert value == pytest.approx(slow.value(expected), rel=1e-9)
        reached, tracked, _ = quick.polish(vertex, value, quick.settled())
        other, best, _ = polish(slow, expected)
        assert all(torch.equal(a.source, b.source) for a, b in zip(reached, other, strict=True))
        assert tracked == pytest.approx(best, rel=1e-9)
        found = quick.descend(None, 0.0, hopeful=True)
        assert found is not None
        points, steps, gap = descend(slow, list(barycentre(slow)))
        assert all(torch.equal(a.source, b.source) for a, b in zip(found[0], nearest(slow, points), strict=True))
        assert found[1] == steps and found[2] == pytest.approx(gap, rel=1e-6, abs=1e-9)


def plain_ascent(made: Overlap, start: Vertex) -> tuple[Vertex, float]:
    """One space after the other to its best place for permutations without signs, until none gains: from the text."""
    vertex = list(start)
    for _ in range(100):
        before = made.value(vertex)
        for space in range(len(vertex)):
            gains = made.gradient(vertex)[space][0].numpy()
            order = linear_sum_assignment(gains, maximize=True)[1]
            vertex[space] = SpacePlacement(torch.from_numpy(order), vertex[space].signs)
        if made.value(vertex) <= before + 1e-9:
            break
    return vertex, made.value(vertex)


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 10**5))
def test_never_below_plain_coordinate_ascent(seed: int) -> None:
    """From the same start the polish ends as high; a whole search ends at least as high as either of them."""
    slow = general("residual_mlp", seed)
    assert all(len(characters) == 1 for characters in slow.assignment.characters)
    identity = slow.assignment.identity()
    _, plain = plain_ascent(slow, identity)
    quick = overlap("residual_mlp", seed)[2]
    _, polished, _ = polish(quick, identity)
    assert polished >= plain - 1e-6 * abs(plain)
    started = grow(slow)
    assert search(quick).value >= plain_ascent(slow, started)[1] * (1 - 1e-6)


def test_small_spaces_are_searched_to_the_end() -> None:
    """Where it costs next to nothing, no search ends early on a promise."""
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 9), torch.nn.ReLU(), torch.nn.Linear(9, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3)
    )
    symmetry = ob.discover(model, torch.zeros(2, 4))
    for seed in range(25):
        a, b = random_state(symmetry, 2 * seed), random_state(symmetry, 2 * seed + 1)
        reached = {effort: match(a, b, symmetry, effort=effort).after for effort in ("full", "thorough")}
        assert reached["full"] == reached["thorough"]


def test_only_what_it_can_do() -> None:
    """Spaces that meet themselves, and tensors with three moving axes, take the general way."""
    for name in ("lstm", "grouped"):
        symmetry = case(name)
        layout = BlockLayout.of(symmetry)
        made = Overlap(layout, Assignment.of(layout), random_state(symmetry, 0), random_state(symmetry, 1))
        assert made.ascent is None
        assert search(made).value >= made.value(made.assignment.identity()) - 1e-9


def test_the_solver_is_that_of_scipy_without_its_package() -> None:
    generator = torch.Generator().manual_seed(0)
    for size in (1, 2, 31, 33, 70):
        for ties in (False, True):
            gain = torch.randn(size, size, generator=generator, dtype=torch.float64)
            gain = gain.round() if ties else gain
            order = assign(gain.numpy())
            assert sorted(order) == list(range(size))
            best = gain.numpy()[linear_sum_assignment(gain.numpy(), maximize=True)].sum()
            assert gain.numpy()[range(size), order].sum() == pytest.approx(best)
    code = (
        "import sys, numpy; from onebasin.alignment.assignment import assign; assign(numpy.eye(40));"
        "sys.exit('scipy.optimize' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", ["mlp_relu", "resnet_bn", "encoder_prenorm_relu", "lstm", "conv_flatten"])
@pytest.mark.parametrize("kind", ["value", "std", "mask", "gradient"])
def test_one_network_is_moved_as_a_population_of_one(name: str, kind: str) -> None:
    """Bit for bit, scales and signs included."""
    symmetry = case(name)
    state = {n: t.abs() + 0.5 if kind != "value" or "var" in n else t for n, t in random_state(symmetry, 0).items()}
    state = {n: t.float() for n, t in state.items()}
    batch = symmetry.random(3, members=2)
    many = ob.Population.from_states([state, state])
    alone = symmetry.apply(batch.member(1), state, kind=kind)
    together = symmetry.apply(batch, many, kind=kind).member(1)
    assert all(torch.equal(alone[n], together[n]) for n in alone)


def test_networks_balanced_together_are_those_balanced_apart() -> None:
    """Small pairs share their operations; pairs of different precision are balanced one by one."""
    symmetry = case("resnet_bn")

    def network(seed: int) -> dict[str, Tensor]:
        return {n: t.abs() + 0.1 if "var" in n else t for n, t in random_state(symmetry, seed).items()}

    a, b = network(0), symmetry.apply(symmetry.random(3), network(0))
    same = match(a, b, symmetry)
    assert same.distance_after <= 1e-9 * same.distance_before
    mixed = match({n: t.float() for n, t in a.items()}, b, symmetry)
    assert mixed.after == pytest.approx(same.after, rel=1e-5)
