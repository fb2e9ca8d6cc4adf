"""Matching by activations: a moved copy does what the original does, unit by unit."""

import itertools

import pytest
import torch
from torch import Tensor, nn

import onebasin as ob
from onebasin.alignment.activations import match_activations
from onebasin.errors import InputError, SpecError
from tests.models import BATTERY
from tests.symmetry.test_discover import prepared

NAMES = (
    "mlp_relu", "mlp_tanh", "conv_flatten", "grouped", "depthwise_separable", "densenet_bn", "resnet_bn",
    "resnet_group_4", "lstm", "gru_two_layers", "encoder_prenorm_relu", "decoder_gqa", "mixer", "experts",
    "tied_autoencoder_tanh", "residual_mlp",
)  # fmt: skip


def wide(value: object) -> object:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def wide_inputs(inputs: object) -> object:
    if isinstance(inputs, dict):
        return {name: wide(value) for name, value in inputs.items()}
    return tuple(map(wide, inputs)) if isinstance(inputs, tuple) else wide(inputs)


@pytest.mark.parametrize("name", NAMES)
def test_a_moved_copy_is_brought_back(name: str) -> None:
    """By Cauchy-Schwarz nothing agrees with a network more than itself: a moved copy must reach just that."""
    case = next(case for case in BATTERY if case.name == name)
    _, inputs, symmetry = prepared(case)
    model, inputs = case.build().double(), wide_inputs(inputs)
    a = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    b = symmetry.apply(symmetry.random(2, freedoms=("permutation", "sign", "norm-sign")), a)
    alone, found = (match_activations(model, a, x, symmetry, inputs) for x in (a, b))
    assert found.after == pytest.approx(alone.before, rel=1e-8)
    assert alone.after == pytest.approx(alone.before, rel=1e-8)
    assert not found.missing


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)).double()


@pytest.mark.parametrize("kind", ["uncentred", "centred", "correlation"])
def test_every_order_of_a_small_layer(kind: str) -> None:
    """Brute force over 5! orders, with the activations computed by hand."""
    model, other = net(), net()
    symmetry = ob.discover(model, torch.zeros(1, 6, dtype=torch.float64))
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = match_activations(model, model.state_dict(), other.state_dict(), symmetry, x, kind=kind)

    def hidden(net: nn.Sequential) -> Tensor:
        values = net[:2](x).detach()
        values = values if kind == "uncentred" else values - values.mean(0)
        return values / values.norm(dim=0).clamp_min(1e-300) if kind == "correlation" else values

    table = hidden(model).T @ hidden(other)
    best = max(itertools.permutations(range(5)), key=lambda p: float(sum(table[i, j] for i, j in enumerate(p))))
    value = sum(float(table[i, j]) for i, j in enumerate(best))
    reached = sum(float(table[i, int(j)]) for i, j in enumerate(found.element.orders["0"]))
    assert reached == pytest.approx(value)
    assert found.after >= found.before


def test_batches_and_refusals() -> None:
    model = net()
    symmetry = ob.discover(model, torch.zeros(1, 6, dtype=torch.float64))
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    a, b = model.state_dict(), net().state_dict()
    whole = match_activations(model, a, b, symmetry, x)
    parts = match_activations(model, a, b, symmetry, (part for part in x.split(7)))
    assert whole.after == pytest.approx(parts.after)
    with pytest.raises(InputError, match="kind must be one of"):
        match_activations(model, a, b, symmetry, x, kind="cosine")
    with pytest.raises(SpecError, match="the second network has no tensor"):
        match_activations(model, a, {}, symmetry, x)
