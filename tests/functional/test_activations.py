"""Activations: they are those of a forward pass written by hand, and they move as the group says."""

import math
from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import onebasin as ob
from onebasin.alignment.activations import (
    ActivationReader,
    CrossCovariance,
    activations,
    cross_covariance,
    transformed,
)
from onebasin.errors import InputError, SpecError, SymmetryError
from onebasin.functional.activations import READ, WRITTEN, Tap, find_cut
from onebasin.functional.call import call_arguments
from onebasin.symmetry.space import Grid
from tests.models import BATTERY, missing

State = dict[str, Tensor]
# Cases of every kind of wiring: which spaces cannot be read and must be said to be missing, and which are seen only as
# they are written. All others are seen by their readers.
READABLE: dict[str, tuple[set[str], set[str]]] = {
    "mlp_width_one": (set(), set()),
    "residual_mlp": (set(), set()),
    "swiglu": (set(), set()),
    "weight_norm_tanh": (set(), {"one.parametrizations.weight"}),  # weights are computed: a bias gives it away
    "tied_autoencoder_tanh": (set(), set()),
    "siamese": (set(), set()),
    "conv_flatten": (set(), set()),
    "depthwise_separable": (set(), set()),
    "depthwise_multiplier": (set(), {"0 blocks"}),
    "grouped": ({"0 blocks"}, set()),
    "resnet_bn": (set(), set()),
    "resnet_group_4": ({"conv blocks", "blocks.0.conv1 blocks"}, set()),
    "lstm": (set(), set()),
    "lstm_projected": (set(), set()),
    "encoder_tied": ({"layer.self_attn blocks"}, {"layer.self_attn inside"}),  # queries and keys
    "decoder_rope_gqa": ({"q blocks", "q inside"}, {"q inside (2)", "v inside"}),
    "mixer": ({"token1"}, set()),
    "experts": (set(), {"up blocks"}),  # the logits of the router
}


