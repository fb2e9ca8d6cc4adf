"""Members that were unrolled compute what the implicit network computes for them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn

import onebasin as ob
from onebasin.errors import InputError, OnebasinError, SpecError
from onebasin.inference.member_weights import block_diagonal, scaled_weights
from tests.implicit_layers import (
    DOUBLE,
    Batched,
    Bayes,
    LatentPosterior,
    Masked,
    MCBatchNorm2d,
    OldPackedLinear,
    PackedConv2d,
    PackedLinear,
    Slots,
    plain,
    settled,
)

M = 3
Layer = Callable[..., nn.Module]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def ordinary(*sizes: int, **options: Any) -> nn.Module:
    return plain(*sizes, **{"bias": True, **options})


def of(kind: Layer) -> Layer:
    return lambda *sizes, **options: kind(M, *sizes, **options)


def mlp(layer: Layer = ordinary, first: Layer | None = None, **options: Any) -> nn.Sequential:
    layers = [(first or layer)(4, 12, **options), layer(12, 12, **options), layer(12, 3, **options)]
    return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])


def cnn(layer: Layer = ordinary, head: Layer | None = None, norm: Layer = nn.BatchNorm2d) -> nn.Sequential:
    return nn.Sequential(
        layer(2, 6, 3, padding=1),
        norm(6).double(),
        nn.ReLU(),
        layer(6, 8, 3, groups=2, stride=2, bias=False),
        norm(8).double(),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        (head or layer)(32, 3),
    )


def packed_mlp(layer: Layer, gamma: int = 1) -> nn.Sequential:
    """The members have widths 4, 12, 12, 3."""
    return nn.Sequential(
        layer(M, 4, M * 12, first=True),
        nn.ReLU(),
        layer(M, M * 12, M * 12, gamma=gamma),
        nn.ReLU(),
        layer(M, M * 12, M * 3, last=True),
    )


def packed_cnn(gamma: int = 1) -> nn.Sequential:
    return nn.Sequential(
        PackedConv2d(M, 2, M * 6, 3, first=True, padding=1),
        nn.BatchNorm2d(M * 6, **DOUBLE),
        nn.ReLU(),
        PackedConv2d(M, M * 6, M * 8, 3, gamma=gamma, stride=2, bias=False),
        nn.BatchNorm2d(M * 8, **DOUBLE),
        nn.PReLU(M * 8, **DOUBLE),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        PackedLinear(M, M * 32, M * 3, last=True),
    )


def narrow_cnn(groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        plain(2, 6, 3, padding=1, bias=True),
        nn.BatchNorm2d(6, **DOUBLE),
        nn.ReLU(),
        plain(6, 8, 3, stride=2, groups=groups),
        nn.BatchNorm2d(8, **DOUBLE),
        nn.PReLU(8, **DOUBLE),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        plain(32, 3, bias=True),
    )


VECTORS, IMAGES = (5, 4), (5, 2, 7, 7)


def unrolled(base: nn.Module, implicit: Any, **options: Any) -> ob.Population:
    population = ob.unroll(base, implicit, **options)
    assert isinstance(population, ob.Population)
    return population


def outputs(base: nn.Module, population: ob.Population, x: Tensor) -> Tensor:
    """(members, examples, classes)."""
    calls = [torch.func.functional_call(base.eval(), population.member(m), x) for m in range(len(population))]
    return torch.stack(calls)


def check_members(base: nn.Module, implicit: nn.Module, x: Tensor, repeated: bool = True) -> ob.Population:
    settled(implicit)
    population = unrolled(base, implicit)
    expected = implicit(x.repeat(M, *(1,) * (x.dim() - 1)) if repeated else x).detach().unflatten(0, (M, len(x)))
    found = outputs(base, population, x)
    assert len(population) == M and found.dtype == torch.float64
    assert float((found - expected).abs().max()) <= 1e-12 * max(1.0, float(expected.abs().max()))
    assert float((expected[0] - expected[1]).abs().max()) > 1e-3  # members differ, so their order was tested too
    return population


REPEATED = {
    "BatchEnsemble": Batched,
    "Masksembles": Masked,
    "LPBNN": LatentPosterior,
}


@pytest.mark.parametrize("kind", REPEATED)
@pytest.mark.parametrize(("build", "shape"), [(mlp, VECTORS), (cnn, IMAGES)])
def test_members_compute_what_the_layers_compute(kind: str, build: Layer, shape: tuple[int, ...]) -> None:
    implicit = build(of(REPEATED[kind]))
    population = check_members(build(), implicit, torch.randn(*shape, **DOUBLE))
    assert population.provenance["unrolled"] == kind and population.provenance["members"] == M
    assert set(population.provenance["layers"].values()) == {kind}
    assert population.chain is not None and population.chain.tolist() == [0, 0, 0]


def test_a_batch_norm_is_shared_in_evaluation_mode() -> None:
    implicit = settled(cnn(of(Batched)))
    population = unrolled(cnn(), implicit)
    for name in ("1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"):
        assert all(torch.equal(row, implicit.state_dict()[name]) for row in population.tensor(name))


def test_ordinary_layers_may_stand_between_implicit_ones() -> None:
    population = check_members(mlp(), mlp(of(Masked), first=ordinary), torch.randn(*VECTORS, **DOUBLE))
    assert population.provenance["layers"] == {"2": "Masksembles", "4": "Masksembles"}


def test_layers_without_biases_or_factors_of_outputs() -> None:
    base = nn.Sequential(plain(2, 6, 3), nn.ReLU(), nn.Flatten(), plain(150, 3))
    for implicit in (
        nn.Sequential(
            LatentPosterior(M, 2, 6, 3, gamma=False, bias=False),
            nn.ReLU(),
            nn.Flatten(),
            LatentPosterior(M, 150, 3, bias=False),
        ),
        nn.Sequential(Batched(M, 2, 6, 3, bias=False), nn.ReLU(), nn.Flatten(), Batched(M, 150, 3, bias=False)),
    ):
        check_members(base, implicit, torch.randn(*IMAGES, **DOUBLE))


def test_transposed_convolutions_with_groups() -> None:
    base = nn.Sequential(
        plain(4, 6, 3, transposed=True, groups=2, bias=True), nn.ReLU(), plain(6, 4, 3, transposed=True)
    )
    batched = nn.Sequential(
        Batched(M, 4, 6, 3, transposed=True, groups=2), nn.ReLU(), Batched(M, 6, 4, 3, transposed=True, bias=False)
    )
    check_members(base, batched, torch.randn(2, 4, 5, 5, **DOUBLE))
    base = nn.Sequential(*(plain(4, 4, 3, transposed=True, bias=True) for _ in range(3)))
    packed = nn.Sequential(
        PackedConv2d(M, 4, M * 4, 3, first=True, transposed=True),
        PackedConv2d(M, M * 4, M * 4, 3, gamma=2, transposed=True),
        PackedConv2d(M, M * 4, M * 4, 3, last=True, transposed=True),
    )
    check_members(base, packed, torch.randn(2, 4, 5, 5, **DOUBLE), repeated=False)


@pytest.mark.parametrize("gamma", [1, 2])
@pytest.mark.parametrize("layer", [PackedLinear, OldPackedLinear])
def test_packed_layers_are_networks_side_by_side(layer: Layer, gamma: int) -> None:
    population = check_members(mlp(), packed_mlp(layer, gamma), torch.randn(*VECTORS, **DOUBLE), repeated=False)
    assert population.provenance["unrolled"] == "Packed-Ensembles"
    assert population.chain is not None and population.chain.tolist() == [0, 1, 2]  # no tensor is shared
    # gamma groups within a member are a block diagonal of its weight, which a linear layer holds with zeros
    zeros = (population.tensor("2.weight") == 0).double().mean()
    assert float(zeros) == 1 - 1 / gamma


@pytest.mark.parametrize(("gamma", "groups"), [(1, 1), (2, 2), (2, 1)])
def test_packed_convolutions_split_their_batch_norms(gamma: int, groups: int) -> None:
    implicit = packed_cnn(gamma)
    population = check_members(narrow_cnn(groups), implicit, torch.randn(*IMAGES, **DOUBLE), repeated=False)
    means = implicit.state_dict()["1.running_mean"]
    assert torch.equal(population.tensor("1.running_mean"), means.reshape(M, 6))
    assert population.tensor("1.num_batches_tracked").tolist() == [7, 7, 7]


@pytest.mark.parametrize(("build", "shape"), [(mlp, VECTORS), (cnn, IMAGES)])
def test_mimo_sums_its_slots_and_parts_its_heads(build: Layer, shape: tuple[int, ...]) -> None:
    wide = build()
    wide[0] = plain(M * 4, 12, bias=True) if build is mlp else plain(M * 2, 6, 3, padding=1, bias=True)
    wide[-1] = plain(12 if build is mlp else 32, M * 3, bias=True)
    population = check_members(build(), Slots(M, wide), torch.randn(*shape, **DOUBLE))
    assert population.provenance["unrolled"] == "MIMO" and population.provenance["prefix"] == "core_model."
    trunk = population.tensor("2.weight" if build is mlp else "3.weight")
    assert torch.equal(trunk[0], trunk[1])


def test_mimo_of_one_layer() -> None:
    check_members(plain(4, 2, bias=True), Slots(M, plain(M * 4, M * 2, bias=True)), torch.randn(*VECTORS, **DOUBLE))


class HeadFirst(nn.Module):
    """An MLP that registers its last layer first, as that of the library does."""

    def __init__(self, inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        self.final_layer = plain(width, outputs, bias=True)
        self.layers = nn.ModuleList([plain(inputs, width, bias=True)])

    def forward(self, x: Tensor) -> Tensor:
        return self.final_layer(self.layers[0](x).relu())


def test_a_wider_network_is_not_mistaken_for_mimo() -> None:
    check_members(HeadFirst(4, 12, 2), Slots(M, HeadFirst(M * 4, 12, M * 2)), torch.randn(*VECTORS, **DOUBLE))
    for base, wide in ((HeadFirst(4, 12, 2), HeadFirst(4, 24, 2)), (mlp(), nn.Sequential(*wider_mlp()))):
        with pytest.raises(InputError, match="recognised none"):
            ob.unroll(base, wide)


def wider_mlp() -> list[nn.Module]:
    return [plain(4, 24, bias=True), nn.ReLU(), plain(24, 24, bias=True), nn.ReLU(), plain(24, 3, bias=True)]


def test_mc_batch_norm_gives_a_network_per_batch() -> None:
    implicit = cnn(norm=lambda channels: MCBatchNorm2d(channels, M)).eval()
    norms = [module for module in implicit if isinstance(module, MCBatchNorm2d)]
    for norm in norms:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)

    def forward(counter: int, x: Tensor, accumulate: bool) -> Tensor:
        for norm in norms:
            norm.counter, norm.accumulate = counter, accumulate
        return implicit(x).detach()

    with pytest.raises(SpecError, match=r"1\.means .*never filled"):
        ob.unroll(cnn(), implicit)
    with torch.no_grad():
        for counter in range(M):
            forward(counter, torch.randn(6, 2, 7, 7, **DOUBLE), accumulate=True)
    x = torch.randn(*IMAGES, **DOUBLE)
    expected = torch.stack([forward(counter, x, accumulate=False) for counter in range(M)])
    population = unrolled(cnn(), implicit)
    assert population.provenance["unrolled"] == "MCBatchNorm"
    assert float((outputs(cnn(), population, x) - expected).abs().max()) <= 1e-12
    assert float((expected[0] - expected[1]).abs().max()) > 1e-3
    weights = population.tensor("0.weight")
    assert torch.equal(weights[0], weights[1])


@pytest.mark.parametrize(("build", "shape"), [(mlp, VECTORS), (cnn, IMAGES)])
def test_mean_field_layers_become_a_posterior(build: Layer, shape: tuple[int, ...]) -> None:
    implicit = settled(build(Bayes))
    posterior = ob.unroll(build(), implicit)
    assert isinstance(posterior, ob.Posterior) and posterior.provenance["unrolled"] == "mean-field VI"
    bayesian = [module for module in implicit if isinstance(module, Bayes)]
    std = posterior.std
    for path, module in zip(posterior.provenance["layers"], bayesian, strict=True):
        assert torch.equal(posterior.mean[f"{path}.weight"], module.weight_mu)
        assert (
            float((std[f"{path}.weight"] - torch.log1p(torch.exp(module.weight_sigma.detach()))).abs().max()) <= 1e-15
        )
    if build is cnn:  # ordinary layers are constants
        assert "1.weight" in posterior.layout.buffer_names and not bool(std["1.weight"].any())
    x = torch.randn(*shape, **DOUBLE)
    draws = 1000
    with torch.no_grad():
        theirs = torch.stack([implicit(x) for _ in range(draws)])
    ours = ob.predict(build().eval(), posterior.draw(draws, torch.Generator().manual_seed(1)), x, quantity="logits")
    error = (theirs.var(0) / draws + ours.var(0) / draws).sqrt()
    assert float(((theirs.mean(0) - ours.mean(0)) / error).abs().max()) < 5
    ratio = (ours.var(0) / theirs.var(0)).log()
    assert float(ratio.abs().max()) < 5 * (4 / draws) ** 0.5 * 1.5  # variances of nearly normal numbers


def test_draws_of_latents() -> None:
    implicit, base = settled(mlp(of(LatentPosterior))), mlp()
    mean = unrolled(base, implicit)
    few, more = unrolled(base, implicit, draws=2, seed=3), unrolled(base, implicit, draws=800, seed=3)
    assert len(few) == 2 * M and len(more) == 800 * M and more.provenance["draws"] == 800
    assert torch.equal(few.to_flat(), more.to_flat()[: 2 * M])  # more draws keep the first
    assert not torch.equal(few.to_flat(), unrolled(base, implicit, draws=2, seed=4).to_flat())
    # The factors of inputs are linear in latents: mean and covariance of the weights have a closed form.
    layer = implicit[0]
    assert isinstance(layer, LatentPosterior)
    std = 0.01 * (layer.latent_logvar(layer.encoder(layer.alpha).relu()) / 2).exp()
    shared = (layer.gamma[:, :, None] * layer.linear.weight).detach()  # (M, outputs, inputs)
    variance = shared**2 * (std**2 @ (layer.decoder.weight**2).T).detach()[:, None]
    drawn = more.tensor("0.weight").unflatten(0, (800, M))
    error = (variance / 800).sqrt()
    assert float(((drawn.mean(0) - mean.tensor("0.weight")) / error).abs().max()) < 5
    assert float((drawn.var(0) / variance).log().abs().max()) < 5 * (2 / 800) ** 0.5
    # One draw, given to the layers as their latents: the same forward pass.
    wide = unrolled(base, implicit, draws=1, std_factor=1.0)
    x = torch.randn(*VECTORS, **DOUBLE)
    for path, module in implicit.named_children():
        if isinstance(module, LatentPosterior):
            hidden = module.encoder(module.alpha).relu()
            noise = torch.randn(M, 3, generator=ob.generator(0, "latents", path, 0), **DOUBLE)
            module.drawn = module.latent_mean(hidden) + (module.latent_logvar(hidden) / 2).exp() * noise
    expected = implicit(x.repeat(M, 1)).detach().unflatten(0, (M, len(x)))
    assert float((outputs(base, wide, x) - expected).abs().max()) <= 1e-12 * float(expected.abs().max())


def test_the_layout_of_the_published_lpbnn_layer() -> None:
    """Its members lie as (example, member): row n of the batch is what member n mod M computes."""
    implicit, base, x = settled(mlp(of(LatentPosterior))), mlp(), torch.randn(6, 4, **DOUBLE)
    for module in implicit:
        if isinstance(module, LatentPosterior):
            module.example_first = True
    rows = implicit(x.repeat(M, 1)).detach()  # (member, example) says the wrapper
    members = outputs(base, unrolled(base, implicit), x)
    for row, found in enumerate(rows):
        assert torch.allclose(found, members[row % M, row % 6], atol=1e-12)
    assert torch.equal(rows[:6], rows[6:12])  # with 6 a multiple of M, every example met one member


def test_prefixes_of_wrappers_and_what_they_hold_beside(tmp_path: Path) -> None:
    base, implicit = mlp(), mlp(of(Batched))
    state = {f"model.core_model.{name}": value for name, value in implicit.state_dict().items()}
    beside = {"post_processing.temperature": torch.ones(1), "num_estimators": torch.tensor(3)}
    again = {f"loss.model.{name.removeprefix('model.')}": value for name, value in state.items()}
    expected = unrolled(base, implicit).to_flat()
    torch.save({"epoch": 3, "state_dict": {**state, **beside, **again}}, tmp_path / "last.ckpt")
    save_file(implicit.state_dict(), tmp_path / "net.safetensors")
    torch.save(implicit.state_dict(), tmp_path / "net.pt")
    for source in (tmp_path / "last.ckpt", str(tmp_path / "net.safetensors"), tmp_path / "net.pt", {**state, **beside}):
        assert torch.equal(unrolled(base, source).to_flat(), expected)
    facts = unrolled(base, tmp_path / "last.ckpt").provenance
    assert (facts["prefix"], facts["left_out"], facts["file"]) == (
        "model.core_model.",
        ["loss", "num_estimators", "post_processing"],
        "last.ckpt",
    )
    assert len(facts["sha256"]) == 64


def test_lists_of_separate_networks() -> None:
    base, networks = cnn(), [settled(cnn()) for _ in range(11)]
    state = {f"core_models.{i}.{name}": t for i, net in enumerate(networks) for name, t in net.state_dict().items()}
    population = unrolled(base, state)
    assert torch.equal(population.to_flat(), ob.Population.from_models(networks).to_flat())  # 10 after 9
    assert population.chain is not None and population.chain.tolist() == list(range(11))
    collected = {name.replace("core_models", "saved_models"): value for name, value in state.items()}
    population = unrolled(base, collected | {f"core_model.{name}": t for name, t in base.state_dict().items()})
    assert len(population) == 11 and population.chain is not None and not bool(population.chain.any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes_are_those_of_the_network(dtype: torch.dtype) -> None:
    for implicit in (mlp(of(Batched)), mlp(of(Masked)), mlp(of(LatentPosterior)), packed_mlp(PackedLinear)):
        state = {n: t if n.endswith("masks") else t.to(dtype) for n, t in implicit.state_dict().items()}
        assert {value.dtype for value in unrolled(mlp(), state).spec.values()} == {dtype}
    posterior = ob.unroll(mlp(), {name: value.to(dtype) for name, value in mlp(Bayes).state_dict().items()})
    assert isinstance(posterior, ob.Posterior)
    assert {value.dtype for value in posterior.spec.values()} == {dtype}


def test_nothing_that_was_given_is_changed_or_aliased() -> None:
    base, implicit = cnn(), settled(cnn(of(Batched)))
    before = copy.deepcopy((base.state_dict(), implicit.state_dict()))
    population = unrolled(base, implicit)
    first = population.to_flat().clone()
    for part, state in zip((base, implicit), before, strict=True):
        assert all(torch.equal(value, state[name]) for name, value in part.state_dict().items())
    with torch.no_grad():
        for value in implicit.state_dict().values():
            value.zero_()
    assert torch.equal(population.to_flat(), first)


def test_masks_that_were_moved_are_taken_from_the_module() -> None:
    """Moved to a device when it was built, a mask is a plain attribute, and no state dict has it."""
    implicit = mlp(of(Masked))
    expected = unrolled(mlp(), implicit).to_flat()
    for module in implicit:
        if isinstance(module, Masked):
            masks = module.mask.masks.detach()
            del module.mask.masks
            module.mask.masks = masks
    assert torch.equal(unrolled(mlp(), implicit).to_flat(), expected)
    with pytest.raises(SpecError, match=r"0\.linear\.weight .*lacks its masks"):
        ob.unroll(mlp(), implicit.state_dict())


def replaced(state: dict[str, Tensor], **changes: Tensor | None) -> dict[str, Tensor]:
    changed = {name.replace("__", "."): value for name, value in changes.items()}
    return {name: value for name, value in {**state, **changed}.items() if value is not None}


def test_refusals_name_the_tensor() -> None:
    torch.manual_seed(1)
    batched, packed = mlp(of(Batched)).state_dict(), packed_mlp(PackedLinear).state_dict()
    cases: list[tuple[nn.Module, Any, type[OnebasinError], str]] = [
        (mlp(), mlp(), InputError, "ordinary network: open it with Population.open"),
        (mlp(), {"w": torch.zeros(2)}, InputError, r"at the layers of the base module \(0, 2, 4\).*like w"),
        (mlp(), replaced(batched, **{"2.s_group": None}), SpecError, r"expected 2\.s_group"),
        (mlp(), replaced(batched, **{"4.bias": None}), SpecError, r"expected 4\.bias"),
        (mlp(bias=False), batched, SpecError, r"found 0\.bias.*same biases"),
        (mlp(), replaced(batched, **{"2.r_group": torch.ones(3, 5)}), SpecError, r"2\.r_group .*\(M, 12\).*\(3, 5\)"),
        (mlp(), replaced(batched, **{"2.s_group": torch.ones(2, 12)}), SpecError, r"2\.s_group"),
        (mlp(), replaced(batched, **{"9.weight": torch.ones(2)}), SpecError, r"found 9\.weight"),
        (mlp(), {**batched, **mlp(of(Masked), first=of(Batched)).state_dict()}, SpecError, "Masksembles|masks"),
        (wide_packed_base(), packed, SpecError, "one number of members|width of one"),
        (mlp(), replaced(packed, **{"2.weight": torch.ones(3, 12, 7)}), SpecError, r"2\.weight .*\(3, 12, 7\)"),
        (
            cnn(),
            replaced(cnn(of(Batched)).state_dict(), **{"1.weight": torch.ones(18)}),
            SpecError,
            r"1\.weight|1\.run",
        ),
        (nn.ReLU(), batched, InputError, "without any"),
    ]
    for base, network, error, message in cases:
        with pytest.raises(error, match=message) as raised:
            ob.unroll(base, network)
        assert "\n" not in str(raised.value)
    swapped: Any = ob.unroll
    with pytest.raises(InputError, match="expected the base module first, found OrderedDict"):
        swapped(batched, mlp())
    for wrong in (5, [batched], ob.Population.from_models([mlp()])):
        with pytest.raises(OnebasinError, match="expected"):
            swapped(mlp(), wrong)
    for network, message in ((batched, "draws= is for LPBNN"), (mlp(Bayes), "draw from the posterior")):
        with pytest.raises(InputError, match=message):
            ob.unroll(mlp(), network, draws=2)
    with pytest.raises(InputError, match="expected draws >= 1, found 0"):
        ob.unroll(mlp(), mlp(of(LatentPosterior)), draws=0)
    averaged = {f"{place}.{n}": t for place in ("core_model", "ema_model") for n, t in mlp().state_dict().items()}
    with pytest.raises(InputError, match=r"ordinary networks under 'core_model\.' and 'ema_model\.'"):
        ob.unroll(mlp(), averaged)
    with pytest.raises(InputError, match="std_factor= is for LPBNN"):
        ob.unroll(mlp(), batched, std_factor=1.0)
    both = {f"a.{n}": t for n, t in batched.items()} | {f"b.{n}": 2 * t for n, t in batched.items()}
    with pytest.raises(InputError, match=r"one implicit network .*'a\.'.*'b\.'"):
        ob.unroll(mlp(), both)


def wide_packed_base() -> nn.Sequential:
    """A base of twice the width of a member."""
    return nn.Sequential(*wider_mlp())


def test_layers_of_two_kinds_are_refused() -> None:
    mixed = mlp(of(Batched))
    mixed[2] = Masked(M, 12, 12)
    with pytest.raises(SpecError, match="BatchEnsemble at 0 and Masksembles at 2"):
        ob.unroll(mlp(), mixed)


def test_a_norm_over_all_members_is_refused() -> None:
    """The packed layer norm of the library normalises over the channels of all members together."""
    implicit = packed_mlp(PackedLinear)
    implicit[1] = nn.GroupNorm(1, M * 12, **DOUBLE)
    base = mlp()
    base[1] = nn.LayerNorm(12, **DOUBLE)
    with pytest.raises(SpecError, match="found 1 in Sequential, a norm over the channels of several members"):
        ob.unroll(base, implicit)


def test_factors_against_diagonal_matrices() -> None:
    weight, r, s = torch.randn(3, 4, **DOUBLE), torch.randn(2, 4, **DOUBLE), torch.randn(2, 3, **DOUBLE)
    expected = torch.stack([torch.diag(s[m]) @ weight @ torch.diag(r[m]) for m in range(2)])
    assert torch.allclose(scaled_weights(nn.Linear(4, 3), weight, r, s), expected, rtol=0, atol=1e-15)
    assert torch.equal(scaled_weights(nn.Linear(4, 3), weight), weight[None])


COUNTS = st.integers(1, 3)
KINDS = st.sampled_from([nn.Conv1d, nn.Conv2d, nn.ConvTranspose1d, nn.ConvTranspose2d])


@settings(max_examples=40, deadline=None)
@given(kind=KINDS, groups=COUNTS, inputs=COUNTS, outputs=COUNTS, kernel=COUNTS, members=COUNTS, seed=st.integers(0, 99))
def test_factors_of_channels_are_factors_of_the_weight(
    kind: Any, groups: int, inputs: int, outputs: int, kernel: int, members: int, seed: int
) -> None:
    torch.manual_seed(seed)
    layer = kind(groups * inputs, groups * outputs, kernel, groups=groups, bias=False, **DOUBLE)
    size = (5,) * (layer.weight.dim() - 2)
    r, s = torch.randn(members, groups * inputs, **DOUBLE), torch.randn(members, groups * outputs, **DOUBLE)
    x, ones = torch.randn(2, groups * inputs, *size, **DOUBLE), (1,) * len(size)
    weights = scaled_weights(layer, layer.weight, r, s)
    for m in range(members):
        found = torch.func.functional_call(layer, {"weight": weights[m]}, x)
        expected = layer(x * r[m].reshape(-1, *ones)) * s[m].reshape(-1, *ones)
        assert torch.allclose(found, expected, rtol=0, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(kind=KINDS, groups=COUNTS, finer=COUNTS, inputs=COUNTS, outputs=COUNTS, seed=st.integers(0, 99))
def test_a_block_diagonal_computes_what_groups_compute(
    kind: Any, groups: int, finer: int, inputs: int, outputs: int, seed: int
) -> None:
    torch.manual_seed(seed)
    sizes = (groups * finer * inputs, groups * finer * outputs, 3)
    fine = kind(*sizes, groups=groups * finer, bias=False, **DOUBLE)
    coarse = kind(*sizes, groups=groups, bias=False, **DOUBLE)
    x = torch.randn(2, sizes[0], *(5,) * (fine.weight.dim() - 2), **DOUBLE)
    weight = block_diagonal(fine.weight, coarse.weight.shape[1], groups)
    assert weight.shape == coarse.weight.shape
    found = torch.func.functional_call(coarse, {"weight": weight}, x)
    assert torch.allclose(found, fine(x), rtol=0, atol=1e-12)


class FilterResponse(nn.Module):
    """A filter response norm, whose tensors are (1, channels, 1, 1)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.beta, self.gamma, self.tau = (nn.Parameter(torch.randn(1, channels, 1, 1, **DOUBLE)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scale = (x.square().mean((2, 3), keepdim=True) + 1e-6).rsqrt()
        return torch.maximum(self.gamma * x * scale + self.beta, self.tau)


class Block(nn.Module):
    """A residual block with a number of its own beside a child that is called conv."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv, self.weight = conv, nn.Parameter(torch.tensor(0.5, **DOUBLE))

    def forward(self, x: Tensor) -> Tensor:
        if x.mean() > 1e9:  # cannot be traced
            return x
        return x + self.weight * self.conv(x)


def test_filter_response_norms_are_split() -> None:
    packed = nn.Sequential(
        PackedConv2d(M, 2, M * 4, 3, first=True), FilterResponse(M * 4), PackedConv2d(M, M * 4, M * 2, 3, last=True)
    )
    base = nn.Sequential(plain(2, 4, 3, bias=True), FilterResponse(4), plain(4, 2, 3, bias=True))
    check_members(base, packed, torch.randn(*IMAGES, **DOUBLE), repeated=False)


def test_names_of_the_base_module_mean_what_they_mean_there() -> None:
    """Children called conv and linear, and parameters called weight, are no signs of a packed layer."""
    batched = nn.Sequential(Batched(M, 2, 4, 3), Block(Batched(M, 4, 4, 3, padding=1)))
    base = nn.Sequential(plain(2, 4, 3, bias=True), Block(plain(4, 4, 3, padding=1, bias=True)))
    population = check_members(base, batched, torch.randn(*IMAGES, **DOUBLE))
    assert population.provenance["layers"] == {"0": "BatchEnsemble", "1.conv": "BatchEnsemble"}
    with pytest.raises(InputError, match="ordinary network"):
        ob.unroll(base, base)


def test_mimo_around_a_model_that_cannot_be_traced() -> None:
    wide = nn.Sequential(plain(M * 2, 4, 3, bias=True), Block(plain(4, 4, 3, padding=1)), plain(4, M * 2, 3))
    base = nn.Sequential(plain(2, 4, 3, bias=True), Block(plain(4, 4, 3, padding=1)), plain(4, 2, 3))
    check_members(base, Slots(M, wide), torch.randn(*IMAGES, **DOUBLE))
