"""The normal form: the same from everywhere on an orbit, for the whole group."""

import copy
import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import onebasin as ob
from onebasin.alignment.canonical import _eliminate, canonicalise
from onebasin.errors import InputError, SpecError
from onebasin.symmetry.space import Grid
from tests.alignment.test_balance import State, found, outputs

MODELS = [
    "mlp_relu", "mlp_tanh", "residual_mlp_prenorm", "bilinear_gate", "weight_norm_tanh", "repeated_linear_relu",
    "conv_flatten", "grouped", "densenet_bn", "resnet_bn", "resnet_group_4", "bn_mlp_tanh", "gru_learned_start",
    "lstm_projected", "attention_fused", "decoder_gqa",
]  # fmt: skip
FORMS = [(scale, order) for scale in ("unit-norm", "balanced") for order in ("max", "first", "norm", "mean")]


def same(one: State, other: State) -> None:
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize("name", MODELS)
def test_one_normal_form_for_an_orbit(name: str) -> None:
    """The acceptance test of paper-symmetry.md 13.1, for random elements of the whole group."""
    _, state, symmetry = found(name)
    for number, (scale, order) in enumerate(FORMS):
        form = canonicalise(state, symmetry, scale=scale, order=order)
        assert form.notes == () and form.ties == {}
        moved = symmetry.apply(symmetry.random(number), state)
        same(canonicalise(moved, symmetry, scale=scale, order=order).state, form.state)


@pytest.mark.parametrize("name", MODELS)
def test_the_function_is_kept_and_twice_is_once(name: str) -> None:
    _, state, symmetry = found(name)
    before = {key: tensor.clone() for key, tensor in state.items()}
    moved = symmetry.apply(symmetry.random(99), state)
    for scale, order in (("unit-norm", "max"), ("balanced", "first")):
        form = canonicalise(moved, symmetry, scale=scale, order=order)
        torch.testing.assert_close(outputs(name, form.state), outputs(name, state), rtol=1e-9, atol=1e-9)
        applied = symmetry.apply(form.element, moved)
        assert all(torch.equal(applied[key], form.state[key]) for key in state)
        again = canonicalise(form.state, symmetry, scale=scale, order=order)
        same(again.state, form.state)
        assert all(bool((o == torch.arange(o.shape[-1])).all()) for o in again.element.orders.values())
    assert all(torch.equal(state[key], before[key]) for key in state)


