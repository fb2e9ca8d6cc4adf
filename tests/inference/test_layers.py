"""Factors of units are factors of weights, for every linear and convolution layer."""

from typing import Any

import pytest
import torch
from torch import nn

from onebasin.errors import InputError
from onebasin.inference.layers import by_layer, columns, input_units, output_units, ran, rows, weight_layers
from onebasin.inference.target import target_of
from tests.judging import numbers

LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (nn.Linear(4, 6), ()),
    "conv1d": (nn.Conv1d(4, 6, 3, stride=2, padding=1), (7,)),
    "conv2d": (nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect", dilation=2), (7, 6)),
    "grouped": (nn.Conv2d(4, 6, 2, groups=2), (5, 5)),
    "depthwise": (nn.Conv1d(4, 8, 3, groups=4), (6,)),
    "conv3d": (nn.Conv3d(4, 6, 2), (3, 4, 3)),
    "transposed": (nn.ConvTranspose2d(4, 6, 3, stride=2), (4, 3)),
    "transposed, grouped": (nn.ConvTranspose1d(4, 6, 3, groups=2), (5,)),
}


@pytest.mark.parametrize("name", list(LAYERS))
def test_factors_of_units_are_factors_of_weights(name: str) -> None:
    layer: Any = LAYERS[name][0].double()
    space = LAYERS[name][1]
    ones = [1] * len(space)
    assert input_units(layer) == 4
    r, s, x = numbers(4, seed=1), numbers(output_units(layer), seed=2), numbers(5, 4, *space, seed=3)
    with torch.no_grad():
        layer.bias.zero_()
        expected = layer(x * r.reshape(1, -1, *ones)) * s.reshape(1, -1, *ones)
        factor = columns(layer, r)
        assert factor is not None
        layer.weight.mul_(factor * rows(layer, s))
        torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)


def test_a_factor_per_channel_reaches_each_of_its_features() -> None:
    factor = columns(nn.Linear(6, 2), torch.tensor([1.0, 2.0]))
    assert factor is not None and factor.tolist() == [[1.0, 1.0, 1.0, 2.0, 2.0, 2.0]]
    assert columns(nn.Linear(5, 2), torch.ones(2)) is None and columns(nn.Conv1d(5, 2, 1), torch.ones(2)) is None


def test_layers_come_in_the_order_in_which_they_run() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.first, self.idle = nn.Linear(3, 2), nn.Linear(4, 3), nn.Linear(1, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.first(x))

    x = torch.zeros(5, 4)
    assert [(name, shape) for name, _, shape in ran(Backwards(), ((x,), {}))] == [("first", (5, 4)), ("last", (5, 3))]
    found = weight_layers(target_of(Backwards(), (x, torch.zeros(5, 2)), noise=1.0), "a method")
    assert [(layer.weight, layer.bias) for layer in found] == [
        ("first.weight", "first.bias"), ("last.weight", "last.bias")
    ]  # fmt: skip


def test_numbers_of_layers_are_chosen_by_name_or_pattern() -> None:
    layers = ["a.one", "a.two", "b"]
    assert by_layer(layers, 0.3, "scale", "scale") == {"a.two": 0.3, "b": 0.3}
    assert by_layer(layers, {"a.*": 1.0, "a.two": 2.0}, "scale", "scale") == {"a.one": 1.0, "a.two": 2.0}
    with pytest.raises(InputError, match=r"fewer than two .* name layers in scale=\{name: number\}"):
        by_layer(["a"], 0.3, "scale", "number")
