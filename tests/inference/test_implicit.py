"""Implicit ensembles: the networks that are unrolled are those that the published layers compute."""

import copy
import itertools
import math
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
from onebasin.inference.augment import MiniBatch
from onebasin.inference.implicit import MemberKernel, MemberState
from onebasin.inference.job import job_of
from onebasin.inference.methods.batchensemble import BatchEnsemble
from onebasin.inference.methods.lpbnn import LPBNN
from onebasin.inference.methods.masksembles import Masksembles, kept_units, masks
from onebasin.inference.methods.mimo import MIMO, order
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


LAYERS = (nn.Linear, nn.Conv2d)


def layer_of(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


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

    def __init__(self, layer: Any, weight: Tensor, *factors: Tensor | None) -> None:
        super().__init__()
        self.layer, self.values = layer, (weight, *factors)

    def forward(self, x: Tensor) -> Tensor:
        weight, r, s, bias = self.values
        assert weight is not None
        ones = [1] * (x.dim() - 2)
        x = x if r is None else x * r.reshape(1, -1, *ones)
        linear = isinstance(self.layer, nn.Linear)
        y = F.linear(x, weight) if linear else self.layer._conv_forward(x, weight, None)
        y = y if s is None else y * s.reshape(1, -1, *ones)
        return y if bias is None else y + bias.reshape(1, -1, *ones)


Factors = Callable[[str, Any], tuple[Tensor | None, ...]]  # of a layer: r, s, the bias


def rebuilt(model: nn.Module, phi: dict[str, Tensor], factors: Factors) -> nn.Module:
    """A copy of the model with the weights phi whose layers are those that were published."""
    twin = copy.deepcopy(model)
    for name, layer in list(twin.named_children()):
        if isinstance(layer, nn.Linear | nn.Conv2d):
            setattr(twin, name, Factored(layer, phi[f"{name}.weight"], *factors(name, layer)))
        elif isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
            layer.weight, layer.bias = nn.Parameter(phi[f"{name}.weight"]), nn.Parameter(phi[f"{name}.bias"])
            del layer._parameters["weight"], layer._parameters["bias"]
            layer.weight, layer.bias = phi[f"{name}.weight"], phi[f"{name}.bias"]  # type: ignore[assignment]
    return twin


def factored(model: nn.Module, phi: dict[str, Tensor], number: int) -> nn.Module:
    """BatchEnsemble's network `number`."""

    def factors(name: str, layer: Any) -> tuple[Tensor | None, ...]:
        r, s = phi[f"{name}.weight:inputs"][number], phi[f"{name}.weight:outputs"][number]
        return r, s, None if layer.bias is None else phi[f"{name}.bias"][number]

    return rebuilt(model, phi, factors)


def log_prior(phi: dict[str, Tensor], own: set[str], members: int, scale: float) -> Tensor:
    """Normal on shared tensors, with the share 1 / M on those that each member has for itself."""
    law = torch.distributions.Normal(torch.zeros(()).double(), scale)
    parts = [
        law.log_prob(value).sum() / (members if name in own else 1) for name, value in phi.items() if ":" not in name
    ]
    return torch.stack(parts).sum()


def assert_potential(found: Any, chain: int, phi: dict[str, Tensor], likelihood: Tensor, prior: Tensor) -> None:
    """Value and gradient of the target of phi are those of autograd through the published network."""
    torch.testing.assert_close(found.log_likelihood[chain], likelihood.detach(), rtol=CLOSE, atol=CLOSE)
    torch.testing.assert_close(found.log_prior[chain], prior.detach(), rtol=CLOSE, atol=CLOSE)
    slopes = torch.autograd.grad(-(likelihood + prior), list(phi.values()), materialize_grads=True)
    expected = torch.cat([slope.reshape(-1) for slope in slopes])
    torch.testing.assert_close(found.gradient[chain], expected, rtol=1e-10, atol=CLOSE)


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
        own = {name for name in phi if name.endswith("bias") and isinstance(layer_of(work.model, name), LAYERS)}
        assert_potential(found, chain, phi, likelihood, log_prior(phi, own, 3, 0.7))


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


# LP-BNN


def decoded(phi: dict[str, Tensor], name: str, place: int, code: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """r (M, inputs) of a layer as published, with its part of the penalty."""
    part = {key.rpartition(":")[2]: value for key, value in phi.items() if key.startswith(f"{name}.weight:")}
    weight, bias = phi[":latent.weight"][place], phi[":latent.bias"][place]
    size = len(bias) // 2
    hidden = torch.relu(code @ part["encoder.weight"].T + part["encoder.bias"])
    mean = hidden @ weight[:size].T + bias[:size]
    log_variance = hidden @ weight[size:].T + bias[size:]
    latent = torch.distributions.Normal(mean, (0.5 * log_variance).exp())
    standard = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
    r = (mean + latent.scale * noise) @ part["decoder.weight"].T + part["decoder.bias"]
    return r, F.mse_loss(r, code) + torch.distributions.kl_divergence(latent, standard).sum()


@pytest.mark.parametrize(("make", "inputs"), MODELS)
def test_lpbnn_is_the_published_layer(make: Callable[[], nn.Module], inputs: Tensor) -> None:
    work = Trained(LPBNN(members=3, latent=4, latent_weight=0.3), make(), inputs, prior=0.7)
    rows = torch.tensor([0, 2, 3, 5, 7, 11])
    noise = work.kernel.map.noise(Streams(0, range(2), "step"), 6)
    found = work.target(work.state.position, {**work.state.buffers, **noise}, rows, training=True)
    layers = [name for name, layer in work.model.named_children() if isinstance(layer, LAYERS)]
    for chain in range(2):
        phi = work.phi(chain)
        codes = {name: work.state.buffers[f"{name}.weight:code"][chain] for name in layers}
        parts = {
            name: decoded(phi, name, place, codes[name], noise[":noise"][chain, :, place])
            for place, name in enumerate(layers)
        }
        values = []
        for number in range(3):

            def factors(name: str, layer: Any, number: int = number, parts: Any = parts, phi: Any = phi) -> Any:
                bias = None if layer.bias is None else phi[f"{name}.bias"][number]
                return parts[name][0][number], phi[f"{name}.weight:outputs"][number], bias

            direct = rebuilt(work.model, phi, factors).train()
            values.append(-F.cross_entropy(direct(inputs[rows]), LABELS[rows], reduction="none"))
            for name, value in statistics(direct).items():
                torch.testing.assert_close(found.buffers[name][chain, number], value, rtol=0, atol=CLOSE)
        likelihood = 2 * torch.stack(values).mean(0).sum() - 0.3 * sum(part[1] for part in parts.values())
        own = {f"{name}.bias" for name in layers}
        assert_potential(found, chain, phi, likelihood, log_prior(phi, own, 3, 0.7))


def test_the_penalty_of_a_latent_by_hand() -> None:
    """One layer, one unit, a latent of one: relu(2 c) = 2, mean 1, log variance ln 4, z = 1 + 2 eps, r = 3 z - 1."""
    model = nn.Linear(1, 1, bias=False).double()
    data = (torch.ones(4, 1).double(), torch.zeros(4, 1).double())
    method = LPBNN(members=2, latent=1)
    plan = method.plan(target_of(model, data, noise=1.0))
    members = plan.stages[0].kernel.map
    number = lambda *values: torch.tensor(values).double()  # noqa: E731
    phi = {
        "weight": number(5).reshape(1, 1), "weight:outputs": number(1, 2).reshape(2, 1),
        "weight:encoder.weight": number(2).reshape(1, 1), "weight:encoder.bias": number(0),
        ":latent.weight": number(0.5, 0).reshape(1, 2, 1), ":latent.bias": number(0, math.log(4)).reshape(1, 2),
        "weight:decoder.weight": number(3).reshape(1, 1), "weight:decoder.bias": number(-1),
    }  # fmt: skip
    assert set(phi) == set(members.tensors)
    noise = {"weight:code": number(1, 1).reshape(2, 1), ":noise": number(0, 0.5).reshape(2, 1, 1)}
    unrolled = members.unroll(phi, noise)
    # z = 1 and 2, r = 2 and 5, so weights 5 * 2 * 1 and 5 * 5 * 2; (r - c)^2 = 1 and 16; KL = (1 + 4 - 1 - ln 4) / 2.
    assert unrolled.sampled["weight"].flatten().tolist() == pytest.approx([10, 50])
    assert float(unrolled.penalty) == pytest.approx(17 / 2 + 2 * (4 - math.log(4)) / 2)
    still = members.unroll(phi, {"weight:code": noise["weight:code"]})  # evaluation: the mean
    assert still.sampled["weight"].flatten().tolist() == pytest.approx([10, 20])


def test_members_of_lpbnn_take_turns_and_decode_fresh_latents(tmp_path: Path) -> None:
    model, data = perceptron().float(), (FLAT.float(), LABELS)
    method = LPBNN(members=2, draws=5, latent=3, epochs=2, batch=4)
    found = ob.sample(model, data, method, chains=2, compile=False)
    assert found.chain.tolist() == [0] * 5 + [1] * 5
    biases, weights = found.tensor("5.bias"), found.tensor("0.weight")
    assert torch.equal(biases[0], biases[2]) and torch.equal(biases[0], biases[4]) and torch.equal(biases[1], biases[3])
    assert not torch.equal(biases[0], biases[1])
    ratio = weights[2] / weights[0]  # the same rows, other columns
    torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio), rtol=1e-3, atol=1e-3)
    assert float((ratio[0] - 1).abs().max()) > 1e-3
    options: dict[str, Any] = {"chains": 2, "compile": False, "path": tmp_path / "run"}
    few = ob.sample(model, data, LPBNN(members=2, latent=3, epochs=2, batch=4), **options)
    assert torch.equal(few.tensor("0.weight")[:2], weights[:2]) and len(few) == 4
    assert torch.equal(ob.sample(model, data, method, **options).tensor("0.weight"), weights)  # a run that goes on