def doubled(model: nn.Module) -> State:
    return {name: t.detach().double() if t.is_floating_point() else t for name, t in model.state_dict().items()}


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def another(state: State, seed: int = 0) -> State:
    """Another network of the same architecture."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: 0.7 * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        if tensor.is_floating_point()
        else tensor
        for name, tensor in state.items()
    }


def columns(space: ob.Space) -> Iterator[dict[str, int]]:
    """For each column the index of every parent and of the unit itself, by name of the space."""
    names = [*[name for name, _ in space.parents], space.name]
    for index in product(*[range(size) for _, size in space.parents], range(space.size)):
        yield dict(zip(names, index, strict=True))


def entry(table: Tensor, symmetry: ob.Symmetry, name: str, at: dict[str, int]) -> Tensor:
    """The entry of (..., *parents, unit) of a space, for a column of it or of a space fibred over it."""
    space = symmetry[name]
    return table[..., *[at[parent] for parent, _ in space.parents], at[name]]


def moved_by_hand(
    symmetry: ob.Symmetry, element: ob.Element, space: ob.Space, exponents: tuple, samples: Tensor
) -> Tensor:
    """The rule in the definition of the group, one column at a time."""
    known = {other.name for other in symmetry.spaces}
    made = torch.zeros_like(samples)
    sizes = [*[size for _, size in space.parents], space.size]
    for number, at in enumerate(columns(space)):
        source = 0
        for (name, index), size in zip(at.items(), sizes, strict=True):
            order = element.orders.get(name) if name in known else None
            source = source * size + (index if order is None else int(entry(order, symmetry, name, at)))
        factor = 1.0
        for name, powers in exponents:
            for generator, power in enumerate(powers):
                factor *= float(entry(element.factors[name][generator], symmetry, name, at)) ** power
        made[:, number] = factor * samples[:, source]
    return made


@cache
def discovered(name: str) -> tuple[nn.Module, Any, ob.Symmetry]:
    case = next(case for case in BATTERY if case.name == name)
    if reason := missing(case):
        pytest.skip(reason)
    model, inputs = case.build(), case.inputs()
    return model, inputs, ob.discover(model, inputs)


@pytest.mark.parametrize("case", READABLE)
def test_activations_move_as_the_group_says(case: str) -> None:
    """For a random element of the whole group, and for what is shown of every space."""
    model, inputs, symmetry = discovered(case)
    state, element = doubled(model), symmetry.random(3)
    reader, call = ActivationReader(model, symmetry), call_arguments(inputs)
    before, after = reader.of(state)(call), reader.of(symmetry.apply(element, state))(call)
    quick = transformed(before, symmetry, element)
    gone, written = READABLE[case]
    assert set(before.missing) == set(after.missing) == gone, before.missing
    assert {name for name in before.parts if reader.reader.sides[name] == WRITTEN} == written
    assert set(before.parts) == {space.name for space in symmetry.spaces} - gone
    for name, parts in before.parts.items():
        space = symmetry[name]
        assert list(parts) == list(after.parts[name])
        for exponents, samples in parts.items():
            assert samples.shape[1] == space.copies * space.size
            expected = moved_by_hand(symmetry, element, space, exponents, samples)
            scale = float(samples.abs().max())
            assert scale > 1e-3
            assert float((after.parts[name][exponents] - expected).abs().max()) < 1e-9 * scale, name
            assert float((quick.parts[name][exponents] - expected).abs().max()) < 1e-12 * scale, name


# ---------------------------------------------------------------------- by hand


def test_a_perceptron_by_hand() -> None:
    """Each hidden layer as the next one sees it, after its nonlinearity."""
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
    symmetry, x = ob.discover(model, torch.zeros(2, 3)), noise(7, 3)
    w = another(doubled(model))
    first = F.relu(x @ w["0.weight"].T + w["0.bias"])
    second = torch.tanh(first @ w["2.weight"].T + w["2.bias"])
    values = activations(model, w, symmetry, x).values
    torch.testing.assert_close(values["0"], first)
    torch.testing.assert_close(values["2"], second)


@pytest.mark.parametrize("groups", [1, 3])
def test_a_convolution_by_hand(groups: int) -> None:
    """Positions are samples, for the convolution that reads and behind a flatten; group by group."""
    model = nn.Sequential(
        nn.Conv2d(2, 6, 3), nn.ReLU(), nn.Conv2d(6, 9, 2, groups=groups), nn.ReLU(), nn.Flatten(), nn.Linear(9 * 9, 2)
    )
    symmetry, x = ob.discover(model, torch.zeros(2, 2, 6, 6)), noise(4, 2, 6, 6)
    a, b = (another(doubled(model), seed) for seed in (1, 2))

    def by_hand(w: State) -> list[Tensor]:
        first = F.relu(F.conv2d(x, w["0.weight"], w["0.bias"]))
        second = F.relu(F.conv2d(first, w["2.weight"], w["2.bias"], groups=groups))
        return [layer.movedim(1, -1).flatten(0, -2) for layer in (first, second)]

    found = cross_covariance(model, a, b, symmetry, x)
    names = ("0", "2") if groups == 1 else ("0 inside", "2 inside")
    for name, one, other in zip(names, by_hand(a), by_hand(b), strict=True):
        torch.testing.assert_close(found.matrices[name], one.T @ other)
        assert found.samples[name] == len(one)


class Heads(nn.Module):
    """Attention of 2 heads of width 3 on a stream of 5; heads one by one or all at once."""

    def __init__(self, one_by_one: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = nn.Linear(5, 6), nn.Linear(5, 6), nn.Linear(5, 6), nn.Linear(6, 2)
        self.one_by_one = one_by_one

    def forward(self, x: Tensor) -> Tensor:
        if not self.one_by_one:
            heads = [layer(x).unflatten(-1, (2, 3)).transpose(1, 2) for layer in (self.q, self.k, self.v)]
            return self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        result = self.out.bias
        for head in range(2):
            rows = slice(3 * head, 3 * head + 3)
            q, k, v = (F.linear(x, layer.weight[rows], layer.bias[rows]) for layer in (self.q, self.k, self.v))
            result = result + F.scaled_dot_product_attention(q, k, v) @ self.out.weight.T[rows]
        return result


@pytest.mark.parametrize("one_by_one", [False, True])
def test_attention_by_hand(one_by_one: bool) -> None:
    """Queries and keys are read where they are written, values where they are read; column = head * 3 + unit."""
    model = Heads(one_by_one)
    symmetry = ob.discover(Heads(False), torch.zeros(2, 4, 5))
    x, w = noise(3, 4, 5), another(doubled(model))
    q, k, v = (x @ w[f"{name}.weight"].T + w[f"{name}.bias"] for name in "qkv")
    heads = [layer.unflatten(-1, (2, 3)).transpose(1, 2) for layer in (q, k, v)]
    mixed = (torch.softmax(heads[0] @ heads[1].mT / math.sqrt(3), -1) @ heads[2]).transpose(1, 2).flatten(2)
    read = activations(model, w, symmetry, x)
    torch.testing.assert_close(read.values["v inside"], mixed.flatten(0, 1))
    torch.testing.assert_close(read.values["q inside"], torch.cat([q.flatten(0, 1), k.flatten(0, 1)]))
    assert [powers for ((_, powers),) in read.parts["q inside"]] == [(1, 1), (-1, 1)]  # scale and sign
    assert "not seen apart from q inside, v inside" in read.missing["q blocks"]


class Stream(nn.Module):
    """A residual stream with two readers, the first of which reads it twice from the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.up, self.gate, self.down = nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(4, 5), nn.Linear(5, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.down(F.silu(self.gate(x)) * self.up(x))
        return self.head(x)


def test_all_states_of_a_residual_stream_count_once() -> None:
    model = Stream()
    symmetry, x, w = ob.discover(model, torch.zeros(2, 3)), noise(6, 3), another(doubled(model))

    def layer(name: str, x: Tensor) -> Tensor:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    before = layer("stem", x)
    after = before + layer("down", F.silu(layer("gate", before)) * layer("up", before))
    torch.testing.assert_close(activations(model, w, symmetry, x).values["stem"], torch.cat([before, after]))


def test_aligned_spaces_are_positions() -> None:
    """A token mixer has one sample per channel: once the channels are aligned, its units can be compared."""
    model, _, symmetry = discovered("mixer")
    x, w = noise(3, 5, 3), doubled(model)
    read = activations(model, w, symmetry, x, aligned=["stem"])
    stream = x @ w["stem.weight"].T + w["stem.bias"]
    normed = F.layer_norm(stream, (7,), w["norm1.weight"], w["norm1.bias"]).mT
    hidden = F.gelu(normed @ w["token1.weight"].T + w["token1.bias"])
    torch.testing.assert_close(read.values["token1"], hidden.flatten(0, 1))
    assert not read.missing


# ---------------------------------------------------------------------- covariances


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))


