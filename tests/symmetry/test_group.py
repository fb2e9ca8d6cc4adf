"""Elements: what is refused, how companions of weights move, and symmetries written by hand."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import onebasin as ob
from onebasin.errors import SpecError, SymmetryError
from onebasin.symmetry.space import Grid


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))


@pytest.fixture(scope="module")
def model() -> nn.Sequential:
    return mlp().eval()


@pytest.fixture(scope="module")
def symmetry(model: nn.Sequential) -> ob.Symmetry:
    return ob.discover(model, torch.zeros(2, 3))


def test_number_of_equivalent_networks(symmetry: ob.Symmetry) -> None:
    assert symmetry.log10_order == pytest.approx(math.log10(math.factorial(5) * math.factorial(4) * 2**4 * 2**4))
    assert symmetry.dimensions == 5 + 4
    assert "737,280 equivalent networks" in str(symmetry) and "0.weight[1]: it is a model input" in str(symmetry)


def test_gradients_move_as_gradients(model: nn.Sequential, symmetry: ob.Symmetry) -> None:
    """The gradient of the moved network, by autograd, is the moved gradient."""
    state = {name: t.double() if t.is_floating_point() else t for name, t in model.state_dict().items()}
    element = symmetry.random(0)
    moved = symmetry.apply(element, state)
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)).double()

    def gradients(at: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        names = [name for name, _ in model.named_parameters()]
        leaves = {name: at[name].clone().requires_grad_() for name in names}
        loss = torch.func.functional_call(model, {**at, **leaves}, (x,)).square().sum()
        return {**at, **dict(zip(names, torch.autograd.grad(loss, list(leaves.values())), strict=True))}

    expected, found = symmetry.apply(element, gradients(state), kind="gradient"), gradients(moved)
    for name, _ in model.named_parameters():
        torch.testing.assert_close(found[name], expected[name], msg=name)


def test_companions(model: nn.Sequential, symmetry: ob.Symmetry) -> None:
    """The spread of moved draws is the moved spread; masks only change places."""
    generator = torch.Generator().manual_seed(0)
    draws = {
        n: torch.rand(7, *t.shape, generator=generator).double() + 0.5
        for n, t in model.state_dict().items()
        if t.is_floating_point()
    }
    element = symmetry.random(1)
    moved = symmetry.apply(element, ob.Population.from_stacked(draws)).stacked()
    std = symmetry.apply(element, {n: t.std(0) for n, t in draws.items()}, kind="std")
    var = symmetry.apply(element, {n: t.var(0) for n, t in draws.items()}, kind="variance")
    mask = symmetry.apply(element, {n: t[0] > 1 for n, t in draws.items()}, kind="mask")
    turned = symmetry.apply(ob.Element(element.orders, {}), {n: t[0] for n, t in draws.items()})
    for name in draws:
        torch.testing.assert_close(moved[name].std(0), std[name])
        torch.testing.assert_close(moved[name].var(0), var[name])
        assert torch.equal(mask[name], turned[name] > 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtype_is_kept_and_nothing_is_changed(model: nn.Sequential, symmetry: ob.Symmetry, dtype: torch.dtype) -> None:
    state = {n: t.to(dtype) if t.is_floating_point() else t for n, t in model.state_dict().items()}
    before = {name: tensor.clone() for name, tensor in state.items()}
    moved = symmetry.apply(symmetry.random(0), state)
    assert all(moved[name].dtype == state[name].dtype for name in state)
    assert all(torch.equal(state[name], before[name]) for name in state)


def test_strided_tensors_move_as_their_values(symmetry: ob.Symmetry, model: nn.Sequential) -> None:
    state = dict(model.state_dict())
    strided = {n: t.mT.contiguous().mT if t.dim() == 2 else t for n, t in state.items()}
    one, other = symmetry.apply(symmetry.random(0), state), symmetry.apply(symmetry.random(0), strided)
    assert all(torch.equal(one[name], other[name]) for name in state)


def test_a_population_streams_to_disk(symmetry: ob.Symmetry, model: nn.Sequential, tmp_path) -> None:
    population = ob.Population.from_models([mlp() for _ in range(4)])
    population.save(tmp_path / "population")
    batch = symmetry.random(0, members=4)
    moved = symmetry.apply(batch, ob.Population.open(tmp_path / "population"))
    for member in range(4):
        expected = symmetry.apply(batch.member(member), population.member(member))
        assert all(torch.equal(moved.member(member)[name], expected[name]) for name in population.names)


def broken(symmetry: ob.Symmetry, name: str, **change: torch.Tensor) -> ob.Element:
    element = symmetry.identity()
    orders, factors = dict(element.orders), dict(element.factors)
    if "order" in change:
        orders[name] = change["order"]
    if "factor" in change:
        factors[name] = change["factor"]
    return ob.Element(orders, factors)


def test_malformed_elements_are_refused(symmetry: ob.Symmetry, model: nn.Sequential) -> None:
    state = model.state_dict()
    ones = torch.ones(1, 5, dtype=torch.float64)
    cases = [
        (broken(symmetry, "0", order=torch.zeros(5, dtype=torch.long)), "no permutation"),
        (broken(symmetry, "0", order=torch.arange(4)), "shape"),
        (broken(symmetry, "0", order=torch.arange(5.0)), "integers"),
        (broken(symmetry, "0", factor=-ones), "positive and finite"),
        (broken(symmetry, "0", factor=ones * math.nan), "positive and finite"),
        (broken(symmetry, "0", factor=ones[:, :3]), "shape"),
        (broken(symmetry, "nobody", order=torch.arange(5)), "lacks"),
        (symmetry.random(0, members=3), "batch of 3"),
    ]
    for element, words in cases:
        with pytest.raises(SymmetryError, match=words):
            symmetry.apply(element, state)
    with pytest.raises(SymmetryError, match="one per member"):
        symmetry.apply(symmetry.random(0, members=3), ob.Population.from_models([mlp(), mlp()]))
    with pytest.raises(SymmetryError, match="cannot be composed"):
        symmetry.compose(symmetry.random(0, members=3), symmetry.random(0, members=2))


def test_misuse_is_explained(symmetry: ob.Symmetry, model: nn.Sequential) -> None:
    with pytest.raises(SymmetryError, match="seed"):
        symmetry.random(None)
    with pytest.raises(SymmetryError, match="there are: 0, 2"):
        symmetry.random(0, spaces=["one"])
    with pytest.raises(SymmetryError, match="expected freedoms among"):
        symmetry.random(0, freedoms=["rotation"])
    with pytest.raises(SymmetryError, match="at least one"):
        symmetry.random(0, members=0)
    with pytest.raises(SymmetryError, match="state_dict"):
        symmetry.apply(symmetry.identity(), model)
    with pytest.raises(SymmetryError, match="kind must be"):
        symmetry.apply(symmetry.identity(), model.state_dict(), kind="mean")
    with pytest.raises(SpecError, match="is missing"):
        symmetry.apply(symmetry.random(0), {})
    with pytest.raises(SpecError, match="should have shape"):
        symmetry.apply(symmetry.random(0), nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 4)).state_dict())
    with pytest.raises(SymmetryError, match="to_json"):
        ob.Symmetry.from_json(json.dumps({"format": "something else"}))
    with pytest.raises(SymmetryError, match="to_json"):
        ob.Symmetry.from_json("[1, 2")


def test_a_variance_is_not_shrunk_below_zero(symmetry: ob.Symmetry, model: nn.Sequential) -> None:
    element = symmetry.identity()
    kinds = symmetry["2"].generators
    factors = {name: factor.clone() for name, factor in element.factors.items()}
    factors["2"][kinds.index("norm-scale")] = 0.01
    with pytest.raises(SymmetryError, match="below zero"):
        symmetry.apply(ob.Element({}, factors), {**model.state_dict(), "3.running_var": torch.full((4,), 1e-6)})


def test_a_symmetry_written_by_hand(model: nn.Sequential) -> None:
    """The relu layer alone, as somebody would write it down."""
    units = ((0, 5, 1),)
    legs = (
        ob.Leg("0.weight", Grid(0, units), powers=(1,)),
        ob.Leg("0.bias", Grid(0, units), powers=(1,)),
        ob.Leg("2.weight", Grid(1, units), powers=(-1,)),
    )
    space = ob.Space("hidden", 5, True, ("scale",), (), legs)
    assert ob.verify(model, ob.Symmetry((space,)), torch.zeros(2, 3)).passed
    wrong = ob.Symmetry((ob.Space("hidden", 5, True, ("scale",), (), legs[:2]),))
    proof = ob.verify(model, wrong, torch.zeros(2, 3))
    assert not proof.passed and "THE FUNCTION CHANGES" in str(proof)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), members=st.integers(1, 4))
def test_draws_are_reproducible_and_uniform_in_kind(symmetry: ob.Symmetry, seed: int, members: int) -> None:
    one, other = symmetry.random(seed, members=members), symmetry.random(seed, members=members)
    assert all(torch.equal(one.orders[name], other.orders[name]) for name in one.orders)
    assert all(torch.equal(one.factors[name], other.factors[name]) for name in one.factors)
    still = symmetry.random(seed, members=members, freedoms=["sign"])
    assert all(torch.equal(order, symmetry.identity(members).orders[name]) for name, order in still.orders.items())
