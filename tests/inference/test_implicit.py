"""Implicit ensembles: the networks that are unrolled are those that the published layers compute."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onebasin as ob
from onebasin.errors import InputError
from onebasin.inference import driver
from onebasin.inference.implicit import MemberKernel, MemberState
from onebasin.inference.job import job_of
from onebasin.inference.methods.batchensemble import BatchEnsemble
from onebasin.inference.seeds import Streams
from onebasin.inference.start import first_networks
from onebasin.inference.target import Target, target_of
from tests.judging import numbers

CLOSE = 1e-12
FLAT, IMAGES, LABELS = numbers(12, 6), numbers(12, 2, 6, 6), torch.arange(12) % 3
OPTIONS: dict[str, dict[str, Any]] = {
    "batchensemble": {"members": 3},
    "lpbnn": {"members": 2, "draws": 3, "latent": 4},
    "masksembles": {"members": 3},
    "mimo": {"members": 2, "input_repetition_probability": 0.5},
}


def perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4, bias=False), nn.Tanh(), nn.Linear(4, 3)
    ).double()


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular"), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Conv2d(4, 6, 3, groups=2, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3),
    ).double()  # fmt: skip


MODELS = [(perceptron, FLAT), (convolutional, IMAGES)]


class Trained:
    """A method at work on two chains, before its first step."""

    def __init__(self, method: Any, model: nn.Module, inputs: Tensor, targets: Tensor = LABELS, **density: Any) -> None:
        self.model = model
        self.base = target_of(model, (inputs, targets), **density)
        self.plan = method.plan(self.base)
        kernel = self.plan.stages[-1].kernel
        assert isinstance(kernel, MemberKernel)
        self.kernel = kernel
        self.start = first_networks(model, self.base.layout, "fresh", range(2), 0)
        self.state: MemberState = kernel.init(self.start, Streams(0, range(2), "training 0 init"))

    @property
    def target(self) -> Target:
        return self.kernel.training.target

    def phi(self, chain: int) -> dict[str, Tensor]:
        tensors = self.target.layout.split(self.state.position[chain])
        return {name: value.clone().requires_grad_() for name, value in tensors.items()}

    def member(self, number: int) -> Any:
        return self.kernel.draw(self.state._replace(turn=self.state.turn + number + 1), Streams(0, range(2), "draw"))


class Factored(nn.Module):
    """The layer of BatchEnsemble as published: s * (W (r * x)) + b."""

    def __init__(self, layer: Any, weight: Tensor, r: Tensor, s: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.layer, self.values = layer, (weight, r, s, bias)

    def forward(self, x: Tensor) -> Tensor:
        weight, r, s, bias = self.values
        ones = [1] * (x.dim() - 2)
        x = x * r.reshape(1, -1, *ones)
        linear = isinstance(self.layer, nn.Linear)
        y = F.linear(x, weight) if linear else self.layer._conv_forward(x, weight, None)
        y = y * s.reshape(1, -1, *ones)
        return y if bias is None else y + bias.reshape(1, -1, *ones)


def factored(model: nn.Module, phi: dict[str, Tensor], number: int) -> nn.Module:
    """A copy of the model whose layers are those of member `number`."""
    twin = copy.deepcopy(model)
    for name, layer in list(twin.named_children()):
        if isinstance(layer, nn.Linear | nn.Conv2d):
            weight = f"{name}.weight"
            bias = None if layer.bias is None else phi[f"{name}.bias"][number]
            r, s = phi[f"{weight}:inputs"][number], phi[f"{weight}:outputs"][number]
            setattr(twin, name, Factored(layer, phi[weight], r, s, bias))
        elif isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
            layer.weight, layer.bias = nn.Parameter(phi[f"{name}.weight"]), nn.Parameter(phi[f"{name}.bias"])
            del layer._parameters["weight"], layer._parameters["bias"]
            layer.weight, layer.bias = phi[f"{name}.weight"], phi[f"{name}.bias"]  # type: ignore[assignment]
    return twin


def statistics(model: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in model.named_buffers() if "running" in name}


@pytest.mark.parametrize(("make", "inputs"), MODELS)
@pytest.mark.parametrize("factors", ["signs", "normal"])
def test_batchensemble_is_the_published_layer(make: Callable[[], nn.Module], inputs: Tensor, factors: str) -> None:
    work = Trained(BatchEnsemble(members=3, factors=factors), make(), inputs, prior=0.7)
    rows = torch.tensor([0, 2, 3, 5, 7, 11])
    found = work.target(work.state.position, work.state.buffers, rows, training=True)
    for chain in range(2):
        phi = work.phi(chain)
        values = []
        for number in range(3):
            direct = factored(work.model, phi, number).train()
            values.append(-F.cross_entropy(direct(inputs[rows]), LABELS[rows], reduction="none"))
            for name, value in statistics(direct).items():
                torch.testing.assert_close(found.buffers[name][chain, number], value, rtol=0, atol=CLOSE)
        likelihood = len(inputs) / len(rows) * torch.stack(values).mean(0).sum()
        law = torch.distributions.Normal(torch.zeros(()).double(), 0.7)
        own = {name for name in phi if ":" not in name and name.endswith("bias") and phi[name].dim() > 1}
        prior = sum(
            (law.log_prob(value).sum() / (3 if name in own else 1) for name, value in phi.items() if ":" not in name),
            torch.zeros(()),
        )
        torch.testing.assert_close(found.log_likelihood[chain], likelihood.detach(), rtol=CLOSE, atol=CLOSE)
        torch.testing.assert_close(found.log_prior[chain], prior.detach(), rtol=CLOSE, atol=CLOSE)
        slopes = torch.autograd.grad(-(likelihood + prior), list(phi.values()))
        expected = torch.cat([slope.reshape(-1) for slope in slopes])
        torch.testing.assert_close(found.gradient[chain], expected, rtol=1e-10, atol=CLOSE)


@pytest.mark.parametrize(("make", "inputs"), MODELS)
def test_a_drawn_member_is_an_ordinary_network_with_its_own_density(
    make: Callable[[], nn.Module], inputs: Tensor
) -> None:
    work = Trained(BatchEnsemble(members=3, factors="normal"), make(), inputs)
    for number in range(3):
        draws = work.member(number)
        networks = work.base.layout.networks(draws.position, draws.buffers)
        for chain in range(2):
            direct = factored(work.model, work.phi(chain), number).eval()
            network = copy.deepcopy(work.model).eval()
            network.load_state_dict({name: value[chain] for name, value in networks.items()})
            torch.testing.assert_close(network(inputs), direct(inputs), rtol=0, atol=CLOSE)
            law = torch.distributions.Normal(torch.zeros(()).double(), 1.0)
            density = -F.cross_entropy(direct(inputs), LABELS, reduction="sum")
            density = density + sum(law.log_prob(value).sum() for value in network.parameters())
            torch.testing.assert_close(draws.log_density[chain], density.detach(), rtol=CLOSE, atol=CLOSE)


def test_members_of_a_chain_share_what_they_should() -> None:
    """W_m / W_k is an outer product; norms are one, and other chains have other weights."""
    x = FLAT.float()
    model = perceptron().float()
    found = ob.sample(model, (x, LABELS), BatchEnsemble(members=3, epochs=5, batch=4), chains=2, compile=False)
    assert len(found) == 6 and found.chain.tolist() == [0, 0, 0, 1, 1, 1]
    for name in ("0.weight", "3.weight", "5.weight"):
        for first, second in ((0, 1), (1, 2), (4, 5)):
            values = torch.linalg.svdvals((found.tensor(name)[first] / found.tensor(name)[second]).double())
            assert float(values[1] / values[0]) < 1e-4
        across = torch.linalg.svdvals((found.tensor(name)[0] / found.tensor(name)[3]).double())
        assert float(across[1] / across[0]) > 1e-2
    assert torch.equal(found.tensor("1.weight")[0], found.tensor("1.weight")[2])
    assert not torch.equal(found.tensor("1.weight")[0], found.tensor("1.weight")[3])
    assert not torch.equal(found.tensor("0.bias")[0], found.tensor("0.bias")[1])
    assert not torch.equal(found.tensor("1.running_mean")[0], found.tensor("1.running_mean")[1])


def test_a_weight_that_two_layers_use_has_one_pair_of_factors() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    model[2].weight = model[0].weight
    work = Trained(BatchEnsemble(members=2), model, FLAT)
    assert [name for name in work.target.layout.names if ":" in name] == [
        "0.weight:inputs", "0.weight:outputs", "4.weight:inputs", "4.weight:outputs"
    ]  # fmt: skip
    draws = work.member(1)
    networks = work.base.layout.networks(draws.position, draws.buffers)
    assert torch.equal(networks["0.weight"], networks["2.weight"])


def test_frozen_weights_stay_and_are_not_copied_for_each_member() -> None:
    model = perceptron()
    model[0].requires_grad_(False)
    work = Trained(BatchEnsemble(members=2), model, FLAT)
    assert "0.weight:inputs" not in work.target.layout.names
    assert work.state.buffers["0.weight"].shape == (2, 5, 6)
    assert torch.equal(work.member(1).buffers["0.weight"][1], model[0].weight)


class Awkward(nn.Module):
    """Refused by vmap: a number is read from a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x)
        return self.outer(hidden * float(hidden.detach().abs().max()))


