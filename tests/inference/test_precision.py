"""Training in bfloat16: weights, losses and densities stay in float32; how passes of several chains are compiled."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onebasin as ob
from onebasin.errors import PrecisionWarning
from onebasin.inference.target import Target, target_of
from tests.judging import seeded

EXAMPLES, SIDE = 48, 8
X = torch.randn(EXAMPLES, 3, SIDE, SIDE, generator=seeded(0))
Y = (X[:, 0].mean((1, 2)) > 0).long() + 2 * (X[:, 1, :4].mean((1, 2)) > 0).long()


def residual(norm: str) -> nn.Module:
    with ob.global_seed(0):
        return ob.examples.resnet8(4, classes=4, norm=norm)


def perceptron() -> nn.Module:
    with ob.global_seed(0):
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE**2, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))


MODELS: dict[str, Any] = {
    "frn": lambda: residual("frn"),
    "bn": lambda: residual("bn"),
    "perceptron": perceptron,
}


def states(target: Target, model: nn.Module, chains: int) -> Tensor:
    """Fresh networks as positions (chains, D)."""
    with ob.global_seed(1):
        several = [copy.deepcopy(model) for _ in range(chains)]
        for module in (module for one in several for module in one.modules()):
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    return torch.stack([target.layout.join(dict(one.named_parameters())) for one in several]).detach()


def passed(target: Target, position: Tensor, *, bf16: bool) -> Any:
    chains = len(position)
    rows = torch.stack([torch.randperm(EXAMPLES, generator=seeded(chain))[:32] for chain in range(chains)])
    return target(position, target.buffers_for(chains), rows, training=True, bf16=bf16)


@pytest.mark.parametrize("name", list(MODELS))
def test_gradients_are_those_of_float32_within_the_rounding_of_bfloat16(name: str) -> None:
    """Rounding weights and inputs to bfloat16 and nothing else is the measure; activations add as much per layer.

    A smooth network has errors of some 2^-9; one with kinks, as filter response norm has, takes the other slope in a
    share of its units that is about the rounding, which changes the gradient by the root of that share.
    """
    model = MODELS[name]()
    target = target_of(model, (X, Y), prior=None)
    position = states(target, model, 2)
    full, half = (passed(target, position, bf16=bf16) for bf16 in (False, True))
    rounded = passed(target_of(model, (X.bfloat16().float(), Y), prior=None), position.bfloat16().float(), bf16=False)
    size = full.gradient.norm(dim=1)
    error, least = ((one.gradient - full.gradient).norm(dim=1) / size for one in (half, rounded))
    assert bool((error < 4 * least).all()) and bool((error > 0.2 * least).all()), (error, least)
    assert half.gradient.dtype == torch.float32 and half.potential.dtype == torch.float64
    assert float(((half.potential - full.potential) / full.potential).abs().max()) < 2**-9
    assert all(half.buffers[key].dtype == value.dtype for key, value in full.buffers.items())
    assert not torch.is_autocast_enabled("cpu")


def test_the_likelihood_sees_float32_outputs() -> None:
    seen = []

    def likelihood(outputs: Tensor, targets: Tensor) -> Tensor:
        seen.append((outputs.dtype, torch.is_autocast_enabled("cpu")))
        return -nn.functional.cross_entropy(outputs, targets, reduction="none")

    model = perceptron()
    target = target_of(model, (X, Y), prior=None, likelihood=likelihood)
    seen.clear()
    passed(target, states(target, model, 2), bf16=True)
    assert set(seen) == {(torch.float32, False)}


def test_the_loss_falls_and_densities_are_those_of_full_precision() -> None:
    model = residual("frn")
    method = ob.Ensemble(epochs=12, batch=16, lr=0.02, precision="bf16")
    short, found = (
        ob.sample(model, (X, Y), chosen, chains=2, prior=None, compile=False)
        for chosen in (ob.Ensemble(epochs=0, precision="bf16"), method)
    )
    assert found.log_density is not None and short.log_density is not None
    assert bool((found.log_density > short.log_density + 0.3 * EXAMPLES).all())
    for chain in range(2):
        model.load_state_dict(found.member(chain))
        expected = -nn.functional.cross_entropy(model(X), Y, reduction="sum").detach().double()
        torch.testing.assert_close(found.log_density[chain], expected, rtol=1e-5, atol=1e-5)
    assert {value.dtype for value in found.spec.values()} == {torch.float32}


class Fussy(nn.Module):
    """A layer that does not compute in bfloat16; with `loops`, vmap cannot follow it either."""

    def __init__(self, loops: bool = False, refuses: bool = True) -> None:
        super().__init__()
        self.first, self.second, self.loops, self.refuses = nn.Linear(6, 8), nn.Linear(8, 4), loops, refuses

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.first(x)
        if self.refuses and hidden.dtype == torch.bfloat16:
            raise RuntimeError("not implemented for 'BFloat16'")
        if self.loops and hidden.abs().max().item() < 0:
            return hidden
        return self.second(torch.tanh(hidden.float()))


@pytest.mark.filterwarnings("ignore::onebasin.errors.SlowWarning")
@pytest.mark.parametrize("loops", [False, True])
def test_models_without_bfloat16_train_in_float32_and_say_so(loops: bool) -> None:
    x = X.flatten(1)[:, :6]
    fussy = Fussy(loops)
    options: dict[str, Any] = {"chains": 2, "prior": None, "compile": False}
    with pytest.warns(PrecisionWarning, match=r"bfloat16 is refused by the model \(RuntimeError: not implemented"):
        found = ob.sample(fussy, (x, Y), ob.Ensemble(epochs=2, batch=16, precision="bf16"), **options)
    expected = ob.sample(fussy, (x, Y), ob.Ensemble(epochs=2, batch=16), **options)
    assert all(torch.equal(found.tensor(name), expected.tensor(name)) for name in found.names)


@pytest.mark.filterwarnings("ignore::onebasin.errors.SlowWarning")
def test_a_model_that_only_vmap_refuses_trains_in_bfloat16_chain_after_chain() -> None:
    x = X.flatten(1)[:, :6]
    chosen = (Fussy(loops, refuses=False) for loops in (False, True))
    method = ob.Ensemble(epochs=2, batch=16, precision="bf16")
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrecisionWarning)
        stacked, looped = (ob.sample(model, (x, Y), method, chains=2, prior=None, compile=False) for model in chosen)
    difference = stacked.tensor("first.weight") - looped.tensor("first.weight")
    assert float(difference.abs().max()) < 1e-3


def test_weights_of_other_kinds_train_as_they_are_and_say_so() -> None:
    method = ob.Ensemble(epochs=1, batch=16, precision="bf16")
    with pytest.warns(PrecisionWarning, match="expected weights in float32 .* found float64"):
        found = ob.sample(perceptron().double(), (X.double(), Y), method, compile=False)
    assert found.tensor("1.weight").dtype == torch.float64
    with pytest.warns(PrecisionWarning, match="a density without a model's outputs"):
        ob.sample(nn.Linear(1, 2), None, method, log_density=lambda w: -w["weight"].square().sum(), compile=False)


@pytest.mark.parametrize("refused", ["several", "all"])
def test_chains_that_the_compiler_refuses_together_are_compiled_one_by_one(
    refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As convolutions of several chains, which become grouped ones; where it refuses one chain too, all is eager."""
    asked = []

    def compiled(function: Any, arguments: Any, close: float) -> Any:
        asked.append((len(arguments[0]), close))
        return None if len(arguments[0]) > 1 or refused == "all" else lambda *tensors: function(*tensors)

    monkeypatch.setattr("onebasin.inference.target.compiled", compiled)
    model = residual("bn")
    eager, fast = (target_of(model, (X, Y), prior=0.5, compile=compile) for compile in (False, True))
    position = states(eager, model, 3)
    for bf16 in (False, True):
        expected, found = (passed(target, position, bf16=bf16) for target in (eager, fast))
        close = 5e-2 if bf16 else 1e-4  # one chain alone is rounded otherwise
        assert float((found.gradient - expected.gradient).norm()) < close * float(expected.gradient.norm())
        torch.testing.assert_close(found.potential, expected.potential, rtol=0.01 * close, atol=0)
        for key, value in expected.buffers.items():
            torch.testing.assert_close(found.buffers[key], value, rtol=close, atol=close)
    assert asked == [(3, 1e-3), (1, 1e-3), (1, 5e-2)], "several are tried once"
    if refused == "several":
        assert all(ready.compiled for ready in fast._functions.values())
        passed(fast, position[:2], bf16=True)
        fast(position, fast.buffers_for(3))
        assert len(asked) == 3, "the pass of one chain serves any number of them, and whole data are not tried"


def test_gradients_of_the_whole_data_are_compiled_one_by_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As HMC asks for them: the examples are the same for all chains."""
    asked = []

    def compiled(function: Any, arguments: Any, close: float) -> Any:
        asked.append(len(arguments[0]))
        return None if len(arguments[0]) > 1 else lambda *tensors: function(*tensors)

    monkeypatch.setattr("onebasin.inference.target.compiled", compiled)
    model = residual("bn")
    eager, fast = (target_of(model, (X, Y), prior=0.5, compile=compile) for compile in (False, True))
    position = states(eager, model, 3)
    expected, found = (target(position, target.buffers_for(3)) for target in (eager, fast))
    assert asked == [3, 1]
    assert all(ready.compiled for ready in fast._functions.values())
    torch.testing.assert_close(found.gradient, expected.gradient, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.potential, expected.potential)
