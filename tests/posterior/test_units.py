"""Whole units go: the smaller network computes what the old one does with these units at zero, or with them dead."""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onebasin as ob
from onebasin import Symmetry
from onebasin.errors import InputError, ModelError, SpecError, SymmetryError
from onebasin.examples.small import separable_cnn
from onebasin.functional.call import outputs
from onebasin.posterior.gaussian import Diagonal, Gaussian
from onebasin.posterior.layout import FlatLayout
from onebasin.posterior.posterior import Posterior
from onebasin.posterior.units import Removal, owners, remove_units, resized
from onebasin.state import State, spec_of, state_of
from onebasin.symmetry.space import Element, Grid, Leg, Space
from tests.models import BATTERY

CASES = {case.name: case for case in BATTERY}
SUMMED = (
    "mlp_prelu_channels", "residual_mlp", "swiglu", "conv_flatten", "depthwise_multiplier", "grouped", "densenet_bn",
    "resnet_bn", "squeeze_excite", "lstm_two_layers", "experts_modules",
)  # fmt: skip


@functools.cache
def case(name: str) -> tuple[nn.Module, Any, Symmetry]:
    model, inputs = CASES[name].build(), CASES[name].inputs()
    return model, inputs, ob.discover(model, inputs)


def built(*layers: nn.Module) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for layer in layers:
            for tensor in layer.parameters():
                nn.init.normal_(tensor, std=0.5)
    return nn.Sequential(*layers).eval()


def wide(state: State) -> State:
    return {name: value.double() if value.is_floating_point() else value for name, value in state.items()}


def difference(model: nn.Module, state: State, found: Removal, inputs: Any) -> float:
    """Between the old network as it was and the smaller one, in float64, relative to the largest output."""
    before = outputs(model, wide(state), inputs)
    after = outputs(resized(model, found.state, inputs), wide(found.state), inputs)
    return float((before - after).abs().max() / before.abs().max())


@pytest.mark.parametrize("name", SUMMED)
def test_the_smaller_network_is_the_old_one_without_these_units(name: str) -> None:
    model, inputs, symmetry = case(name)
    before = {key: value.clone() for key, value in state_of(model).items()}
    for keep in (0.6, 0.3):
        found = remove_units(model, symmetry, keep, "random", seed=1)
        assert sum(v.numel() for v in found.state.values()) < sum(v.numel() for v in before.values())
        assert found.error(model, inputs) < 1e-12
    assert all(torch.equal(value, before[key]) for key, value in state_of(model).items())


def test_everything_kept_is_the_network_itself() -> None:
    model, _, symmetry = case("grouped")
    found = remove_units(model, symmetry, 1.0)
    assert all(torch.equal(value, found.state[name]) for name, value in state_of(model).items())
    assert found.masks.share == 1


@pytest.mark.parametrize("name", ["residual_mlp_prenorm", "mixer"])
def test_where_the_number_of_units_counts_the_error_tells(name: str) -> None:
    model, inputs, symmetry = case(name)
    assert remove_units(model, symmetry, 0.6, "random").error(model, inputs) > 1e-3


@pytest.mark.parametrize("name", ["conv_flatten", "grouped", "lstm_two_layers", "densenet_bn", "encoder_prenorm_gelu"])
def test_owners_are_what_swaps_move(name: str) -> None:
    """A unit owns what moves with whomever it is swapped; found without `owners`."""
    model, _, symmetry = case(name)
    start, numbers = 0, {}
    for key, value in state_of(model).items():
        numbers[key] = torch.arange(start, start + value.numel(), dtype=torch.float64).reshape(value.shape)
        start += value.numel()
    for space in symmetry.spaces:
        if not space.permutable or space.size < 4:  # an entry may belong to two units, and a third must be left
            continue
        claimed = {key: torch.zeros(value.shape, dtype=torch.bool) for key, value in numbers.items()}
        for leg in space.legs:
            claimed[leg.tensor] |= owners(space, leg, numbers[leg.tensor].shape) == 1  # unit 1 of the first copy
        moved = [_moved(symmetry, space.name, numbers, (1, other)) for other in range(space.size) if other != 1]
        for key in numbers:
            assert torch.equal(claimed[key], torch.stack([one[key] for one in moved]).all(0))


def _moved(symmetry: Symmetry, name: str, numbers: State, pair: tuple[int, int]) -> dict[str, Tensor]:
    order = symmetry.identity().orders[name].clone()
    rows = order.view(-1, order.shape[-1])
    rows[0, list(pair)] = rows[0, list(reversed(pair))]
    swapped = symmetry.apply(Element({name: order}, {}), numbers)
    return {key: swapped[key] != numbers[key] for key in numbers}


