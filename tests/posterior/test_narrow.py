"""Narrow modules: shapes, fresh weights, groups; and that a Packed-Ensemble is an ensemble of them."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onebasin as ob
from onebasin.errors import InputError
from tests.models import BATTERY

CASES = {case.name: case for case in BATTERY}


def shapes(model: nn.Module) -> list[tuple[int, ...]]:
    return [tuple(value.shape) for value in model.parameters()]


def cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 12, 3), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 3),
    )  # fmt: skip


def test_shapes_by_hand_and_the_wide_model_stays() -> None:
    model, inputs = cnn(), torch.zeros(2, 1, 8, 8)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    small = ob.narrow(model, ob.discover(model, inputs), 0.5)
    assert shapes(small) == [(4, 1, 3, 3), (4,), (4,), (4,), (6, 4, 3, 3), (6,), (3, 6), (3,)]
    assert (small[1].num_features, small[3].in_channels, small[7].in_features) == (4, 4, 6)
    assert type(small) is type(model) and small(inputs).shape == (2, 3)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(
        value.data_ptr() == other.data_ptr()
        for value, other in zip(small.parameters(), model.parameters(), strict=True)
    )
    assert shapes(ob.narrow(model, ob.discover(model, inputs), 1.0)) == shapes(model)


@pytest.mark.parametrize("name", ["residual_mlp", "densenet_bn", "lstm_two_layers", "mlp_prelu_channels"])
def test_the_narrow_module_has_the_same_spaces_with_fewer_units(name: str) -> None:
    model, inputs = CASES[name].build(), CASES[name].inputs()
    wide = ob.discover(model, inputs)
    small = ob.narrow(model, wide, 0.5, inputs=inputs)
    found = ob.discover(small, inputs)
    assert [space.name for space in found.spaces] == [space.name for space in wide.spaces]
    for old, new in zip(wide.spaces, found.spaces, strict=True):
        if old.permutable:
            assert new.size == max(1, old.size // 2) and (new.size == 1 or new.freedoms == old.freedoms)


def test_weights_are_those_of_a_constructor() -> None:
    """Uniform within 1 / sqrt(fan in) of the narrow layer, not of the wide one; another seed gives others."""
    model = nn.Sequential(nn.Linear(4, 400), nn.ReLU(), nn.Linear(400, 300))
    symmetry = ob.discover(model, torch.zeros(1, 4))
    small = ob.narrow(model, symmetry, 0.25)
    bound = 1 / 10  # of 100 inputs; the wide layer has 1 / 20
    assert 0.099 < float(small[2].weight.detach().abs().max()) <= bound
    assert torch.equal(small[2].weight, ob.narrow(model, symmetry, 0.25)[2].weight)
    assert not torch.equal(small[2].weight, ob.narrow(model, symmetry, 0.25, seed=1)[2].weight)


def test_what_is_frozen_keeps_the_first_units() -> None:
    model = cnn()
    model[0].requires_grad_(False)
    model[3].bias.requires_grad_(False)
    symmetry = ob.discover(model, torch.zeros(1, 1, 8, 8))
    small = ob.narrow(model, symmetry, 0.5)
    assert not small[0].weight.requires_grad and not small[3].bias.requires_grad and small[3].weight.requires_grad
    assert torch.equal(small[3].bias, model[3].bias[: len(small[3].bias)])
    assert torch.equal(small[0].weight, model[0].weight[: len(small[0].weight)])


def test_groups_of_convolutions_between_hidden_channels() -> None:
    model, inputs = cnn(), torch.randn(2, 1, 8, 8)
    symmetry = ob.discover(model, inputs)
    small = ob.narrow(model, symmetry, 0.5, 2, inputs=inputs)
    assert (small[0].groups, small[3].groups, small[3].weight.shape) == (1, 2, (6, 2, 3, 3))
    halves = [
        F.conv2d(part, weight)
        for part, weight in zip(torch.ones(1, 4, 3, 3).chunk(2, 1), small[3].weight.chunk(2), strict=True)
    ]
    expected = torch.cat(halves, 1) + small[3].bias[:, None, None]
    torch.testing.assert_close(small[3](torch.ones(1, 4, 3, 3)), expected)
    separable = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.ReLU(), nn.Conv2d(8, 12, 1), nn.ReLU(),
        nn.Flatten(), nn.Linear(192, 3),
    )  # fmt: skip
    found = ob.narrow(separable, ob.discover(separable, inputs), 0.5, 2, inputs=inputs)
    grouped = [(layer.groups, tuple(layer.weight.shape)) for layer in found if isinstance(layer, nn.Conv2d)]
    assert grouped == [(1, (4, 1, 3, 3)), (4, (4, 1, 3, 3)), (2, (6, 2, 1, 1))]


@pytest.mark.parametrize(
    ("model", "share", "groups", "sentence"),
    [
        (cnn, 0.5, 4, r"4 groups divide, found 4 and 6 in '3' with share=0.5: give another share"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.ReLU(), nn.Linear(4, 2)), 0.5, 2, "leave groups out"),
        (cnn, 0.0, 1, "share of the units above 0"),
        (cnn, 0.5, 0, "groups from 1 on"),
        (lambda: nn.Sequential(*cnn()[:4], nn.Conv2d(12, 12, 1, groups=12), *cnn()[4:]), 0.5, 1, "expected inputs="),
    ],
)
def test_the_impossible_is_refused(model: Callable[[], nn.Module], share: float, groups: int, sentence: str) -> None:
    wide = model()
    with pytest.raises(InputError, match=sentence):
        ob.narrow(wide, ob.discover(wide, torch.zeros(1, 1, 8, 8)), share, groups)


# --- Packed-Ensembles ---

MEMBERS, STEPS = 3, 100


class Packed(nn.Module):
    """M networks side by side as one: a grouped convolution and grouped linear layers, nothing shared."""

    def __init__(self, networks: list[dict[str, Tensor]]) -> None:
        super().__init__()
        self.weights = nn.ParameterDict(
            {key.replace(".", "_"): nn.Parameter(torch.cat([own[key] for own in networks])) for key in networks[0]}
        )

    def forward(self, x: Tensor) -> Tensor:
        """Outputs (members, examples, classes)."""
        own = self.weights
        pixels = x.repeat(1, MEMBERS, 1, 1)
        hidden = torch.relu(F.conv2d(pixels, own["0_weight"], own["0_bias"], groups=MEMBERS)).flatten(1)
        out = F.conv1d(hidden[..., None], own["3_weight"][..., None], own["3_bias"], groups=MEMBERS)
        return out.reshape(len(x), MEMBERS, -1).transpose(0, 1)


def optimizers(name: str) -> Callable[[Iterator[nn.Parameter], float], torch.optim.Optimizer]:
    """With a gradient that is `scale` times as large."""
    if name == "sgd":
        return lambda weights, scale: torch.optim.SGD(weights, lr=0.1 / scale, momentum=0.9)
    return lambda weights, scale: torch.optim.Adam(weights, lr=0.01, eps=1e-8 * scale)


def problem() -> tuple[nn.Module, Tensor, Tensor]:
    stream = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3)).double()
    x = torch.randn(20, 1, 4, 4, generator=stream, dtype=torch.float64)
    small = ob.narrow(model, ob.discover(model, x[:2]), 0.5)
    return small, x, torch.randint(3, (20,), generator=stream)


def gap(packed: Packed, networks: list[dict[str, Tensor]]) -> float:
    whole = Packed(networks).weights
    return max(float((packed.weights[key] - whole[key]).detach().abs().max()) for key in whole)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("mean", [False, True])
def test_a_packed_network_trains_as_its_members_would_alone(optimizer: str, mean: bool) -> None:
    small, x, y = problem()
    networks = [ob.fresh(small, 0, member) for member in range(MEMBERS)]
    packed, make = Packed(networks), optimizers(optimizer)
    scale = 1 / MEMBERS if mean else 1.0
    together = make(packed.parameters(), scale)
    for _ in range(STEPS):
        together.zero_grad()
        losses = torch.stack([F.cross_entropy(outputs, y) for outputs in packed(x)])
        (losses.mean() if mean else losses.sum()).backward()
        together.step()
    ended = []
    for network in networks:
        small.load_state_dict(network)
        alone = make(small.parameters(), 1.0)
        for _ in range(STEPS):
            alone.zero_grad()
            F.cross_entropy(small(x), y).backward()
            alone.step()
        ended.append({key: value.clone() for key, value in small.state_dict().items()})
    assert gap(packed, networks) > 0.1, "training must move the weights for this test to say anything"
    assert gap(packed, ended) < 5e-15


def test_it_is_an_ensemble_of_narrow_networks() -> None:
    """The packed module, trained by torch, against `sample` with as many chains."""
    small, x, y = problem()
    method = ob.Ensemble(epochs=STEPS, batch=None, optimizer="sgd", lr=0.1)
    chains: Any = ob.sample(small, (x, y), method, chains=MEMBERS, prior=None, compile=False)
    packed = Packed([ob.fresh(small, 0, member) for member in range(MEMBERS)])
    together = torch.optim.SGD(packed.parameters(), lr=0.1, momentum=0.9)
    for _ in range(STEPS):
        together.zero_grad()
        torch.stack([F.cross_entropy(outputs, y) for outputs in packed(x)]).sum().backward()
        together.step()
    assert gap(packed, list(chains)) < 1e-13