def test_each_example_meets_each_member_of_lpbnn() -> None:
    """Unlike in the published layer: one example alone has the mean of all members as its log likelihood."""
    work = Trained(LPBNN(members=3, latent=4), perceptron(), FLAT, prior=None)
    noise = work.kernel.map.noise(Streams(0, range(2), "step"), 1)
    sampled = work.kernel.map.unroll(work.phi(0), {k: v[0] for k, v in {**work.state.buffers, **noise}.items()})
    shared = {name: value[0] for name, value in work.state.buffers.items() if "running" in name or "num" in name}
    values = []
    for number in range(3):
        network = copy.deepcopy(work.model).eval()
        own = {name: value[number] for name, value in shared.items()}
        states = {
            name: value[number] if value.dim() > work.model.state_dict()[name].dim() else value
            for name, value in sampled.sampled.items()
        }
        network.load_state_dict({**own, **states})
        values.append(-F.cross_entropy(network(FLAT[2:3]), LABELS[2:3]))
    found = work.target(work.state.position, {**work.state.buffers, **noise}, torch.tensor([2]), training=False)
    assert sampled.penalty is not None
    expected = 12 * torch.stack(values).mean() - sampled.penalty
    torch.testing.assert_close(found.log_likelihood[0], expected.detach(), rtol=CLOSE, atol=CLOSE)


