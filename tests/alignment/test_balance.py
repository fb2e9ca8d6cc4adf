"""Balancing against a second-order convex solver that knows the group only by its action."""

import copy
import functools
import itertools
import math
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from scipy import optimize
from torch import Tensor, nn

import onebasin as ob
from onebasin.alignment.balance import (
    Balancer,
    Descent,
    MassLayout,
    balance,
    balancing_scales,
    common_steps,
    lifts_of,
    without_lifted_biases,
)
from onebasin.alignment.layout import BlockLayout
from onebasin.errors import InputError, SpecError
from tests.models import BATTERY

CASES = {case.name: case for case in BATTERY}
MODELS = [
    "mlp_relu", "mlp_square", "mlp_tanh", "residual_mlp", "residual_mlp_prenorm", "bilinear_gate", "weight_norm_relu",
    "repeated_linear_relu", "conv_flatten", "depthwise_multiplier", "grouped", "densenet_bn", "resnet_bn", "rnn_relu",
    "attention_fused",
]  # fmt: skip
State = dict[str, Tensor]
exact = functools.partial(balance, tolerance=1e-12)


@functools.cache
def found(name: str) -> tuple[nn.Module, State, ob.Symmetry]:
    model = CASES[name].build()
    symmetry = ob.discover(model, CASES[name].inputs())
    model = model.double()
    return model, model.state_dict(), symmetry


def outputs(name: str, state: State) -> Tensor:
    model, _, _ = found(name)
    inputs = CASES[name].inputs()
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    inputs = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    made = torch.func.functional_call(model, state, inputs)
    return torch.cat([x.reshape(-1) for x in (made if isinstance(made, tuple | list) else (made,))])


def weights(state: State) -> list[str]:
    return [name for name in state if "running" not in name and state[name].is_floating_point()]


def flat(state: State) -> np.ndarray:
    return torch.cat([state[name].reshape(-1) for name in weights(state)]).numpy()


@dataclass
class Oracle:
    """mass(s) = sum of w^2 exp(2 E s); E is read off the action of one generator at a time."""

    exponents: np.ndarray
    columns: list[tuple[str, int, int]]  # space, generator, coordinate
    squares: np.ndarray
    lifts: np.ndarray

    @classmethod
    def of(cls, state: State, symmetry: ob.Symmetry, biases: bool = True) -> "Oracle":
        ones = {name: torch.ones_like(tensor) for name, tensor in state.items()}
        columns, logs = [], []
        for space in symmetry.spaces:
            for generator, kind in enumerate(space.generators):
                for unit in range(space.copies * space.size):
                    if kind.endswith("scale"):
                        element = symmetry.identity()
                        element.factors[space.name][generator].view(-1)[unit] = math.e
                        logs.append(np.log(flat(symmetry.apply(element, ones))))
                        columns.append((space.name, generator, unit))
        exponents = np.rint(np.stack(logs, 1)) if logs else np.zeros((flat(state).size, 0))
        squares = flat(state) ** 2
        names = np.repeat(
            [name.rsplit(".", 1)[-1] for name in weights(state)], [state[n].numel() for n in weights(state)]
        )
        bias = np.array(["bias" in name or name == "beta" for name in names])
        counted = squares if biases else np.where(bias, 0, squares)
        seen = exponents if biases else exponents * ~bias[:, None]
        lifts = np.zeros(len(columns))
        for space, generator in {column[:2] for column in columns}:
            chosen = [column[:2] == (space, generator) for column in columns]
            signs = set(np.sign(seen[:, chosen]).reshape(-1)) - {0.0}
            lifts[chosen] = signs.pop() if len(signs) == 1 else 0.0
        held = bias & (exponents != 0).any(1) & ~(exponents[:, lifts == 0] != 0).any(1)
        return cls(exponents, columns, np.where(held, 0, counted), lifts)

    def value(self, s: np.ndarray) -> float:
        return float(self.squares @ np.exp(2 * self.exponents @ s) - 2 * self.lifts @ s)

    def slope(self, s: np.ndarray) -> np.ndarray:
        return 2 * (self.exponents.T @ (self.squares * np.exp(2 * self.exponents @ s)) - self.lifts)

    def bend(self, s: np.ndarray) -> np.ndarray:
        terms = self.squares * np.exp(2 * self.exponents @ s)
        return 4 * self.exponents.T @ (terms[:, None] * self.exponents)

    def solve(self, free: np.ndarray | None = None) -> np.ndarray:
        """Minimise over the free coordinates, the others staying at 0."""
        free = np.ones(len(self.columns), dtype=bool) if free is None else free
        spread = np.eye(len(self.columns))[:, free]
        start = np.zeros(int(free.sum()))
        result = optimize.minimize(
            lambda s: self.value(spread @ s),
            start,
            jac=lambda s: spread.T @ self.slope(spread @ s),
            hess=lambda s: spread.T @ self.bend(spread @ s) @ spread,
            method="trust-exact",
            options={"gtol": 1e-12, "maxiter": 500},
        )
        s = result.x
        for _ in range(3):  # the trust region stops at rounding of the value; Newton goes on with the slope
            s = s - np.linalg.solve(spread.T @ self.bend(spread @ s) @ spread, spread.T @ self.slope(spread @ s))
        return spread @ s

    def logs(self, element: ob.Element) -> np.ndarray:
        return np.array(
            [math.log(element.factors[space][generator].reshape(-1)[unit]) for space, generator, unit in self.columns]
        )