# ---------------------------------------------------------------------- dead units


def silence(state: State, out: str, into: tuple[str, ...], unit: int, per: int = 1) -> None:
    """Unit `unit`: nothing goes out; unit `unit + 1`: nothing comes in."""
    state[out][:, per * unit : per * (unit + 1)] = 0
    for name in into:
        state[name][unit + 1] = 0


DEAD: dict[str, tuple[Any, tuple[int, ...], str, tuple[str, ...], int]] = {
    "mlp": ((nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), (4, 6), "2.weight", ("0.weight", "0.bias"), 1),
    "flattened": (
        (nn.Conv2d(2, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 3)),
        (4, 2, 6, 6),
        "3.weight",
        ("0.weight", "0.bias"),
        16,
    ),
    "batch norm": (
        (nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 3, 1)),
        (4, 2, 6, 6),
        "3.weight",
        ("1.weight", "1.bias"),
        1,
    ),
    "leaky": ((nn.Linear(6, 8), nn.LeakyReLU(), nn.Linear(8, 3)), (4, 6), "2.weight", ("0.weight", "0.bias"), 1),
}


@pytest.mark.parametrize("name", DEAD)
def test_dead_units_are_found_and_their_removal_changes_nothing(name: str) -> None:
    layers, shape, out, into, per = DEAD[name]
    model, inputs = built(*layers), torch.randn(shape, generator=torch.Generator().manual_seed(1))
    symmetry = ob.discover(model, inputs)
    state = {key: value.clone() for key, value in state_of(model).items()}
    silence(state, out, into, 2, per)
    silence(state, out, into, 5, per)
    found = remove_units(state, symmetry, 0.5, "norm")
    assert found.kept["0"].tolist() == [0, 1, 4, 7]
    assert difference(model, state, found, inputs) < 1e-12


def test_a_dead_residual_channel_goes() -> None:
    model, inputs, symmetry = case("resnet_bn")
    stream = max(symmetry.spaces, key=lambda space: len(space.legs))
    state = {key: value.clone() for key, value in state_of(model).items()}
    keep = torch.arange(stream.size)[torch.arange(stream.size) != 1]
    zeroed = remove_units(state, symmetry, {stream.name: keep}).zeroed
    found = remove_units(zeroed, symmetry, (stream.size - 1) / stream.size)
    assert found.kept[stream.name].tolist() == keep.tolist()
    only = remove_units(zeroed, symmetry, {stream.name: keep})
    assert difference(model, zeroed, only, inputs) < 1e-12