# Masksembles


@pytest.mark.parametrize(("make", "inputs"), MODELS)
def test_masksembles_is_the_published_layer(make: Callable[[], nn.Module], inputs: Tensor) -> None:
    work = Trained(Masksembles(members=3, scale=1.5), make(), inputs, prior=0.7)
    rows = torch.tensor([0, 2, 3, 5, 7, 11])
    found = work.target(work.state.position, work.state.buffers, rows, training=True)
    masked = [name for name, layer in work.model.named_children() if isinstance(layer, LAYERS)][1:]
    for chain in range(2):
        phi, values = work.phi(chain), []
        for number in range(3):

            def factors(name: str, layer: Any, number: int = number, chain: int = chain, phi: Any = phi) -> Any:
                r = work.state.buffers[f"{name}.weight:mask"][chain, number] if name in masked else None
                return r, None, None if layer.bias is None else phi[f"{name}.bias"]

            direct = rebuilt(work.model, phi, factors).train()
            values.append(-F.cross_entropy(direct(inputs[rows]), LABELS[rows], reduction="none"))
            for name, value in statistics(direct).items():
                torch.testing.assert_close(found.buffers[name][chain, number], value, rtol=0, atol=CLOSE)
        assert_potential(found, chain, phi, 2 * torch.stack(values).mean(0).sum(), log_prior(phi, set(), 3, 0.7))


