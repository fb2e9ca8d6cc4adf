"""The battery: every model's spaces and freedoms are found, proved, and nothing of the user's is touched."""

import copy
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.symmetry.group import Symmetry
from onebasin.symmetry.space import FREEDOMS
from tests.models import BATTERY, GAPS, Case, Expected, missing

CASES = [pytest.param(case, id=case.name) for case in BATTERY]
KINDS = ("scale", "sign", "norm-scale", "norm-sign")
SEEN: dict[str, tuple[nn.Module, object, Symmetry]] = {}


def prepared(case: Case) -> tuple[nn.Module, object, Symmetry]:
    """Model, inputs and discovered symmetry, made once per worker."""
    if reason := missing(case):
        pytest.skip(reason)
    if case.name not in SEEN:
        model, inputs = case.build(), case.inputs()
        SEEN[case.name] = (model, inputs, ob.discover(model, inputs))
    return SEEN[case.name]


def found(space: ob.Space) -> tuple[object, ...]:
    return space.size, space.copies, space.permutable, *[space.generators.count(kind) for kind in KINDS]


def wanted(space: Expected) -> tuple[object, ...]:
    numbers = space.scales, space.signs, space.norm_scales, space.norm_signs
    return space.size, space.copies, space.permutation and space.size > 1, *numbers


@pytest.mark.parametrize("case", CASES)
def test_all_spaces_and_freedoms_are_found(case: Case) -> None:
    _, _, symmetry = prepared(case)
    assert Counter(map(found, symmetry.spaces)) == Counter(map(wanted, case.spaces)), f"{case.why}\n{symmetry}"
    assert bool(symmetry.unexplained) == case.unexplained, symmetry.unexplained


@pytest.mark.parametrize("case", CASES)
def test_every_freedom_keeps_the_function(case: Case) -> None:
    model, inputs, symmetry = prepared(case)
    proof = ob.verify(model, symmetry, inputs, seed=1)
    assert proof.passed and proof.max_error <= 1e-9, str(proof)
    assert len(proof.rows) == 1 + sum(len(space.freedoms) for space in symmetry.spaces)


@pytest.mark.parametrize("case", CASES)
def test_the_proof_would_notice_a_missing_leg(case: Case) -> None:
    """Leave out a leg: a proof that still passes proves nothing. (Biases may have no effect: those of keys do not.)"""
    model, inputs, symmetry = prepared(case)
    tensors = model.state_dict(keep_vars=True)
    for space in symmetry.spaces:
        legs = [leg for leg in space.legs if tensors[leg.tensor].dim() > 1 and (space.permutable or any(leg.powers))]
        victim = next((leg for leg in reversed(legs) if not shared(tensors, leg.tensor)), None)
        if victim is None or len(space.legs) == 1:  # without its only leg a space moves nothing
            continue
        maimed = replace(space, legs=tuple(leg for leg in space.legs if leg is not victim))
        broken = replace(symmetry, spaces=tuple(maimed if other is space else other for other in symmetry.spaces))
        assert not ob.verify(model, broken, inputs, spaces=[space.name]).passed, (
            f"{space.name}: {victim} left out, unnoticed"
        )


def shared(tensors: dict[str, torch.Tensor], name: str) -> bool:
    """Whether a tensor has two names: then leaving out one of them leaves nothing out."""
    return sum(tensor is tensors[name] for tensor in tensors.values()) > 1


@pytest.mark.parametrize("case", CASES)
def test_group_axioms(case: Case) -> None:
    model, _, symmetry = prepared(case)
    generator = torch.Generator().manual_seed(0)
    state = {
        name: tensor.detach().double().clone() if tensor.is_floating_point() else tensor.detach().clone()
        for name, tensor in model.state_dict().items()
    }
    g, h, k = (symmetry.random(generator) for _ in range(3))
    act = symmetry.apply
    same(act(symmetry.identity(), state), state, exactly=True)
    same(act(symmetry.compose(g, h), state), act(g, act(h, state)))
    same(act(symmetry.invert(g), act(g, state)), state)
    left = symmetry.compose(symmetry.compose(g, h), k)
    right = symmetry.compose(g, symmetry.compose(h, k))
    same(act(left, state), act(right, state))
    neutral = symmetry.compose(g, symmetry.invert(g))
    assert all(torch.equal(neutral.orders[n], o) for n, o in symmetry.identity().orders.items())


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], exactly: bool = False) -> None:
    for name in right:
        if exactly or not right[name].is_floating_point():
            assert torch.equal(left[name], right[name]), name
        else:
            torch.testing.assert_close(left[name], right[name], rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("case", CASES)
def test_a_batch_of_elements_acts_as_each_does(case: Case) -> None:
    model, _, symmetry = prepared(case)
    members = 3
    states = []
    for seed in range(members):
        noise = torch.Generator().manual_seed(seed)
        states.append(
            {
                name: tensor * (1 + 0.1 * torch.rand(tensor.shape, generator=noise))
                if tensor.is_floating_point()
                else tensor
                for name, tensor in model.state_dict().items()
            }
        )
    population = ob.Population.from_states(states)
    batch = symmetry.random(0, members=members)
    one = symmetry.random(1)
    moved, together = symmetry.apply(batch, population), symmetry.apply(one, population)
    for member in range(members):
        same(moved.member(member), symmetry.apply(batch.member(member), population.member(member)), exactly=True)
        same(together.member(member), symmetry.apply(one, population.member(member)), exactly=True)
    assert moved.spec == population.spec


@pytest.mark.parametrize("case", CASES)
def test_json_round_trip(case: Case) -> None:
    _, _, symmetry = prepared(case)
    again = Symmetry.from_json(symmetry.to_json())
    assert again == symmetry
    assert str(again) == str(symmetry)


@pytest.mark.parametrize("case", CASES)
def test_the_users_module_is_untouched(case: Case) -> None:
    if reason := missing(case):
        pytest.skip(reason)
    model, inputs = case.build(), case.inputs()
    for number, module in enumerate(model.modules()):  # a mode that no call of train() or eval() would make
        module.training = number % 2 == 0
    before = {name: snapshot(module) for name, module in model.named_modules()}
    weights = copy.deepcopy(model.state_dict())
    random = torch.get_rng_state()
    symmetry = ob.discover(model, inputs)
    ob.verify(model, symmetry, inputs)
    assert {name: snapshot(module) for name, module in model.named_modules()} == before
    assert torch.equal(torch.get_rng_state(), random)
    same(model.state_dict(), weights, exactly=True)


def snapshot(module: nn.Module) -> dict[str, object]:
    """All attributes by identity, containers (parameters, hooks, submodules) by their content."""
    return {
        name: tuple((key, id(item)) for key, item in value.items())
        if isinstance(value, dict)
        else (id(value), repr(value)[:80])
        for name, value in vars(module).items()
    }


def test_freedoms_are_named_in_order() -> None:
    for case in BATTERY[:5]:
        _, _, symmetry = prepared(case)
        for space in symmetry.spaces:
            assert [kind for kind in FREEDOMS if kind in space.freedoms] == list(space.freedoms)


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in GAPS])
def test_known_gaps_are_sound_and_still_gaps(case: Case) -> None:
    model, inputs, symmetry = prepared(case)
    assert ob.verify(model, symmetry, inputs).passed
    assert Counter(map(found, symmetry.spaces)) != Counter(map(wanted, case.spaces)), "closed: move it into the battery"