@pytest.fixture(scope="module")
def symmetry(model: nn.Module) -> ob.Symmetry:
    return ob.discover(model, torch.zeros(2, 3))


@pytest.mark.parametrize("kind", ["uncentred", "centred", "correlation"])
def test_covariances_by_torch(model: nn.Module, symmetry: ob.Symmetry, kind: str) -> None:
    x, a, b = noise(50, 3), another(doubled(model), 1), another(doubled(model), 2)
    found = cross_covariance(model, a, b, symmetry, x, kind=kind, batch=7)
    one, other = (activations(model, w, symmetry, x).values for w in (a, b))
    for name in ("0", "2"):
        both = torch.cat([one[name], other[name]], 1).T
        n = one[name].shape[1]
        expected = {
            "uncentred": one[name].T @ other[name],
            "centred": 49 * torch.cov(both)[:n, n:],
            "correlation": torch.corrcoef(both)[:n, n:].nan_to_num(),  # a relu that is never on has no correlation
        }
        torch.testing.assert_close(found.matrices[name], expected[kind], rtol=1e-10, atol=1e-10)


@pytest.fixture(scope="module")
def relu() -> tuple[nn.Module, ob.Symmetry]:
    model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2))
    return model, ob.discover(model, torch.zeros(2, 3))


@settings(max_examples=15, deadline=None)
@given(
    cuts=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    offset=st.floats(-100, 100),
    kind=st.sampled_from(["uncentred", "centred", "correlation"]),
)
def test_streaming_changes_nothing(
    relu: tuple[nn.Module, ob.Symmetry], cuts: list[int], offset: float, kind: str
) -> None:
    """Any cut into batches, also of a loader that can be used only once, and with means far above the spread."""
    model, symmetry = relu
    x = noise(sum(cuts), 3) + torch.tensor([offset, 0.0, 0.0])
    a, b = another(doubled(model), 1), another(doubled(model), 2)
    whole = cross_covariance(model, a, b, symmetry, x, kind=kind)
    loader = ({"input": part} for part in x.split(cuts))
    pieces = cross_covariance(model, a, b, symmetry, loader, kind=kind)
    listed = cross_covariance(model, a, b, symmetry, list(x.split(cuts)), kind=kind)
    for name, matrix in whole.matrices.items():
        scale = max(float(matrix.abs().max()), 1e-3)
        torch.testing.assert_close(pieces.matrices[name], matrix, rtol=0, atol=1e-10 * scale)
        torch.testing.assert_close(listed.matrices[name], matrix, rtol=0, atol=1e-10 * scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dead_and_constant_units_correlate_with_nothing(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).to(dtype)
    symmetry = ob.discover(model, torch.zeros(2, 3, dtype=dtype))
    a = another(dict(model.state_dict()))
    b = {name: tensor.clone() for name, tensor in a.items()}
    b["0.weight"][:2] = 0
    b["0.bias"][0], b["0.bias"][1] = -1, 0.1  # never on; always on, with a mean that is not exact
    found = cross_covariance(model, a, b, symmetry, noise(1000, 3), kind="correlation", batch=77).matrices["0"]
    assert bool((found[:, :2] == 0).all()) and bool(torch.isfinite(found).all())
    torch.testing.assert_close(found.diagonal()[2:], torch.ones(2, dtype=torch.float64), rtol=0, atol=1e-5)


def test_a_planted_element_is_seen(model: nn.Module, symmetry: ob.Symmetry) -> None:
    """The correlation of a network with its moved self has ones exactly where its units went, up to their signs."""
    generator = torch.Generator().manual_seed(5)
    a = {name: torch.randn(t.shape, generator=generator).double() for name, t in model.state_dict().items()}
    a["2.bias"] = a["2.bias"].abs() + 2  # every relu is on somewhere
    element = symmetry.random(1)
    found = cross_covariance(model, a, symmetry.apply(element, a), symmetry, noise(400, 3), kind="correlation")
    for name, matrix in found.matrices.items():
        assert torch.equal(matrix.abs().argmax(0), element.orders[name])
        best = matrix.abs().amax(0)
        torch.testing.assert_close(best, torch.ones_like(best))
        ((_, powers),) = next(iter(found.parts[name]))
        signs = torch.stack([f.sign() ** p for f, p in zip(element.factors[name], powers, strict=True)]).prod(0)
        torch.testing.assert_close(matrix.gather(0, element.orders[name][None])[0], signs)


def test_parts_with_different_signs_are_kept_apart() -> None:
    """Two readers behind norms of their own: flipping one norm flips one part of the covariance only."""
    model, _, symmetry = discovered("mixer")
    a, x = doubled(model), noise(20, 5, 3)
    element = symmetry.random(2, spaces=["stem"], freedoms=["sign"])
    still, moved = (cross_covariance(model, a, b, symmetry, x) for b in (a, symmetry.apply(element, a)))
    assert len(still.parts["stem"]) == 2
    for exponents, matrix in still.parts["stem"].items():
        expected = moved_by_hand(symmetry, element, symmetry["stem"], exponents, matrix)
        torch.testing.assert_close(moved.parts["stem"][exponents], expected)
    torch.testing.assert_close(torch.stack([*still.parts["stem"].values()]).sum(0), still.matrices["stem"])


# ---------------------------------------------------------------------- what runs underneath


@pytest.mark.parametrize("name", ["lstm", "encoder_tied"])
def test_fused_kernels_hide_nothing(name: str) -> None:
    """In float32 torch has fused kernels for these; settings, mode and weights are as before afterwards."""
    model, inputs, symmetry = discovered(name)
    wide, state = doubled(model), dict(model.state_dict())
    model.train()  # as a user may leave it
    before = {key: tensor.clone() for key, tensor in state.items()}
    flags = torch.backends.mkldnn.enabled, torch.backends.cudnn.enabled, torch.backends.mha.get_fastpath_enabled()
    narrow = activations(model, state, symmetry, inputs)
    exact = activations(model, wide, symmetry, inputs)
    assert set(narrow.missing) == set(exact.missing) == READABLE[name][0]
    for key, values in narrow.values.items():
        torch.testing.assert_close(values.double(), exact.values[key], rtol=1e-4, atol=1e-4)
    assert flags == (
        torch.backends.mkldnn.enabled, torch.backends.cudnn.enabled, torch.backends.mha.get_fastpath_enabled()
    )  # fmt: skip
    assert all(module.training for module in model.modules())
    model.eval()
    assert all(torch.equal(state[key], tensor) for key, tensor in before.items())


def test_inference_mode() -> None:
    """There torch leaves `linear` whole, so that products would not be seen."""
    model = Heads(False)
    symmetry, state, x = ob.discover(model, torch.zeros(2, 4, 5)), doubled(model), noise(3, 4, 5)
    outside = activations(model, state, symmetry, x).values
    with torch.inference_mode():
        inside = activations(model, state, symmetry, x.clone()).values
    assert all(torch.equal(inside[name], values) for name, values in outside.items()) and len(inside) == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_read_in_float32(model: nn.Module, symmetry: ob.Symmetry, dtype: torch.dtype) -> None:
    half = {name: tensor.to(dtype) for name, tensor in doubled(model).items()}
    same = {name: tensor.float() for name, tensor in half.items()}
    x = noise(4, 3)
    read, expected = (activations(model, w, symmetry, x).values for w in (half, same))
    assert all(torch.equal(read[name], values) and values.dtype == torch.float32 for name, values in expected.items())


@settings(max_examples=40, deadline=None)
@given(rows=st.tuples(st.integers(0, 2), st.integers(4, 6)), span=st.tuples(st.integers(0, 5), st.integers(6, 8)))
def test_views_of_weights_are_recognised(rows: tuple[int, int], span: tuple[int, int]) -> None:
    """A slice, transposed, shows just the columns it holds, whether they are summed over or left over."""
    weight = torch.zeros(6, 8)[rows[0] : rows[1], span[0] : span[1]].T
    summed = Tap("s", 8, "w", (6, 8), 1, ((1, torch.arange(8)),))
    over = Tap("s", 6, "w", (6, 8), 0, ((0, torch.arange(6)),))
    letters = ("km", "nk", "nm")
    read, written = find_cut(summed, weight, *letters, READ), find_cut(over, weight, *letters, WRITTEN)
    assert read is not None and written is not None
    assert read.columns.tolist() == list(range(*span)) and written.columns.tolist() == list(range(*rows))
    x = noise(3, span[1] - span[0])
    assert torch.equal(read(x, "nk"), x)
    assert find_cut(summed, weight, *letters, WRITTEN) is None and find_cut(over, weight, *letters, READ) is None
    every = Tap("s", 48, "w", (6, 8), 1, ((0, 8 * torch.arange(6)), (1, torch.arange(8))))
    assert find_cut(every, weight, *letters, READ) is None  # an activation would stand for several units
    uneven = Tap("s", 2, "w", (6, 8), 1, ((1, (torch.arange(8) == span[0]).long()),))
    assert (find_cut(uneven, weight, *letters, READ) is None) == (len(weight) > 2)  # and a unit for several numbers


# ---------------------------------------------------------------------- refusals


class Routed(nn.Module):
    """Only examples with a positive gate reach the hidden layer: how many depends on the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(3, 1), nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.gate(x)[:, 0] > 0
        return self.down(F.relu(self.up(x[chosen])))


def test_networks_that_look_at_different_samples_are_not_compared() -> None:
    """A symmetry written by hand, without shapes."""
    model, x = Routed(), noise(40, 3)
    legs = [("up.weight", 0, 1), ("up.bias", 0, 1), ("down.weight", 1, -1)]
    legs = tuple(ob.Leg(name, Grid(axis, ((0, 4, 1),)), powers=(power,)) for name, axis, power in legs)
    symmetry = ob.Symmetry((ob.Space("up", 4, True, ("scale",), (), legs),))
    a, b = another(doubled(model), 1), another(doubled(model), 2)
    assert cross_covariance(model, a, a, symmetry, x).samples["up"] < 40
    found = cross_covariance(model, a, b, symmetry, x)
    assert not found.matrices and "different samples" in found.missing["up"]


class LowRank(nn.Module):
    """A matrix that is a product of two: its inner units have weights but no activations."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.zeros(5, 2)), nn.Parameter(torch.zeros(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.left @ self.right).T


def inner(name: str, left: str, right: str, size: int) -> ob.Space:
    """Units on columns of one matrix and rows of another, with a scale."""
    legs = (
        ob.Leg(left, Grid(1, ((0, size, 1),)), powers=(-1,)),
        ob.Leg(right, Grid(0, ((0, size, 1),)), powers=(1,)),
    )
    return ob.Space(name, size, False, ("scale",), (), legs)


def test_a_product_of_weights_shows_no_activations() -> None:
    model = LowRank()
    symmetry = ob.Symmetry((inner("rank", "left", "right", 2),))
    assert "shows all its units" in activations(model, another(doubled(model)), symmetry, noise(4, 3)).missing["rank"]


def test_factors_that_a_column_does_not_tell_are_refused() -> None:
    """Two scales that are one, written down as two spaces: each acts on the activations of the other."""
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.ReLU(), nn.Linear(4, 2))
    twice = ob.Symmetry(tuple(inner(name, "2.weight", "0.weight", 4) for name in ("one", "two")))
    assert set(activations(model, doubled(model), twice, noise(4, 3)).missing) == {"one", "two"}