@pytest.mark.parametrize("scale", [1.0, 1.3, 2.0, 3.5, 1e6])
@pytest.mark.parametrize("members", [2, 4, 7])
@pytest.mark.parametrize("units", [1, 3, 10, 64])
def test_masks_keep_equally_many_units_and_every_unit_is_kept(units: int, members: int, scale: float) -> None:
    found = masks(units, members, scale, torch.Generator().manual_seed(units))
    kept = kept_units(units, members, scale)
    assert found.shape == (members, units) and set(found.unique().tolist()) <= {0.0, 1.0}
    assert found.sum(1).tolist() == [kept] * members and bool(found.any(0).all())
    if scale == 1:
        assert kept == units
    if scale == 1e6:
        assert kept == -(-units // members)


def test_masks_overlap_by_one_over_the_scale() -> None:
    for scale in (1.5, 2.0, 4.0):
        stream, shares = torch.Generator().manual_seed(1), []
        for _ in range(60):
            found = masks(120, 4, scale, stream)
            shared = (found @ found.T) / kept_units(120, 4, scale)
            shares.append(float(shared[~torch.eye(4, dtype=torch.bool)].mean()))
        values = torch.tensor(shares)
        # Units are whole, so is the number that is kept: of 120 it moves the share by up to 2 %.
        assert abs(float(values.mean()) - 1 / scale) < 0.02 + 4.5 * float(values.std()) / 60**0.5


def test_all_families_of_masks_are_equally_likely() -> None:
    """4 units, 2 masks that keep 3: of 16 pairs of subsets the 12 that differ cover all units."""
    stream = torch.Generator().manual_seed(0)
    assert kept_units(4, 2, 2.0) == 3
    drawn = [tuple(masks(4, 2, 2.0, stream).flatten().int().tolist()) for _ in range(1200)]
    subsets = [tuple(int(unit != left) for unit in range(4)) for left in range(4)]
    families = {a + b for a, b in itertools.product(subsets, subsets) if a != b}
    assert set(drawn) == families
    square = sum((drawn.count(family) - 100) ** 2 / 100 for family in families)
    assert square < 31.3  # the 99.9 % quantile of chi squared with 11 degrees of freedom


def test_masks_are_of_the_chain_and_fold_into_columns() -> None:
    work = Trained(Masksembles(members=3), convolutional(), IMAGES)
    assert {name for name in work.state.buffers if ":" in name} == {"3.weight:mask", "6.weight:mask"}
    mask = work.state.buffers["6.weight:mask"]
    assert not torch.equal(mask[0], mask[1])
    for number in range(3):
        weights = work.base.layout.split(work.member(number).position)
        assert torch.equal(weights["6.weight"] != 0, mask[:, number, None].expand(2, 3, 24) != 0)
        kept = mask[0, number].bool()
        start = work.base.layout.split(work.start.position)["6.weight"]
        assert torch.equal(weights["6.weight"][0][:, kept], start[0][:, kept])
    named = Trained(Masksembles(members=3, scale={"0": 1.5}), convolutional(), IMAGES)
    assert {name for name in named.state.buffers if ":" in name} == {"0.weight:mask"}


def test_masks_that_would_act_elsewhere_are_refused() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    model[2].weight = model[0].weight
    with pytest.raises(InputError, match="found 0, whose weights also act elsewhere: give scale= as a dict"):
        Masksembles(scale={"0": 2.0}).plan(target_of(model, (FLAT, LABELS)))
    with pytest.raises(InputError, match=r"a scale of masks from 1 on, found 0\.5"):
        Masksembles(scale=0.5)
    with pytest.raises(InputError, match="names or patterns of linear and convolution layers in scale, found 'no'"):
        Masksembles(scale={"no": 2.0}).plan(target_of(model, (FLAT, LABELS)))


# MIMO


class Several(nn.Module):
    """MIMO as published: inputs side by side into one wide layer, heads side by side out of another."""

    def __init__(self, model: nn.Module, phi: dict[str, Tensor], members: int) -> None:
        super().__init__()
        names = [name for name, layer in model.named_children() if isinstance(layer, LAYERS)]
        wide = {**phi, f"{names[0]}.weight": torch.cat(list(phi[f"{names[0]}.weight"]), 1)}
        for part in ("weight", "bias"):
            wide[f"{names[-1]}.{part}"] = torch.cat(list(phi[f"{names[-1]}.{part}"]), 0)
        self.members = members
        self.inner = rebuilt(model, wide, lambda name, layer: (None, None, wide.get(f"{name}.bias")))

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.inner(torch.cat(inputs, 1)).unflatten(1, (self.members, -1))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("make", "inputs"), MODELS)
def test_mimo_is_the_published_network(make: Callable[[], nn.Module], inputs: Tensor) -> None:
    method = MIMO(members=3, repetition=2, input_repetition_probability=0.4, batch=6)
    work = Trained(method, make(), inputs, prior=0.7)
    rows = torch.tensor([0, 2, 3, 5, 7, 11])
    noise = work.kernel.map.noise(Streams(0, range(2), "step"), 6)
    found = work.target(work.state.position, {**work.state.buffers, **noise}, rows, training=True)
    last = [name for name, layer in work.model.named_children() if isinstance(layer, LAYERS)][-1]
    for chain in range(2):
        phi, seen = work.phi(chain), rows[noise[":order"][chain]]
        direct = Several(work.model, phi, 3).train()
        outputs = direct(*(inputs[own] for own in seen))
        values = [-F.cross_entropy(outputs[:, head], LABELS[seen[head]], reduction="sum") for head in range(3)]
        likelihood = 12 / 6 * torch.stack(values).mean() / 2  # heads, and two repetitions of six
        own = {f"{last}.weight", f"{last}.bias"}
        assert_potential(found, chain, phi, likelihood, log_prior(phi, own, 3, 0.7))
        for name, value in statistics(direct.inner).items():
            torch.testing.assert_close(found.buffers[name][chain], value, rtol=0, atol=CLOSE)