def test_a_model_that_vmap_refuses_is_unrolled_one_by_one() -> None:
    work = Trained(BatchEnsemble(members=2), Awkward().double(), FLAT)
    with pytest.warns(ob.errors.SlowWarning):
        found = work.target(work.state.position, work.state.buffers)
    phi = work.phi(1)
    values = [-F.cross_entropy(factored(work.model, phi, number)(FLAT), LABELS, reduction="sum") for number in range(2)]
    torch.testing.assert_close(found.log_likelihood[1], torch.stack(values).mean().detach(), rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("method", list(OPTIONS))
@pytest.mark.parametrize(("make", "inputs"), MODELS)
def test_a_run_that_was_interrupted_ends_as_one_that_was_not(
    method: str, make: Callable[[], nn.Module], inputs: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "_CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(driver, "_SECONDS", 0.0)
    chosen = ob.inference.METHODS[method](epochs=15, batch=4, **OPTIONS[method])
    model, data = make().float(), (inputs.float(), LABELS)
    options: dict[str, Any] = {"chains": 2, "seed": 3, "compile": False}
    whole = ob.sample(model, data, chosen, **options)
    for last in (3, 2, 2):  # in training, between two draws

        def stop(done: int, total: int, text: str, left: list[int] = [last]) -> None:  # noqa: B006
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            ob.sample(model, data, chosen, path=tmp_path / "run", progress=stop, **options)
    found = ob.sample(model, data, chosen, path=tmp_path / "run", **options)
    assert torch.equal(found.log_density, whole.log_density) and torch.equal(found.chain, whole.chain)
    assert all(torch.equal(found.tensor(name), whole.tensor(name)) for name in whole.names)
    assert found.provenance["diagnostics"] == whole.provenance["diagnostics"]


@pytest.mark.parametrize("method", list(OPTIONS))
def test_values_are_learned_as_well_as_classes(method: str) -> None:
    chosen = ob.inference.METHODS[method](epochs=60, batch=6, lr=0.05, **OPTIONS[method])
    line = torch.linspace(-1, 1, 24)[:, None]
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    found = ob.sample(model, (line, 2 * line), chosen, chains=2, noise=0.1, compile=False)
    error = (ob.predict(model, found, line, quantity="values").mean(0) - 2 * line).square().mean().sqrt()
    assert float(error) < 0.3 and bool(torch.isfinite(found.log_density).all())


@pytest.mark.parametrize("method", list(OPTIONS))
def test_what_cannot_be_unrolled_is_refused(method: str) -> None:
    chosen = ob.inference.METHODS[method](**OPTIONS[method])
    with pytest.raises(InputError, match=f"{method} needs data to train on"):
        ob.sample(perceptron(), None, chosen)
    with pytest.raises(InputError, match="members to be a whole number from 2 on, found 1: give members=4"):
        ob.inference.METHODS[method](members=1)
    embedding = nn.Sequential(nn.Embedding(5, 3), nn.Flatten())
    with pytest.raises(InputError, match=f"linear or convolution layers with trained weights for {method}, found none"):
        ob.sample(embedding, (torch.arange(4)[:, None], torch.arange(4) % 3), chosen)
    bent = perceptron()
    nn.utils.parametrizations.weight_norm(bent[3])
    with pytest.raises(InputError, match=r"expected 3.weight among the tensors of the model, found it made of others"):
        ob.sample(bent, (FLAT, LABELS), chosen)
    with pytest.raises(InputError, match="a method that fits a density"):
        ob.approximate(perceptron(), (FLAT, LABELS), chosen)


def test_factors_begin_as_they_are_asked_to() -> None:
    signs = Trained(BatchEnsemble(members=4), perceptron(), FLAT).phi(0)["0.weight:inputs"].detach()
    assert signs.abs().eq(1).all() and 0 < int((signs > 0).sum()) < signs.numel()
    wide = nn.Sequential(nn.Linear(6, 400), nn.ReLU(), nn.Linear(400, 3)).double()
    work = Trained(BatchEnsemble(members=4, factors="normal", spread=0.2), wide, FLAT)
    normal = work.phi(0)["0.weight:outputs"].detach()
    assert abs(float(normal.mean()) - 1) < 4.5 * 0.2 / 1600**0.5
    assert abs(float(normal.std()) - 0.2) < 4.5 * 0.2 / 3200**0.5
    with pytest.raises(InputError, match='expected factors "signs" or "normal"'):
        BatchEnsemble(factors="ones")


def test_gradients_are_counted_for_each_member() -> None:
    job = job_of(perceptron(), (FLAT, LABELS), BatchEnsemble(members=3, epochs=2, batch=4), density={})
    assert job.plan(job.target()).total_gradients == 3 * (2 * 3 + 3)