def test_what_is_refused(model: nn.Module, symmetry: ob.Symmetry) -> None:
    state, x = doubled(model), noise(4, 3)

    def call(**changes: object) -> CrossCovariance:
        given = {"model": model, "a": state, "b": state, "symmetry": symmetry, "inputs": x, **changes}
        return cross_covariance(**given)

    with pytest.raises(InputError, match="kind must be one of uncentred, centred, correlation, found 'cosine'"):
        call(kind="cosine")
    with pytest.raises(InputError, match="second network are not finite"):
        call(b={**state, "0.weight": state["0.weight"] * math.nan})
    with pytest.raises(InputError, match="at least one batch of inputs, found none"):
        call(inputs=iter(()))
    with pytest.raises(InputError, match="found int"):
        call(inputs=3)
    with pytest.raises(InputError, match=r"could not be called with \(float64\[4x7\]\)"):
        call(inputs=noise(4, 7))
    with pytest.raises(SpecError, match=r"missing 0\.weight"):
        call(b={name: tensor for name, tensor in state.items() if name != "0.weight"})
    with pytest.raises(SymmetryError, match=r"'0\.weight', which this symmetry moves, is \(9, 3\) in Sequential"):
        call(model=nn.Sequential(nn.Linear(3, 9), nn.Tanh(), nn.Linear(9, 5), nn.ReLU(), nn.Linear(5, 2)))
    with pytest.raises(SymmetryError, match="no space is called 'nothing'"):
        call(aligned=["nothing"])