@pytest.mark.parametrize("name", MODELS)
def test_the_optimum_is_that_of_a_convex_solver(name: str) -> None:
    _, state, symmetry = found(name)
    oracle = Oracle.of(state, symmetry)
    result = exact(state, symmetry)
    ours = oracle.logs(result.element)
    if oracle.columns:
        theirs = oracle.solve()
        assert oracle.value(ours) == pytest.approx(oracle.value(theirs), rel=1e-10)
        np.testing.assert_allclose(ours, theirs, atol=1e-8)
        moved = 2 * np.abs(oracle.exponents).T @ (oracle.squares * np.exp(2 * oracle.exponents @ ours))
        assert (np.abs(oracle.slope(ours)) <= 1e-9 * moved).all()  # in = out for every unit
    total = sum(float(result.state[n].square().sum()) for n in weights(state))
    assert float(result.mass_after) == pytest.approx(total, rel=1e-12)
    assert float(result.mass_before) == pytest.approx(float((flat(state) ** 2).sum()), rel=1e-12)
    assert float(result.imbalance.max()) <= 1e-12 and result.dead == ()


def test_the_default_tolerance_is_enough_for_the_mass() -> None:
    """The mass is flat at its minimum: what is left of the imbalance counts by its square."""
    for name in ("mlp_relu", "residual_mlp", "rnn_relu"):
        _, state, symmetry = found(name)
        result = balance(state, symmetry)
        assert float(result.imbalance) <= 1e-9
        assert float(result.mass_after) == pytest.approx(float(exact(state, symmetry).mass_after), rel=1e-14)


@pytest.mark.parametrize("name", MODELS)
def test_the_function_is_kept_and_the_result_is_a_normal_form(name: str) -> None:
    """Same function; balancing again does nothing; wherever on the orbit we start, we arrive at the same network."""
    _, state, symmetry = found(name)
    before = {key: tensor.clone() for key, tensor in state.items()}
    result = exact(state, symmetry)
    assert all(torch.equal(state[key], before[key]) for key in state)
    torch.testing.assert_close(outputs(name, result.state), outputs(name, state), rtol=1e-9, atol=1e-9)
    applied = symmetry.apply(result.element, state)
    assert all(torch.equal(applied[key], result.state[key]) for key in state)
    again = exact(result.state, symmetry)
    for factor in again.element.factors.values():
        torch.testing.assert_close(factor, torch.ones_like(factor), rtol=0, atol=1e-10)
    elsewhere = symmetry.apply(symmetry.random(3, freedoms=("scale", "norm-scale")), state)
    other = exact(elsewhere, symmetry)
    for key in state:
        torch.testing.assert_close(other.state[key], result.state[key], rtol=1e-9, atol=1e-9, msg=key)