def test_a_scale_that_a_unit_carries_does_not_count() -> None:
    model = built(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
    symmetry = ob.discover(model, torch.zeros(1, 6))
    moved = symmetry.apply(symmetry.random(3, freedoms=["scale"]), wide(state_of(model)))
    kept = [remove_units(state, symmetry, 0.5).kept["0"].tolist() for state in (wide(state_of(model)), moved)]
    assert kept[0] == kept[1]


def test_copies_lose_equally_many_units_not_the_same_ones() -> None:
    model, inputs, symmetry = case("grouped")
    inside = next(space for space in symmetry.spaces if space.parents and space.size == 5)
    chosen = torch.tensor([[0, 1, 3], [1, 2, 4]])
    found = remove_units(model, symmetry, {inside.name: chosen})
    assert torch.equal(found.kept[inside.name], chosen)
    assert found.error(model, inputs) < 1e-12
    old, new = state_of(model)["2.weight"], found.state["2.weight"]
    assert torch.equal(new, old[[0, 1, 3, 6, 7, 9]])


def test_copies_of_a_removed_parent_go_with_it() -> None:
    model, inputs, symmetry = case("grouped")
    blocks = next(space for space in symmetry.spaces if not space.parents and space.size == 2)
    inside = {space.size: space.name for space in symmetry.spaces if space.parents}
    keep = {blocks.name: torch.tensor([1]), inside[5]: torch.tensor([[0, 1, 3], [1, 2, 4]]), inside[3]: 0.67}
    found = remove_units(model, symmetry, keep, "random", seed=2)
    assert found.error(model, inputs) < 1e-12
    inner = found.kept[inside[3]][1].tolist()
    assert torch.equal(found.state["2.weight"], state_of(model)["2.weight"][[6, 7, 9]][:, inner])
    assert torch.equal(found.state["0.bias"], state_of(model)["0.bias"][[3 + unit for unit in inner]])


def test_copies_are_counted_where_their_parents_were() -> None:
    model, inputs = separable_cnn().eval(), torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    symmetry = ob.discover(model, inputs)
    blocks = next(space for space in symmetry.spaces if not space.parents and space.size == 4)
    inside = next(space for space in symmetry.spaces if space.parents and space.size == 2)
    keep = {blocks.name: torch.tensor([1, 3]), inside.name: torch.tensor([[0], [1], [0], [1]])}
    found = remove_units(model, symmetry, keep)
    assert torch.equal(found.state["0.bias"], state_of(model)["0.bias"][[3, 7]])
    assert found.error(model, inputs) < 1e-12


def test_a_leg_owns_only_what_it_stands_on() -> None:
    leg = Leg("w", Grid(1, ((1, 2, 1),)), within=(Grid(0, ((1, 2, 1),)),))
    found = owners(Space("s", 2, True, (), (), (leg,)), leg, (3, 4))
    assert found.tolist() == [[-1, -1, -1, -1], [-1, 0, 1, -1], [-1, 0, 1, -1]]


def test_snr_follows_the_posterior() -> None:
    model = built(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    symmetry, mean = ob.discover(model, torch.zeros(1, 3)), state_of(model)
    layout = FlatLayout(tuple(mean), spec_of(mean), {})
    std = {name: torch.ones_like(value) for name, value in mean.items()}
    for unit in (0, 3):  # every other weight of theirs is as uncertain as can be
        std["0.weight"][unit], std["0.bias"][unit], std["2.weight"][:, unit] = 1e3, 1e3, 1e3
    posterior = Posterior.equal([Gaussian(layout.flat(mean), Diagonal(layout.flat(std)))], layout, [mean])
    assert remove_units(mean, symmetry, 0.5, "snr", posterior=posterior).kept["0"].tolist() == [1, 2]
    with pytest.raises(InputError, match="no posterior"):
        remove_units(mean, symmetry, 0.5, "snr")


# ---------------------------------------------------------------------- attention


class Attention(nn.Module):
    """Self-attention whose number of heads is written into it, and a feed-forward part."""

    def __init__(self, heads: int = 4, size: int = 4, hidden: int = 10) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(7, heads * size) for _ in range(3))
        self.out = nn.Linear(heads * size, 7)
        self.up, self.down = nn.Linear(7, hidden), nn.Linear(hidden, 7)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


def attention() -> tuple[nn.Module, Tensor, Symmetry]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Attention().eval()
    inputs = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(1))
    return model, inputs, ob.discover(model, inputs)


def test_feed_forward_units_and_value_dimensions_go() -> None:
    model, inputs, symmetry = attention()
    hidden = next(space for space in symmetry.spaces if any(leg.tensor == "up.weight" for leg in space.legs))
    values = next(
        space for space in symmetry.spaces
        if space.parents and any(leg.tensor == "v.weight" for leg in space.legs)
    )  # fmt: skip
    found = remove_units(model, symmetry, {hidden.name: 0.4, values.name: 0.5}, "random")
    assert found.state["up.weight"].shape == (4, 7)
    assert found.state["v.weight"].shape == (8, 7)
    assert found.error(model, inputs) < 1e-12


def test_whole_heads_go_into_a_module_built_by_hand() -> None:
    model, inputs, symmetry = attention()
    heads = next(space for space in symmetry.spaces if space.size == 4 and not space.parents)
    found = remove_units(model, symmetry, {heads.name: torch.tensor([1, 2])})
    small = Attention(heads=2).eval()
    small.load_state_dict(found.state)
    before = outputs(model, wide(found.zeroed), inputs)
    after = outputs(small, wide(found.state), inputs)
    assert torch.allclose(before, after, atol=1e-12, rtol=0)
    # The module's own number of heads stays at 4, so a resized copy runs and is wrong: the error says so.
    assert found.error(model, inputs) > 1e-3


def test_torchs_own_encoder_layer_loses_feed_forward_units() -> None:
    model, inputs, symmetry = case("encoder_prenorm_gelu")
    hidden = next(space for space in symmetry.spaces if space.size == 7)
    found = remove_units(model, symmetry, {hidden.name: 0.5})
    assert found.error(model, inputs) < 1e-12
    other = next(space for space in symmetry.spaces if any("in_proj" in leg.tensor for leg in space.legs))
    smaller = remove_units(model, symmetry, {other.name: 0.5}).state
    with pytest.raises(ModelError, match="MultiheadAttention"):
        resized(model, smaller, inputs, known=[type(model)])


