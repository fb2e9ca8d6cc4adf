"""The battery is true: every freedom it claims holds, and those it does not claim fail, by brute force in float64."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.models import BATTERY, GAPS, Case, missing
from tests.models.oracle import (
    TOLERANCE,
    Probe,
    call,
    diagonal_freedoms,
    double,
    leaves,
    permutation_error,
    scale_counts,
    sign_counts,
    state_of,
)
from tests.models.pretrained import cifar10_small, data_dir, normalised, resnet20

TRUTH = (*BATTERY, *GAPS)  # what discovery still misses is checked here all the same
CASES = {case.name: case for case in TRUTH}
SMALL = 20_000  # entries; of larger models only the permutations are checked here
FLIPS = 10  # legs of one unit: all 2^10 sign patterns are tried
ENTRIES = 500


def table(chosen: Callable[[Case], bool] = lambda case: True) -> list[object]:
    """The cases as pytest parameters; those that cannot be built here are skipped."""
    return [
        pytest.param(case, id=case.name, marks=[pytest.mark.skipif(bool(missing(case)), reason=missing(case))])
        for case in TRUTH
        if chosen(case)
    ]


def entries(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("case", table())
def test_builds_the_same_generic_network_every_time(case: Case) -> None:
    before = torch.random.get_rng_state()
    one, two = case.build(), case.build()
    assert torch.equal(before, torch.random.get_rng_state())
    assert not any(module.training for module in one.modules())
    assert all(t.dtype == torch.float32 for t in one.parameters())
    for (name, a), (other, b) in zip(one.state_dict().items(), two.state_dict().items(), strict=True):
        assert name == other and torch.equal(a, b)
    outputs = [call(model, state_of(model), case.inputs()) for model in (one, two)]
    assert torch.equal(*outputs) and outputs[0].isfinite().all() and outputs[0].std() > 1e-3


@pytest.mark.parametrize("case", table())
def test_permutations_hold_exactly_where_claimed(case: Case) -> None:
    probe = Probe(case, batches=1, states=2)
    for space in case.spaces:
        assert space.legs, "a space without legs cannot be checked"
        if space.size > 1:
            assert (permutation_error(probe, space) < TOLERANCE) == space.permutation, space


@pytest.mark.parametrize("case", table(lambda case: not case.steps))
def test_scales_are_all_there_are(case: Case) -> None:
    model = case.build()
    if entries(model) > SMALL:
        pytest.skip("too large to differentiate here")
    probe = Probe(case, batches=1, states=8)
    for space in case.spaces:
        expected = (space.scales + space.covered[0], space.norm_scales + space.covered[2])
        assert scale_counts(probe, space) == expected, space


@pytest.mark.parametrize("case", table())
def test_signs_are_all_there_are(case: Case) -> None:
    model = case.build()
    if entries(model) > SMALL:
        pytest.skip("too large to flip here")
    probe = Probe(case, batches=1, states=8)
    for space in case.spaces:
        if len(space.legs.split()) <= FLIPS:
            expected = (space.signs + space.covered[1], space.norm_signs + space.covered[3])
            assert sign_counts(probe, space) == expected, space


@pytest.mark.parametrize("case", table(lambda case: not case.steps))
def test_no_scale_outside_the_spaces(case: Case) -> None:
    """Among ALL entrywise rescalings of the parameters only the claimed ones keep the function."""
    if entries(case.build()) > ENTRIES:
        pytest.skip("too many entries for a dense null space")
    claimed = sum(space.size * space.copies * space.scales for space in case.spaces)
    assert diagonal_freedoms(case) == claimed + case.extra


def test_optunet_has_28800_permutations() -> None:
    orders = [math.factorial(space.size) ** space.copies for space in CASES["optunet"].spaces]
    assert math.prod(orders) == 28_800
    assert entries(CASES["optunet"].build()) == 392


# Actions written out by hand, without legs: an oracle for the oracle.


@functools.cache
def prepared(name: str) -> tuple[nn.Module, Any]:
    """Model and inputs of a case in float64."""
    return CASES[name].build().double(), double(CASES[name].inputs())


def kept(name: str, change: Callable[[dict[str, Tensor]], None]) -> bool:
    """Whether a change of the state keeps the function of a case."""
    model, inputs = prepared(name)
    state = state_of(model)
    before = call(model, state, inputs)
    change(state)
    return bool((call(model, state, inputs) - before).abs().max() < TOLERANCE * before.abs().max())


def test_perceptron_all_permutations_and_scales() -> None:
    for order in itertools.permutations(range(2)):
        for scale in (0.5, 3.0, -1.0):

            def change(s: dict[str, Tensor], order: tuple[int, ...] = order, scale: float = scale) -> None:
                s["0.weight"], s["2.weight"] = scale * s["0.weight"][list(order)], s["2.weight"][:, list(order)] / scale

            assert kept("perceptron_2_2_1", change) == (scale > 0)


def test_tanh_all_sign_flips() -> None:
    for flips in itertools.product((1.0, -1.0), repeat=5):

        def change(s: dict[str, Tensor], sign: tuple[float, ...] = flips) -> None:
            flip = torch.tensor(sign, dtype=torch.float64)
            s["0.weight"], s["0.bias"] = s["0.weight"] * flip[:, None], s["0.bias"] * flip
            s["2.weight"] = s["2.weight"] * flip

        assert kept("mlp_tanh", change)
        assert kept("mlp_relu", change) == (min(flips) > 0)


@pytest.mark.parametrize(("name", "gates", "candidate"), [("lstm", 4, 2), ("gru_learned_start", 3, 2)])
def test_recurrent_sign_belongs_to_the_candidate(name: str, gates: int, candidate: int) -> None:
    prefix, suffix = ("rnn.", "_l0") if name == "lstm" else ("cell.", "")
    for block in range(gates):

        def change(s: dict[str, Tensor], block: int = block) -> None:
            for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
                s[f"{prefix}{kind}{suffix}"][block * 5 + 1] *= -1
            s[f"{prefix}weight_hh{suffix}"][:, 1] *= -1
            s["head.weight"][:, 1] *= -1
            if "first" in s:
                s["first"][1] *= -1

        assert kept(name, change) == (block == candidate)


def test_rotary_pairs_scale_together_and_stay_in_place() -> None:
    def scaled(dimensions: tuple[int, ...], s: dict[str, Tensor]) -> None:
        for d in dimensions:
            s["k.weight"].view(2, 10, 7)[1, d] *= -2.5
            s["q.weight"].view(2, 3, 10, 7)[1, :, d] /= -2.5

    def swapped(s: dict[str, Tensor]) -> None:
        order = [1, 0, 2, 3, 4, 6, 5, 7, 8, 9]
        s["k.weight"] = s["k.weight"].view(2, 10, 7)[:, order].reshape(20, 7)
        s["q.weight"] = s["q.weight"].view(6, 10, 7)[:, order].reshape(60, 7)

    assert kept("decoder_rope_gqa", lambda s: scaled((2, 7), s))
    assert not kept("decoder_rope_gqa", lambda s: scaled((2,), s))
    assert not kept("decoder_rope_gqa", swapped)
    assert kept("decoder_gqa", lambda s: scaled((2,), s)) and kept("decoder_gqa", swapped)


def test_query_heads_permute_inside_their_group_only() -> None:
    for order in itertools.permutations(range(6)):

        def change(s: dict[str, Tensor], order: tuple[int, ...] = order) -> None:
            s["q.weight"] = s["q.weight"].view(6, 10, 7)[list(order)].reshape(60, 7)
            s["out.weight"] = s["out.weight"].view(7, 6, 10)[:, list(order)].reshape(7, 60)

        assert kept("decoder_rope_gqa", change) == (set(order[:3]) == {0, 1, 2})


def test_batch_norm_is_one_sided_with_eps() -> None:
    def change(s: dict[str, Tensor], factor: float, eps: float = 1e-5) -> None:
        for name in ("0.weight", "0.bias", "1.running_mean"):
            s[name][2] *= factor
        s["1.running_var"][2] = (s["1.running_var"][2] + eps) * factor**2 - eps

    def flip_gamma(s: dict[str, Tensor]) -> None:
        change(s, -2.0)
        s["1.weight"][2] *= -1

    assert kept("bn_mlp_tanh", lambda s: change(s, 3.0))
    assert not kept("bn_mlp_tanh", lambda s: change(s, 3.0, eps=0.0)), "eps counts"
    assert not kept("bn_mlp_tanh", lambda s: change(s, -2.0))
    assert kept("bn_mlp_tanh", flip_gamma)


def test_swiglu_and_weight_norm() -> None:
    def gated(gate: float, up: float, down: float) -> Callable[[dict[str, Tensor]], None]:
        def change(s: dict[str, Tensor]) -> None:
            for name, factor in (("gate", gate), ("up", up)):
                s[f"{name}.weight"][3] *= factor
                s[f"{name}.bias"][3] *= factor
            s["down.weight"][:, 3] *= down

        return change

    def direction(factor: float, gain: float) -> Callable[[dict[str, Tensor]], None]:
        def change(s: dict[str, Tensor]) -> None:
            s["one.parametrizations.weight.original1"][3] *= factor
            s["one.parametrizations.weight.original0"][3] *= gain

        return change

    assert kept("swiglu", gated(1, -4, -0.25)) and not kept("swiglu", gated(4, 1, 0.25))
    assert kept("bilinear_gate", gated(-4, 1, -0.25)) and kept("bilinear_gate", gated(4, 0.5, 0.5))
    assert kept("weight_norm_relu", direction(5.0, 1.0)) and kept("weight_norm_relu", direction(-5.0, -1.0))
    assert not kept("weight_norm_relu", direction(5.0, 0.2)) and not kept("weight_norm_relu", direction(-1.0, 1.0))


@pytest.mark.parametrize(
    ("name", "writer", "reader"),
    [("codebook", "encode", "out"), ("ranked_units", "encode", "decode"), ("ranked_units", "scores", "out")],
)
def test_comparisons_pass_no_scale(name: str, writer: str, reader: str) -> None:
    """Where a function has steps, by factors that are large enough to change who is nearest or largest."""
    for factor in (0.01, 100.0):

        def change(s: dict[str, Tensor], factor: float = factor) -> None:
            for name in (f"{writer}.weight", f"{writer}.bias"):
                s[name][::2] *= factor
            s[f"{reader}.weight"][:, : len(s[f"{writer}.bias"]) : 2] /= factor

        assert not kept(name, change)


@pytest.mark.skipif(data_dir() is None, reason="the shared data are not beside the project")
def test_resnet20_knows_its_pictures() -> None:
    pictures, labels = cifar10_small()
    with torch.no_grad():
        answers = resnet20()(normalised(pictures[:200])).argmax(dim=1).numpy()
    assert np.mean(answers == labels[:200]) > 0.85


def test_leaves_are_found_in_every_container() -> None:
    x = torch.ones(1)
    assert len(leaves({"a": x, "b": (x, [x, None])})) == 3