@pytest.mark.parametrize("name", ["residual_mlp", "rnn_relu", "resnet_bn", "bilinear_gate"])
def test_every_step_goes_down(name: str) -> None:
    """Sweeps and common steps never raise what they minimise, also where a space meets itself."""
    _, state, symmetry = found(name)
    oracle = Oracle.of(state, symmetry)
    layout = MassLayout.of(BlockLayout.of(symmetry, statistics=True))
    stacked = {key: tensor[None] for key, tensor in state.items()}
    held = lifts_of(layout, layout.reduce(stacked), stacked)
    mass = without_lifted_biases(layout.reduce(stacked), held)
    frozen = [torch.zeros(1, gauge.size, dtype=torch.bool) for gauge in mass.gauges]
    descent = Descent(mass, held, frozen)
    values = [oracle.value(np.zeros(len(oracle.columns)))]
    for step in range(12):
        descent.sweep() if step % 2 == 0 else common_steps(mass, held, frozen, descent.point)
        values.append(oracle.value(torch.cat(descent.point.logs, 1)[0].numpy()))
    assert values[0] > values[1]
    assert all(after <= before + 1e-13 * abs(before) for before, after in itertools.pairwise(values))


def test_one_unit_in_closed_form() -> None:
    """in e^{2s} + out e^{-2s} has its minimum 2 sqrt(in out)."""
    _, state, symmetry = found("mlp_width_one")
    into = float(state["0.weight"].square().sum() + state["0.bias"].square().sum())
    out, rest = float(state["2.weight"].square().sum()), float(state["2.bias"].square().sum())
    result = exact(state, symmetry)
    assert float(result.mass_after) == pytest.approx(2 * math.sqrt(into * out) + rest, rel=1e-14)
    assert float(result.element.factors["0"]) == pytest.approx((out / into) ** 0.25, rel=1e-14)
    assert float(result.excess) == pytest.approx(100 * ((into + out + rest) / (2 * math.sqrt(into * out) + rest) - 1))


@pytest.mark.parametrize("name", ["mlp_relu", "residual_mlp", "conv_flatten", "resnet_bn", "densenet_bn"])
def test_without_biases(name: str) -> None:
    _, state, symmetry = found(name)
    oracle = Oracle.of(state, symmetry, biases=False)
    result = exact(state, symmetry, biases=False)
    np.testing.assert_allclose(oracle.logs(result.element), oracle.solve(), atol=1e-8)
    counted = [key for key in weights(state) if "bias" not in key]
    assert float(result.mass_after) == pytest.approx(sum(float(result.state[k].square().sum()) for k in counted))


def test_norms_may_be_kept() -> None:
    """Then the mass before and after compare like with like, and the ordinary scales are at their best."""
    _, state, symmetry = found("resnet_bn")
    oracle = Oracle.of(state, symmetry)
    result = exact(state, symmetry, norms="keep")
    free = oracle.lifts == 0
    np.testing.assert_allclose(oracle.logs(result.element), oracle.solve(free), atol=1e-8)
    assert float(result.excess) > 0 and all("left as they were" in line for line in result.fixed)


def rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(len(tensor), -1).norm(dim=1)


def test_weights_before_a_batch_norm_get_norm_one_unless_the_variance_is_too_small() -> None:
    _, state, symmetry = found("resnet_bn")
    state = copy.deepcopy(state)
    state["blocks.0.conv1.weight"][2] = 0.0  # no weights: v + eps = 1
    state["norm.running_var"][1] = 1e-4  # shrinking to norm one would push it below zero
    state["conv.weight"][1] *= 100
    result = exact(state, symmetry)
    inner = rows(result.state["blocks.0.conv1.weight"])
    assert inner[[0, 1, 3, 4, 5, 6]] == pytest.approx(1.0, abs=1e-10) and float(inner[2]) == 0.0
    assert float(result.state["blocks.0.norm1.running_var"][2]) == pytest.approx(1 - 1e-5, rel=1e-10)
    stem = rows(result.state["conv.weight"])
    assert stem[[0, 2, 3, 4]] == pytest.approx(1.0, abs=1e-10) and float(stem[1]) > 1
    assert float(result.state["norm.running_var"][1]) == pytest.approx(1e-5, rel=1e-9)
    torch.testing.assert_close(outputs("resnet_bn", result.state), outputs("resnet_bn", state), rtol=1e-9, atol=1e-9)
    assert any("without weights, v + eps = 1" in line for line in result.fixed)
    assert any("at the smallest variance" in line for line in result.fixed)
    elsewhere = symmetry.apply(symmetry.random(5, freedoms=("scale", "norm-scale")), state)
    for key, tensor in exact(elsewhere, symmetry).state.items():
        torch.testing.assert_close(tensor, result.state[key], rtol=1e-9, atol=1e-9, msg=key)