# ---------------------------------------------------------------------- resized


def test_a_resized_copy_knows_its_widths_and_leaves_the_model_alone() -> None:
    model = built(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.Flatten(),
                  nn.Linear(32, 4))  # fmt: skip
    inputs = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(1))
    symmetry, before = ob.discover(model, inputs), str(model)
    found = remove_units(model, symmetry, 0.5)
    small = resized(model, found.state, inputs)
    conv, norm, depthwise, linear = small[0], small[1], small[3], small[5]
    assert (conv.in_channels, conv.out_channels, norm.num_features) == (3, 4, 4)
    assert (depthwise.in_channels, depthwise.out_channels, depthwise.groups) == (4, 4, 4)
    assert (linear.in_features, linear.out_features) == (16, 4)
    assert str(model) == before
    assert all(torch.equal(value, found.state[name]) for name, value in small.state_dict().items())
    small.train()(inputs).sum().backward()  # it trains like any other
    assert all(parameter.grad is not None for parameter in small.parameters())


def test_tied_layers_stay_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.mix, self.head = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 11, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            return self.head(x + self.mix(x).relu())

    model, inputs = Tied().eval(), torch.arange(10).reshape(2, 5)
    found = remove_units(model, ob.discover(model, inputs), 0.5)
    small = resized(model, found.state, inputs)
    assert small.head.weight is small.embed.weight
    assert small.embed.embedding_dim == 3
    assert found.masks.tied == {"head.weight": "embed.weight"}
    assert found.error(model, inputs) < 1e-12


def test_classes_that_nobody_knows_are_named() -> None:
    class Gain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.linspace(1, 2, 6))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.gain

    model, inputs = built(nn.Linear(3, 6), nn.ReLU(), Gain(), nn.Linear(6, 2)), torch.randn(4, 3)
    found = remove_units(model, ob.discover(model, inputs), 0.5)
    with pytest.raises(ModelError, match="found Gain under '2'"):
        resized(model, found.state, inputs)
    assert found.error(model, inputs, known=[Gain]) < 1e-12


def test_a_width_in_the_code_is_told() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(3, 6), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x).relu().reshape(-1, 6))

    model, inputs = Fixed().eval(), torch.randn(4, 3)
    found = remove_units(model, ob.discover(model, inputs), 1 / 6)
    with pytest.raises(ModelError, match="written into its code"):
        resized(model, found.state, inputs)
    with pytest.raises(SpecError, match="missing"):
        resized(model, {"one.weight": torch.zeros(3, 3)}, inputs)


# ---------------------------------------------------------------------- refusals


def test_what_cannot_be_meant_is_refused() -> None:
    model, _, symmetry = case("residual_mlp")
    name = symmetry.spaces[0].name
    with pytest.raises(InputError, match="0 < keep <= 1"):
        remove_units(model, symmetry, 0.0)
    with pytest.raises(InputError, match="criterion"):
        remove_units(model, symmetry, 0.5, "size")
    for units in ([0, 0], [99], [-1], []):
        with pytest.raises(InputError, match="different numbers"):
            remove_units(model, symmetry, {name: torch.tensor(units, dtype=torch.long)})
    with pytest.raises(SymmetryError, match="no space"):
        remove_units(model, symmetry, {"elsewhere": 0.5})
    rigid = symmetry.without({name: ["permutation"]}, "a test")
    with pytest.raises(InputError, match="change places"):
        remove_units(model, rigid, {name: 0.5})


def test_parts_of_slices_are_refused() -> None:
    model = built(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    symmetry = ob.discover(model, torch.zeros(1, 3))
    space = symmetry.spaces[0]
    legs = tuple(
        replace(leg, within=(Grid(0, ((0, 1, 1),)),)) if leg.tensor == "2.weight" else leg for leg in space.legs
    )
    partial = Symmetry((replace(space, legs=legs),), symmetry.shapes)
    with pytest.raises(SymmetryError, match="parts of slices"):
        remove_units(model, partial, 0.5)


def test_the_table_names_spaces_and_what_is_left() -> None:
    model, _, symmetry = case("grouped")
    lines = str(remove_units(model, symmetry, 0.5)).splitlines()
    assert len(lines) == len(symmetry.spaces) + 6
    assert "numbers are left" in lines[2]
