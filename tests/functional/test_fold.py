"""Norms folded into layers: the same function to rounding, for every kind of layer, or a sentence that says why not."""

import pytest
import torch
from torch import Tensor, nn

import onebasin as ob
from onebasin.errors import ModelError
from onebasin.functional import outputs, random_twin


def stream(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Block(nn.Module):
    """A residual block as people write it: functional calls, no biases, a projection on the way around."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(2, 4, 3, bias=False), nn.Conv2d(4, 4, 3, padding=1, groups=2)
        self.around = nn.Conv2d(2, 4, 3)
        self.norm_one, self.norm_two = nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False)
        self.norm_around, self.head = nn.BatchNorm2d(4, eps=0.1), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        inside = self.norm_two(self.two(torch.relu(self.norm_one(self.one(x)))))
        return self.head(torch.relu(inside + self.norm_around(self.around(x))).mean((2, 3)))


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3), nn.BatchNorm1d(3))


def places() -> nn.Module:
    return nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Conv1d(4, 2, 1), nn.Flatten())


CASES = {"dense": (dense, (6, 5)), "conv1d": (places, (6, 2, 7)), "block": (Block, (6, 2, 6, 6))}


@pytest.mark.parametrize("name", CASES)
def test_the_function_stays_and_the_norms_do_nothing(name: str) -> None:
    build, shape = CASES[name]
    model, inputs = build(), torch.randn(shape, generator=stream(1), dtype=torch.float64)
    twins = [random_twin(model, stream(seed)) for seed in range(3)]
    networks = ob.Population.from_models(twins, chain=[0, 0, 1], log_density=[0.0, 1.0, 2.0])
    before = {key: value.clone() for key, value in model.state_dict().items()}
    folded = ob.fold_norms(model, networks, inputs)
    assert folded.spec == networks.spec and folded.chain is not None and folded.chain.tolist() == [0, 0, 1]
    assert folded.log_density is None
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    for old, new in zip(networks, folded, strict=True):
        expected, found = outputs(model, old, inputs), outputs(model, new, inputs)
        assert float((found - expected).abs().max()) < 1e-13 * float(expected.abs().max())
        assert torch.equal(ob.fold_norms(model, old, inputs)[next(iter(new))], next(iter(new.values())))
        for key, value in new.items():
            if key.endswith("running_var"):
                assert float(value.max() - value.min()) == 0.0 and 0.9 <= float(value[0]) <= 1.0


@pytest.mark.parametrize("build", [dense, places])
def test_the_norms_can_be_taken_out(build: type[nn.Module]) -> None:
    model = random_twin(build(), stream())
    inputs = torch.randn(CASES["dense" if build is dense else "conv1d"][1], generator=stream(1), dtype=torch.float64)
    folded = ob.fold_norms(model, dict(model.state_dict()), inputs)
    expected = model(inputs).detach()
    model.load_state_dict(folded)
    without = nn.Sequential(*[layer for layer in model if not isinstance(layer, nn.BatchNorm1d)])
    assert float((without(inputs).detach() - expected).abs().max()) < 1e-13 * float(expected.abs().max())


def test_draws_that_differ_in_statistics_alone_get_a_distance() -> None:
    x, y = torch.randn(40, 5, generator=stream(2)), torch.randn(40, 3, generator=stream(3))
    method = ob.MCBatchNorm(draws=3, epochs=2, batch=10)
    draws = ob.sample(dense(), (x, y), method, noise=0.5, compile=False)
    folded = ob.fold_norms(dense(), draws, x)
    assert torch.equal(draws.tensor("0.weight")[0], draws.tensor("0.weight")[1])
    assert float((folded.tensor("0.weight")[0] - folded.tensor("0.weight")[1]).abs().max()) > 1e-2
    torch.testing.assert_close(
        ob.predict(dense(), folded, x, quantity="values"), ob.predict(dense(), draws, x, quantity="values")
    )


class Twice(nn.Module):
    """The layer's result also goes around the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x)
        return self.norm(hidden) + hidden


REFUSALS: dict[str, tuple[nn.Module, str]] = {
    "norm first": (nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)), "found 0, .*no linear or convolution layer"),
    "relu between": (nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.BatchNorm1d(3)), "found 2, .*no linear"),
    "used twice": (Twice(), "found norm, .*what inner gives, or its weight, is also used elsewhere"),
    "no bias": (nn.Sequential(nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3, affine=False)), "neither it nor 0 has a"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_folded_is_refused(name: str) -> None:
    model, sentence = REFUSALS[name]
    with pytest.raises(ModelError, match=sentence):
        ob.fold_norms(model, dict(model.state_dict()), torch.randn(6, 3, generator=stream()))


def test_a_layer_that_is_used_twice_is_refused() -> None:
    layer, norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
    model = nn.Sequential(layer, norm, nn.Tanh(), layer)
    with pytest.raises(ModelError, match="also used elsewhere"):
        ob.fold_norms(model, dict(model.state_dict()), torch.randn(6, 3, generator=stream()))


def test_frozen_norms_and_models_without_norms_stay() -> None:
    model = dense()
    model[1].requires_grad_(False)
    state = {key: value.detach() for key, value in random_twin(model, stream()).state_dict().items()}
    folded = ob.fold_norms(model, state, torch.zeros(2, 5))
    assert torch.equal(folded["0.weight"], state["0.weight"]) and torch.equal(
        folded["1.running_var"], state["1.running_var"]
    )
    assert not torch.equal(folded["3.weight"], state["3.weight"])
    plain = nn.Linear(3, 2)
    assert torch.equal(ob.fold_norms(plain, dict(plain.state_dict()), torch.zeros(2, 3))["weight"], plain.weight)