def test_slots_of_mixed_examples_are_judged_by_both_targets() -> None:
    work = Trained(MIMO(members=3, repetition=2, batch=6), perceptron(), FLAT, prior=None)
    rows = torch.tensor([0, 2, 3, 5, 7, 11])
    noise = work.kernel.map.noise(Streams(0, range(2), "step"), 6)
    mixed: list[MiniBatch] = []

    def change(batch: MiniBatch) -> MiniBatch:
        mixed.append(ob.Mixup(alpha=1.0).apply(batch, [torch.Generator().manual_seed(chain) for chain in range(2)]))
        return mixed[0]

    each = rows.expand(2, -1)
    state = work.state
    found = work.target(state.position, {**state.buffers, **noise}, each, training=True, change=change)
    batch = mixed[0]
    assert batch.partners is not None and batch.share is not None
    for chain in range(2):
        phi, seen = work.phi(chain), noise[":order"][chain]
        outputs = Several(work.model, phi, 3).train()(*(batch.inputs[0][chain][own] for own in seen))
        values = []
        for head, own in enumerate(seen):
            logs = outputs[:, head].log_softmax(1)
            pair = [logs.gather(1, goals[chain][own][:, None])[:, 0] for goals in (batch.targets, batch.partners)]
            share = batch.share[chain][own]
            values.append((share * pair[0] + (1 - share) * pair[1]).sum())
        likelihood = 12 / 6 * torch.stack(values).mean() / 2
        assert_potential(found, chain, phi, likelihood, torch.zeros((), dtype=torch.float64))