def paper(weights: list[Tensor], biases: list[Tensor], order: str) -> tuple[list[Tensor], list[Tensor]]:
    """Paper 2, written down for perceptrons: unit norms layer by layer, then sorted rows, columns before rows."""
    weights, biases = [w.clone() for w in weights], [b.clone() for b in biases]
    for layer in range(len(weights) - 1):
        factor = 1 / weights[layer].norm(dim=1)
        weights[layer] *= factor[:, None]
        biases[layer] *= factor
        weights[layer + 1] /= factor
    for layer in range(len(weights) - 1):
        rows = weights[layer]
        key = {"first": rows[:, 0], "max": rows.amax(1), "mean": rows.mean(1)}[order]
        turn = key.argsort(descending=True)
        weights[layer], biases[layer] = weights[layer][turn], biases[layer][turn]
        weights[layer + 1] = weights[layer + 1][:, turn]
    return weights, biases


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), order=st.sampled_from(["first", "max", "mean"]))
def test_perceptrons_come_out_as_in_the_paper(seed: int, order: str) -> None:
    _, state, symmetry = found("mlp_relu")
    generator = torch.Generator().manual_seed(seed)
    state = {key: torch.randn(tensor.shape, generator=generator).double() for key, tensor in state.items()}
    weights, biases = paper([state[f"{n}.weight"] for n in (0, 2, 4)], [state[f"{n}.bias"] for n in (0, 2, 4)], order)
    form = canonicalise(state, symmetry, scale="unit-norm", order=order).state
    for number, weight, bias in zip((0, 2, 4), weights, biases, strict=True):
        torch.testing.assert_close(form[f"{number}.weight"], weight, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(form[f"{number}.bias"], bias, rtol=1e-12, atol=1e-12)


def test_the_two_neuron_toy() -> None:
    """Section 2.4: 2-2-1 networks; scaled rows lie on the circle, sorted ones on one side of the diagonal."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    symmetry = ob.discover(model, torch.zeros(1, 2))
    generator = torch.Generator().manual_seed(0)
    population = ob.Population.from_stacked(
        {key: torch.randn(300, *value.shape, generator=generator) for key, value in model.state_dict().items()}
    )
    scaled = canonicalise(population, symmetry, scale="unit-norm", order="keep").population
    torch.testing.assert_close(scaled.tensor("0.weight").norm(dim=2), torch.ones(300, 2))
    below = scaled.tensor("0.weight")[:, 0, 0] < scaled.tensor("0.weight")[:, 1, 0]
    assert 100 < int(below.sum()) < 200  # before sorting both sides occur
    form = canonicalise(population, symmetry, scale="unit-norm", order="first").population
    assert bool((form.tensor("0.weight")[:, 0, 0] >= form.tensor("0.weight")[:, 1, 0]).all())
    x = torch.randn(7, 2, generator=generator)
    for member in (0, 17, 299):
        here, there = (torch.func.functional_call(model, p.member(member), (x,)) for p in (population, form))
        torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scale", ["unit-norm", "balanced"])
def test_gammas_of_batch_norms_come_out_positive(scale: str) -> None:
    """Also where they were negative; a gamma of zero leaves the sign to the weights before it."""
    _, state, symmetry = found("resnet_bn")
    state = copy.deepcopy(state)
    state["norm.weight"][:3] = -state["norm.weight"][:3].abs()
    state["blocks.0.norm1.weight"][1] = 0.0
    form = canonicalise(state, symmetry, scale=scale)
    assert all(bool((tensor >= 0).all()) for key, tensor in form.state.items() if "norm" in key and "weight" in key)
    torch.testing.assert_close(outputs("resnet_bn", form.state), outputs("resnet_bn", state), rtol=1e-9, atol=1e-9)
    moved = symmetry.apply(symmetry.random(4), state)
    same(canonicalise(moved, symmetry, scale=scale).state, form.state)


def test_dead_units_have_a_balanced_normal_form() -> None:
    _, state, symmetry = found("mlp_relu")
    state = copy.deepcopy(state)
    state["2.weight"][3], state["2.bias"][3] = 0.0, 0.0
    state["4.weight"][:, 5] = 0.0
    form = canonicalise(state, symmetry, scale="balanced")
    for seed in range(3):
        same(canonicalise(symmetry.apply(symmetry.random(seed), state), symmetry, scale="balanced").state, form.state)
    unit = canonicalise(state, symmetry, scale="unit-norm")
    assert unit.notes == ("2: 1 units have no weights to be normed by, and kept their scale",)


def test_equal_units_are_ties_and_do_no_harm() -> None:
    """Copies of one unit: their order cannot be told, nor does it matter."""
    _, state, symmetry = found("mlp_relu")
    state = copy.deepcopy(state)
    for key in ("0.weight", "0.bias"):
        state[key][3] = state[key][1]
    state["2.weight"][:, 3] = state["2.weight"][:, 1]
    form = canonicalise(state, symmetry)
    assert {name: counts.tolist() for name, counts in form.ties.items()} == {"0": [2]}
    same(canonicalise(symmetry.apply(symmetry.random(1), state), symmetry).state, form.state)


def test_equal_maxima_are_told_apart_by_the_rest() -> None:
    _, state, symmetry = found("mlp_relu")
    state = copy.deepcopy(state)
    state["0.weight"][1] = torch.tensor([0.6, 0.8, 0.0])
    state["0.weight"][3] = torch.tensor([0.0, 0.8, -0.6])
    form = canonicalise(state, symmetry)
    assert form.ties == {}
    for seed in range(4):
        same(canonicalise(symmetry.apply(symmetry.random(seed), state), symmetry).state, form.state)


def test_kept_freedoms_stay() -> None:
    _, state, symmetry = found("bn_mlp_tanh")
    form = canonicalise(state, symmetry, scale="keep", order="keep", signs=False)
    assert all(torch.equal(form.state[key], state[key]) for key in state)
    order = canonicalise(state, symmetry, scale="keep", signs=False)
    assert all(bool((factor == 1).all()) for factor in order.element.factors.values())
    rows = order.state["0.weight"].amax(1)
    assert bool((rows.diff() <= 0).all()) and sorted(rows.tolist()) == sorted(state["0.weight"].amax(1).tolist())


@pytest.mark.parametrize("name", ["resnet_bn", "decoder_gqa", "grouped"])
def test_a_population_is_treated_member_by_member(name: str, tmp_path) -> None:
    _, state, symmetry = found(name)
    generator = torch.Generator().manual_seed(3)
    members = [
        {
            k: t * (0.5 + torch.rand(t.shape, generator=generator)) if t.is_floating_point() else t
            for k, t in state.items()
        }
        for _ in range(4)
    ]
    population = ob.Population.from_states(members)
    form = canonicalise(population, symmetry)
    assert form.element.members == 4
    for member, alone in enumerate(members):
        same(form.population.member(member), canonicalise(alone, symmetry).state)
    on_disk = canonicalise(population, symmetry, path=tmp_path / "form").population
    assert all(torch.equal(on_disk.tensor(key), form.population.tensor(key)) for key in population.names)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_dtype_is_kept(dtype: torch.dtype) -> None:
    _, state, symmetry = found("mlp_tanh")
    low = {key: tensor.to(dtype) for key, tensor in state.items()}
    form = canonicalise(low, symmetry).state
    exact = canonicalise({key: tensor.double() for key, tensor in low.items()}, symmetry).state
    assert all(form[key].dtype == dtype and torch.equal(form[key].double(), exact[key]) for key in state)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.frozensets(st.integers(0, 4), min_size=1), unique=True, max_size=6))
def test_elimination_over_two_elements(rows: list[frozenset[int]]) -> None:
    """Every answer adds up to its generator, and no generator that some subset of rows shows alone is missed."""
    found_ = _eliminate(rows)
    for generator, combination in found_.items():
        assert functools.reduce(lambda a, b: a ^ b, combination) == {generator}
    subsets = range(1, 1 << len(rows))
    shown = {
        next(iter(total))
        for subset in subsets
        if len(total := functools.reduce(frozenset.__xor__, [r for n, r in enumerate(rows) if subset >> n & 1])) == 1
    }
    assert set(found_) == shown


def circle() -> ob.Symmetry:
    """Two scales that stand in every tensor together: y = b(a x), with a and b read again by a third tensor."""
    one, two = Grid(0, ((0, 3, 1),)), Grid(1, ((0, 4, 1),))
    left = [ob.Leg("a", one, (), (1,)), ob.Leg("b", one, (), (-1,)), ob.Leg("c", one, (), (-2,))]
    right = [ob.Leg("a", two, (), (1,)), ob.Leg("b", two, (), (-2,)), ob.Leg("c", two, (), (1,))]
    spaces = (ob.Space("u", 3, True, ("scale",), (), tuple(left)), ob.Space("v", 4, True, ("scale",), (), tuple(right)))
    return ob.Symmetry(spaces, {"a": (3, 4), "b": (3, 4), "c": (3, 4)})


def test_norms_that_wait_for_each_other_are_balanced() -> None:
    symmetry = circle()
    generator = torch.Generator().manual_seed(0)
    state = {key: torch.randn(3, 4, generator=generator).double() for key in "abc"}
    form = canonicalise(state, symmetry, scale="unit-norm")
    assert "depend on each other in a circle" in form.notes[0]
    same(form.state, canonicalise(state, symmetry, scale="balanced").state)
    same(form.state, canonicalise(symmetry.apply(symmetry.random(2), state), symmetry, scale="unit-norm").state)


def test_a_sign_that_no_weight_shows_alone_is_left_open() -> None:
    """Both ends of the only tensor may turn: the sign stays as it is, the order does not depend on it."""
    grids = [Grid(axis, ((0, 3, 1),)) for axis in (0, 1)]
    spaces = tuple(
        ob.Space(n, 3, True, ("sign",), (), (ob.Leg("w", g, (), (1,)),)) for n, g in zip("uv", grids, strict=True)
    )
    symmetry = ob.Symmetry(spaces, {"w": (3, 3)})
    state = {"w": torch.randn(3, 3, generator=torch.Generator().manual_seed(0)).double()}
    form = canonicalise(state, symmetry)
    assert form.notes == tuple(f"{n}: sign 0 was left open, no weight shows it alone" for n in "uv")
    moved = canonicalise(symmetry.apply(symmetry.random(1), state), symmetry)
    torch.testing.assert_close(moved.state["w"].abs(), form.state["w"].abs())


def test_what_is_refused() -> None:
    model, state, symmetry = found("mlp_relu")
    with pytest.raises(InputError, match=r"give model\.state_dict"):
        canonicalise(model, symmetry)
    with pytest.raises(InputError, match="scale must be one of balanced, unit-norm, keep"):
        canonicalise(state, symmetry, scale="unit")
    with pytest.raises(InputError, match="order must be one of max"):
        canonicalise(state, symmetry, order="median")
    with pytest.raises(InputError, match="path= is for populations"):
        canonicalise(state, symmetry, path="somewhere")
    with pytest.raises(SpecError, match="member 0 holds NaN"):
        canonicalise({**state, "0.bias": torch.full((5,), math.nan).double()}, symmetry)
    with pytest.raises(SpecError, match="member 0 holds NaN"):
        canonicalise({**state, "0.bias": torch.full((5,), math.nan).double()}, symmetry, scale="keep")
    with pytest.raises(SpecError, match=r"the symmetry was found for \(5, 3\)"):
        canonicalise({**state, "0.weight": torch.zeros(6, 3)}, symmetry)


def decayed(members: int, seed: int, ratio: float = 1e-12) -> ob.Population:
    """Networks 4-16-3 in which the incoming weights of some units have decayed, but not their biases."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"0.weight": (16, 4), "0.bias": (16,), "2.weight": (3, 16), "2.bias": (3,)}
    drawn = {name: torch.randn(members, *shape, generator=generator) for name, shape in shapes.items()}
    gone = torch.rand(members, 16, generator=generator) < 0.2
    drawn["0.weight"] *= torch.where(gone, ratio, 1.0)[..., None]
    return ob.Population.from_stacked(drawn)


@functools.cache
def perceptron() -> ob.Symmetry:
    return ob.discover(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)), torch.zeros(1, 4))