def test_dead_units_are_left_alone_and_named() -> None:
    _, state, symmetry = found("mlp_relu")
    state = copy.deepcopy(state)
    state["2.weight"][:, 1] = 0.0  # nothing reads unit 1 of the first layer
    state["2.weight"][3], state["2.bias"][3] = 0.0, 0.0  # nothing writes unit 3 of the second
    state["4.weight"][:, 5] = 0.0  # nothing reads unit 5 of the second
    state["2.weight"][:, 2] = 0.0
    state["2.weight"][5, 2] = 1.0  # unit 2 of the first layer writes to that dead unit only: still balanced
    result = exact(state, symmetry)
    assert {(unit.space, unit.unit) for unit in result.dead} == {("0", (1,)), ("2", (3,)), ("2", (5,))}
    reasons = {(unit.space, unit.unit[0]): unit.reason for unit in result.dead}
    assert reasons["0", 1] == "all its weights in 2.weight are zero"
    assert reasons["2", 3] == "all its weights in 2.weight, 2.bias are zero"
    assert [float(result.element.factors["2"][0, unit]) for unit in (3, 5)] == [1.0, 1.0]
    oracle = Oracle.of(state, symmetry)
    free = np.array([(column[0], column[2]) not in {("0", 1), ("2", 3), ("2", 5)} for column in oracle.columns])
    np.testing.assert_allclose(oracle.logs(result.element), oracle.solve(free), atol=1e-8)
    assert "dead: member 0, 0, unit 1" in str(result)


def test_a_ring_that_nobody_feeds_is_dead_too() -> None:
    """Two recurrent units that write only to each other and to the output: their mass falls for ever."""
    _, state, symmetry = found("rnn_relu")
    state = copy.deepcopy(state)
    for key in ("rnn.weight_ih_l0", "rnn.bias_ih_l0", "rnn.bias_hh_l0"):
        state[key][:2] = 0.0
    state["rnn.weight_hh_l0"][:2, 2:] = 0.0
    result = exact(state, symmetry)
    assert {unit.unit for unit in result.dead} == {(0,), (1,)}
    assert all("join it to the rest" in unit.reason for unit in result.dead)
    assert float(result.imbalance.max()) <= 1e-12 and int(result.sweeps.max()) < 200
    torch.testing.assert_close(outputs("rnn_relu", result.state), outputs("rnn_relu", state))


@pytest.mark.parametrize("seed", range(6))
def test_pruned_networks(seed: int) -> None:
    """With most weights gone, what is still alive has the optimum of the solver, and nothing is divided by zero."""
    _, state, symmetry = found("residual_mlp")
    generator = torch.Generator().manual_seed(seed)
    pruned = {
        key: tensor * (torch.rand(tensor.shape, generator=generator) < 0.25).double() for key, tensor in state.items()
    }
    result = exact(pruned, symmetry)
    oracle = Oracle.of(pruned, symmetry)
    dead = {(unit.space, unit.unit[0]) for unit in result.dead}
    free = np.array([(space, unit) not in dead for space, _, unit in oracle.columns])
    assert 0 < len(dead) < len(free)
    np.testing.assert_allclose(oracle.logs(result.element), oracle.solve(free), atol=1e-7)


def test_a_network_of_zeros() -> None:
    _, state, symmetry = found("residual_mlp")
    zeros = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    result = exact(zeros, symmetry)
    assert len(result.dead) == 7 + 5 + 11
    assert all(bool((factor == 1).all()) for factor in result.element.factors.values())


def networks(name: str, count: int, dtype: torch.dtype = torch.float64) -> ob.Population:
    _, state, _ = found(name)
    generator = torch.Generator().manual_seed(7)
    return ob.Population.from_states(
        [
            {
                key: (tensor * (0.5 + torch.rand(tensor.shape, generator=generator))).to(dtype)
                if tensor.is_floating_point()
                else tensor
                for key, tensor in state.items()
            }
            for _ in range(count)
        ]
    )