@pytest.mark.parametrize("method", [LPBNN(members=3, latent=4, latent_weight=5.0), MIMO(members=3)])
def test_bfloat16_is_for_the_networks_not_for_penalties_and_losses(method: Any) -> None:
    """At weights of zero outputs are the last bias, in any precision; what differs is what is computed around them."""
    seen: list[torch.dtype] = []

    def likelihood(outputs: Tensor, targets: Tensor) -> Tensor:
        seen.append(outputs.dtype)
        return -F.cross_entropy(outputs, targets, reduction="none")

    work = Trained(method, perceptron().float(), FLAT.float(), likelihood=likelihood)
    seen.clear()
    phi = work.target.layout.split(work.state.position)
    still = {name: value if ":" in name else torch.zeros_like(value) for name, value in phi.items()}
    place, rows = work.target.layout.join(still), torch.arange(12)
    buffers = {**work.state.buffers, **work.kernel.map.noise(Streams(0, range(2), "step"), 12)}
    full, half = (work.target(place, buffers, rows, training=True, bf16=bf16) for bf16 in (False, True))
    torch.testing.assert_close(half.potential, full.potential, rtol=1e-6, atol=0)
    assert set(seen) == {torch.float32}


@pytest.mark.parametrize(("make", "inputs"), MODELS)
def test_a_member_of_mimo_is_a_head_that_sees_the_input_in_every_slot(
    make: Callable[[], nn.Module], inputs: Tensor
) -> None:
    work = Trained(MIMO(members=3), make(), inputs)
    networks = []
    for number in range(3):
        draws = work.member(number)
        networks.append(work.base.layout.networks(draws.position, draws.buffers))
    for chain in range(2):
        outputs = Several(work.model, work.phi(chain), 3).eval()(inputs, inputs, inputs)
        for number, members in enumerate(networks):
            network = copy.deepcopy(work.model).eval()
            network.load_state_dict({name: value[chain] for name, value in members.items()})
            torch.testing.assert_close(network(inputs), outputs[:, number], rtol=0, atol=CLOSE)
    start = work.base.layout.networks(work.start.position, work.start.buffers)
    for name, value in start.items():  # slots add up to the start network, whose head is the first
        torch.testing.assert_close(networks[0][name], value, rtol=0, atol=CLOSE)
    last = [name for name, layer in work.model.named_children() if isinstance(layer, LAYERS)][-1]
    assert not torch.equal(networks[0][f"{last}.weight"], networks[1][f"{last}.weight"])


def test_slots_begin_as_independent_layers() -> None:
    """Of variance v / M each, if the first layer is drawn with variance v."""
    wide = nn.Sequential(nn.Linear(60, 90), nn.ReLU(), nn.Linear(90, 3)).double()
    slots = Trained(MIMO(members=3), wide, numbers(12, 60)).phi(0)["0.weight"].detach().flatten(1)
    variance = 1 / (3 * 60) / 3  # torch draws uniformly between -1 / sqrt(60) and 1 / sqrt(60)
    found = slots @ slots.T / slots.shape[1] / variance
    assert float((found - torch.eye(3)).abs().max()) < 4.5 * (2 / slots.shape[1]) ** 0.5


def test_slots_see_every_example_as_often_and_agree_where_they_should() -> None:
    stream = torch.Generator().manual_seed(0)
    found = order(10, 3, 2, 0.3, stream)
    assert found.shape == (3, 20) and found.sort(1).values.equal(torch.arange(10).repeat_interleave(2).expand(3, 20))
    assert bool((found[:, 14:] == found[0, 14:]).all())
    assert int((found[0, :14] == found[1, :14]).sum()) < 8
    assert bool((order(5, 2, 1, 1.0, stream)[0] == order(5, 2, 1, 1.0, stream)[0]).all()) is False
    alike = order(5, 2, 1, 1.0, stream)
    assert torch.equal(alike[0], alike[1])