def test_a_form_that_blows_up_says_so() -> None:
    population, symmetry = decayed(30, 0), perceptron()
    paper = canonicalise(population, symmetry, scale="unit-norm")
    assert paper.population is not None
    stacked = {name: value.double() for name, value in paper.population.stacked().items()}
    flat = torch.cat([value.flatten(1) for value in stacked.values()], 1)
    torch.testing.assert_close(paper.largest, flat.abs().amax(1))
    torch.testing.assert_close(paper.effective, flat.square().sum(1).square() / flat.pow(4).sum(1))
    bad = int((paper.effective < 2).sum())
    assert 15 < bad <= 30
    assert float(paper.largest.max()) > 1e11
    [note] = paper.notes
    assert note.startswith(f"ill-conditioned: in {bad} of 30 networks") and 'scale="balanced"' in note
    light = canonicalise(population, symmetry)
    assert light.notes == () and float(light.largest.max()) < 10 and float(light.effective.min()) > 10
    for member in range(3):
        assert canonicalise(population.member(member), symmetry, scale="unit-norm").largest == paper.largest[member]


@pytest.mark.parametrize("scale", ["unit-norm", "balanced"])
def test_ordinary_networks_are_not_called_ill_conditioned(scale: str) -> None:
    for ratio in (1.0, 0.5):
        assert canonicalise(decayed(30, 1, ratio), perceptron(), scale=scale).notes == ()