@pytest.mark.parametrize("name", ["residual_mlp", "resnet_bn", "grouped"])
def test_a_population_is_balanced_member_by_member(name: str, tmp_path, monkeypatch) -> None:
    _, _, symmetry = found(name)
    population = networks(name, 5)
    monkeypatch.setattr(sys.modules[balance.__module__], "_LARGE_BLOCK", 2 * population.nbytes // 5)  # blocks of two
    seen: list[tuple[int, int, str]] = []
    result = exact(population, symmetry, progress=lambda *news: seen.append(news))
    assert seen == [(2, 5, "balancing"), (4, 5, "balancing"), (5, 5, "balancing")] and result.element.members == 5
    for member in range(5):
        alone = exact(population.member(member), symmetry)
        assert float(result.mass_after[member]) == pytest.approx(float(alone.mass_after), rel=1e-13)
        for key, tensor in alone.state.items():
            torch.testing.assert_close(result.population.member(member)[key], tensor, rtol=1e-10, atol=1e-10)
    on_disk = exact(population, symmetry, path=tmp_path / "balanced")
    assert all(torch.equal(on_disk.population.tensor(key), result.population.tensor(key)) for key in population.names)
    applied = symmetry.apply(result.element, population)
    assert all(torch.equal(applied.tensor(key), result.population.tensor(key)) for key in population.names)
    batch = balancing_scales(BlockLayout.of(symmetry, statistics=True), population.stacked())
    for key, factor in result.element.factors.items():
        torch.testing.assert_close(batch.factors[key], factor)
    assert str(result).startswith("5 networks balanced in at most") and "excess in %" in result.profile()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtype_is_kept(dtype: torch.dtype) -> None:
    _, _, symmetry = found("residual_mlp")
    population = networks("residual_mlp", 2, dtype)
    result = exact(population, symmetry)
    assert all(result.population.tensor(key).dtype == dtype for key in population.names)
    wide = exact(population.to(dtype=torch.float64), symmetry)
    torch.testing.assert_close(result.mass_after, wide.mass_after, rtol=1e-12, atol=0)
    for key, factor in wide.element.factors.items():
        torch.testing.assert_close(result.element.factors[key], factor, rtol=1e-9, atol=0)


def test_dead_units_get_a_normal_form_where_asked() -> None:
    """Whatever scale a dead unit came with, `dead="unit"` leads to the same network."""
    _, state, symmetry = found("residual_mlp")
    state = copy.deepcopy(state)
    state["down.0.weight"][:, 1] = 0.0
    layout = MassLayout.of(BlockLayout.of(symmetry, statistics=True))
    balancer = Balancer(layout, biases=True, norms="unit", tolerance=1e-9, sweeps=1000, dead="unit")
    made = []
    for seed in (1, 2):
        start = symmetry.apply(symmetry.random(seed, freedoms=("scale",)), state)
        solved = balancer.solve({key: tensor[None] for key, tensor in start.items()}, 0)
        element = balancer.element(solved).member(0)
        made.append(symmetry.apply(element, start))
    for key in state:
        torch.testing.assert_close(made[0][key], made[1][key], rtol=1e-9, atol=1e-9)
    mass = made[0]["up.0.weight"][1].square().sum() + made[0]["up.0.bias"][1] ** 2
    assert float(mass) == pytest.approx(1.0, rel=1e-10)


def test_what_is_refused() -> None:
    model, state, symmetry = found("residual_mlp")
    with pytest.raises(InputError, match=r"give model\.state_dict"):
        exact(model, symmetry)
    with pytest.raises(InputError, match='"unit" or "keep"'):
        exact(state, symmetry, norms="none")
    with pytest.raises(InputError, match="sweeps >= 1"):
        exact(state, symmetry, sweeps=0)
    with pytest.raises(InputError, match="path= is for populations"):
        exact(state, symmetry, path="somewhere")
    stacked = networks("residual_mlp", 5).stacked()
    stacked["up.1.weight"][3, 0, 0] = math.nan
    with pytest.raises(SpecError, match=r"member 3 holds NaN or infinity in up\.1\.weight"):
        exact(ob.Population.from_stacked(stacked), symmetry)
    with pytest.raises(SpecError, match=r"has no tensor stem\.weight"):
        exact({key: tensor for key, tensor in state.items() if key != "stem.weight"}, symmetry)