class Bypass(nn.Module):
    """Its inputs are used beside the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.relu(self.inner(x)) + x[:, :6])


def test_mimo_refuses_what_it_cannot_lay_side_by_side() -> None:
    tied = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.Linear(6, 3)).double()
    tied[2].weight = tied[0].weight
    grouped = nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.Flatten(), nn.Linear(64, 3)).double()
    for model, inputs in ((tied, FLAT), (grouped, IMAGES)):
        with pytest.raises(InputError, match="slots with equal inputs do not add up"):
            MIMO().plan(target_of(model, (inputs, LABELS)))
    with pytest.raises(InputError, match=r"expected at least two layers for mimo, .* found one"):
        MIMO().plan(target_of(nn.Linear(6, 3), (FLAT, LABELS)))
    normed = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3), nn.BatchNorm1d(3))
    with pytest.raises(InputError, match=r"no batch norm behind the last layer.*found 2"):
        MIMO().plan(target_of(normed, (FLAT, LABELS)))
    with pytest.raises(InputError, match="mini-batches of at most piece=5 examples to shuffle, found batch=None of 12"):
        MIMO(batch=None).plan(target_of(perceptron(), (FLAT, LABELS), piece=5))
    with pytest.raises(InputError, match=r"an input_repetition_probability from 0 to 1, found 2\.0"):
        MIMO(input_repetition_probability=2.0)
    bypass = Trained(MIMO(members=2), Bypass().double(), FLAT)  # the first slot's input goes by: equal inputs agree
    assert bypass.kernel.map.axis == 1  # type: ignore[attr-defined]


def test_slots_of_a_sequence_lie_on_its_features() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(6, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.outer(torch.relu(self.inner(x)).mean(1))

    work = Trained(MIMO(members=2), Pooled().double(), numbers(12, 4, 6))
    assert work.kernel.map.axis == -1  # type: ignore[attr-defined]
    noise = work.kernel.map.noise(Streams(0, range(2), "step"), 12)
    assert bool(torch.isfinite(work.target(work.state.position, noise, training=True).gradient).all())


def test_heads_need_not_be_at_the_end() -> None:
    """What follows the last layer, as a learned noise level, is computed for each head."""
    model = ob.LearnedNoise(nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1))).double()
    found = ob.sample(model, (FLAT, FLAT[:, :1]), MIMO(members=2, epochs=2), noise="learned", compile=False)
    assert len(found) == 2 and torch.equal(found.tensor("log_noise")[0], found.tensor("log_noise")[1])


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
@pytest.mark.parametrize("training", [True, False])
def test_members_one_by_one_are_those_of_one_pass(method: str, training: bool) -> None:
    work = Trained(ob.inference.METHODS[method](**OPTIONS[method]), convolutional(), IMAGES)
    noise = work.kernel.map.noise(Streams(0, range(2), "step"), 12) if training else {}
    arguments = work.state.position, {**work.state.buffers, **noise}
    together = work.target(*arguments, training=training)
    work.kernel.map._looped = True
    work.target._functions.clear()
    apart = work.target(*arguments, training=training)
    torch.testing.assert_close(apart.potential, together.potential, rtol=CLOSE, atol=CLOSE)
    torch.testing.assert_close(apart.gradient, together.gradient, rtol=1e-9, atol=1e-9)
    for name, value in together.buffers.items():
        torch.testing.assert_close(apart.buffers[name], value, rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("method", list(OPTIONS))
def test_a_run_that_was_interrupted_ends_as_one_that_was_not(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "_CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(driver, "_SECONDS", 0.0)
    chosen = ob.inference.METHODS[method](epochs=15, batch=4, **OPTIONS[method])
    model, data = convolutional().float(), (IMAGES.float(), LABELS)
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
def test_trainings_that_are_computed_together_do_not_depend_on_each_other(method: str) -> None:
    chosen = ob.inference.METHODS[method](epochs=3, batch=4, **OPTIONS[method])
    together, alone = (
        ob.sample(perceptron(), (FLAT, LABELS), chosen, chains=2, chains_per_batch=size, compile=False)
        for size in (2, 1)
    )
    for name in together.names:
        torch.testing.assert_close(together.tensor(name), alone.tensor(name), rtol=1e-9, atol=1e-9)


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
