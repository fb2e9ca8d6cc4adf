import math
from typing import Any, cast

import pytest
import torch
from scipy.stats import binomtest
from torch import Tensor, nn

from onebasin.errors import InputError
from onebasin.functional.call import global_seed
from onebasin.inference.kernel import ChainPlan, Draws, StepIndex
from onebasin.inference.layers import columns
from onebasin.inference.methods.dropout import Dropout, dropping
from onebasin.inference.seeds import Streams
from onebasin.inference.start import first_networks
from onebasin.inference.target import Target, target_of
from onebasin.inference.training import Training


def numbers(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def perceptron(rate: float = 0.3) -> nn.Module:
    return nn.Sequential(
        nn.Dropout(rate / 2), nn.Linear(6, 5), nn.Dropout(rate), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Dropout(0.5),
        nn.Linear(4, 3),
    )  # fmt: skip


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.Dropout2d(0.3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3, padding=1, groups=2), nn.ReLU(),
        nn.Dropout2d(0.4), nn.AvgPool2d(2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(6, 3),
    )  # fmt: skip


def flattened() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(3 * 16, 5), nn.ReLU(), nn.Linear(5, 3)
    )


def spread_over_space() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.Dropout2d(0.3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 16, 3))


def upwards() -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose2d(2, 4, 3), nn.ReLU(), nn.Dropout2d(0.5), nn.ConvTranspose2d(4, 4, 3, groups=2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip


FLAT, IMAGES = numbers(8, 6), numbers(8, 2, 6, 6)
OWN = [
    (perceptron, FLAT),
    (convolutional, IMAGES),
    (flattened, IMAGES),
    (spread_over_space, IMAGES),
    (upwards, IMAGES),
]


def target_for(model: nn.Module, inputs: Tensor, **options: Any) -> Target:
    return target_of(model, (inputs, torch.arange(len(inputs)) % 3), **options)


def kernel_of(plan: ChainPlan) -> Dropout:
    return cast(Dropout, plan.stages[-1].kernel)


def drawn(kernel: Dropout, model: nn.Module, chains: list[int], draw: int = 0) -> tuple[Draws, Draws]:
    start = first_networks(model, kernel.target.layout, "fresh", chains, 0)
    streams = Streams(0, chains, f"draw {draw}")
    return start, kernel.draw(kernel.init(start, streams), streams)


def masked_outputs(model: nn.Module, kernel: Dropout, state: dict[str, Tensor], stream: torch.Generator) -> Tensor:
    """The masks of a draw applied to activations, at the dropout layers themselves or at the inputs of layers."""
    model.load_state_dict(state)
    handles = []
    for place in kernel.places:
        mask, module = place.mask(stream).reshape(place.shape), model.get_submodule(place.module)
        if "Dropout" in type(module).__name__:
            handles.append(module.register_forward_hook(lambda m, given, result, mask=mask: result * mask))
        else:
            handles.append(module.register_forward_pre_hook(lambda m, given, mask=mask: (given[0] * mask,)))
    with torch.no_grad():
        result: Tensor = model.eval()(kernel.target.leaves[0])
    for handle in handles:
        handle.remove()
    return result


def assert_folded(kernel: Dropout, model: nn.Module) -> None:
    layout = kernel.target.layout
    for draw in range(5):
        start, found = drawn(kernel, model, [0, 1], draw)
        before, after = layout.networks(start.position, start.buffers), layout.networks(found.position, found.buffers)
        streams = Streams(0, [0, 1], f"draw {draw}").each("draw")
        for chain in range(2):
            state = {name: value[chain] for name, value in before.items()}
            expected = masked_outputs(model, kernel, state, streams[chain])
            model.load_state_dict({name: value[chain] for name, value in after.items()})
            with torch.no_grad():
                torch.testing.assert_close(model.eval()(kernel.target.leaves[0]), expected, rtol=1e-10, atol=1e-12)
        assert torch.equal(found.log_density, -kernel.target(found.position, found.buffers).potential)


@pytest.mark.parametrize(("make", "inputs"), OWN, ids=lambda value: getattr(value, "__name__", ""))
def test_a_draw_is_the_masked_forward_pass(make: Any, inputs: Tensor) -> None:
    model = make().double()
    kernel = kernel_of(Dropout().plan(target_for(model, inputs)))
    assert len(kernel.places) == sum("Dropout" in type(module).__name__ for module in model.modules())
    assert_folded(kernel, model)


class Sequence(nn.Module):
    """A linear layer that is shared by positions, and one tied pair that is not dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(6, 4)
        self.two = nn.Linear(4, 4)
        self.three = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.three(torch.tanh(self.two(torch.tanh(self.one(x)))).mean(1))
        return out


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3)), FLAT),
        (nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Conv2d(4, 3, 4, groups=1), nn.Flatten()), IMAGES),
        (Sequence(), numbers(8, 5, 6)),
    ],
)
def test_models_without_dropout_get_it_before_every_layer_but_the_first(model: nn.Module, inputs: Tensor) -> None:
    model = model.double()
    kernel = kernel_of(Dropout(dropout=0.4).plan(target_for(model, inputs)))
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    assert [place.layer for place in kernel.places] == layers[1:]
    assert_folded(kernel, model)


def test_layers_are_chosen_by_pattern() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)).double()
    kernel = kernel_of(Dropout(dropout={"*": 0.2, "4": 0.5, "2": 0.0}).plan(target_for(model, FLAT)))
    assert [(place.layer, place.rate, place.shape) for place in kernel.places] == [("0", 0.2, (6,)), ("4", 0.5, (4,))]


def test_masks_have_the_rate_and_mean_one() -> None:
    model = perceptron().double()
    kernel = kernel_of(Dropout().plan(target_for(model, FLAT)))
    generator = torch.Generator().manual_seed(0)
    for place in kernel.places:
        values = torch.cat([place.mask(generator) for _ in range(3000)])
        dropped = int((values == 0).sum())
        assert set(values.unique().tolist()) == {0.0, 1 / (1 - place.rate)}
        assert binomtest(dropped, len(values), place.rate).pvalue > 1e-4
        error = math.sqrt(place.rate / (1 - place.rate) / len(values))  # of the mean of mask / (1 - p)
        assert abs(float(values.mean()) - 1) < 4.5 * error


def test_biases_and_undropped_layers_stay() -> None:
    model = flattened().double()
    kernel = kernel_of(Dropout().plan(target_for(model, IMAGES)))
    start, found = drawn(kernel, model, [0])
    before, after = (kernel.target.layout.split(one.position) for one in (start, found))
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert changed == ["4.weight"]
    columns = (after["4.weight"] / before["4.weight"])[0]
    assert torch.allclose(columns, columns[:1].expand_as(columns))


def test_rate_zero_gives_the_trained_network() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    for rates in (0.0, {"2": 0.0}):
        kernel = kernel_of(Dropout(dropout=rates).plan(target_for(model, FLAT)))
        start, found = drawn(kernel, model, [0, 1])
        assert kernel.places == () and torch.equal(start.position, found.position)


def test_masks_belong_to_a_chain() -> None:
    model = convolutional().double()
    kernel = kernel_of(Dropout().plan(target_for(model, IMAGES)))
    _, together = drawn(kernel, model, [0, 1, 2])
    _, alone = drawn(kernel, model, [1])
    assert torch.equal(together.position[1], alone.position[0])
    _, other = drawn(kernel, model, [1], draw=1)
    assert not torch.equal(other.position, alone.position)


class Branching(nn.Module):
    """One dropout whose result is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.drop, self.two, self.three = nn.Linear(6, 3), nn.Dropout(0.2), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        kept = self.drop(torch.relu(self.one(x)))
        out: Tensor = self.two(kept) + self.three(kept)
        return out


class Attention(nn.Module):
    """Dropout before a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.drop, self.values = nn.Linear(6, 6), nn.Dropout(0.1), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.values(torch.softmax(self.drop(self.keys(x)), -1))
        return out


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.drop = nn.Linear(6, 6), nn.Linear(6, 3), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.two(self.drop(torch.relu(self.one(self.drop(x)))))
        return out


@pytest.mark.parametrize(
    ("model", "inputs", "words"),
    [
        (Attention(), FLAT, "drop, which cannot .what lies between it and values"),
        (Branching(), FLAT, "what lies between it and two"),
        (Twice(), FLAT, "runs more than once"),
        (nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.1)), FLAT, "no linear or convolution layer runs after it"),
        (nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.1), nn.Tanh(), nn.Linear(4, 3)), FLAT, "what lies between"),
        (
            nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.1), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 3)),
            FLAT,
            "betw",
        ),
        (nn.Sequential(nn.Linear(6, 4), nn.AlphaDropout(0.1), nn.Linear(4, 3)), FLAT, "AlphaDropout"),
        (nn.Sequential(nn.Conv2d(2, 3, 3), nn.Dropout(0.1), nn.Conv2d(3, 3, 4), nn.Flatten()), IMAGES, "48 units"),
        (nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), numbers(8, 5, 6), "which cannot"),
    ],
    ids=["softmax", "branches", "twice", "last", "tanh", "norm", "alpha", "pixels", "transformer"],
)
def test_what_cannot_be_folded_is_refused(model: nn.Module, inputs: Tensor, words: str) -> None:
    wide = model.double()
    goal = (inputs, numbers(8, 5, 6)) if inputs.dim() == 3 else (inputs, torch.arange(8) % 3)
    target = target_of(wide, goal, **({"noise": 1.0} if inputs.dim() == 3 else {}))  # type: ignore[typeddict-item]
    with pytest.raises(InputError, match=words):
        Dropout().plan(target)


def test_training_drops_inputs_of_layers_in_training_mode_only() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    target = target_for(model, FLAT)
    plan = Dropout(dropout={"2": 0.4}).plan(target)
    kernel = kernel_of(plan)
    trained = cast(Training, plan.stages[0].kernel).target
    start = first_networks(model, target.layout, "fresh", [0, 1], 0)
    assert torch.equal(trained(start.position, start.buffers).gradient, target(start.position, start.buffers).gradient)
    one = trained(start.position, start.buffers, training=True, seed=1)
    assert torch.equal(one.gradient, trained(start.position, start.buffers, training=True, seed=1).gradient)
    assert not torch.allclose(one.gradient, trained(start.position, start.buffers, training=True, seed=2).gradient)
    untouched = target(start.position, start.buffers, training=True)
    assert torch.equal(untouched.gradient, target(start.position, start.buffers).gradient)
    # What the second layer sees: each unit of each example is dropped at the rate, and others in other examples.
    hooked = dropping(target, kernel.outputs, list(kernel.places)).outputs
    assert hooked is not None
    seen: list[Tensor] = []
    layer = hooked.model.get_submodule("2")
    layer.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    with global_seed(0), torch.no_grad():
        many = numbers(2000, 6)
        hooked.model.train()(many)
        hidden = hooked.model.get_submodule("0")(many).relu()
    alive = hidden > 0
    dropped = int((seen[0][alive] == 0).sum())
    assert binomtest(dropped, int(alive.sum()), 0.4).pvalue > 1e-4
    torch.testing.assert_close(seen[0][seen[0] > 0], (hidden / 0.6)[seen[0] > 0])


def test_training_and_drawing_work_together() -> None:
    model = perceptron()
    target = target_for(model, FLAT.float())
    plan = Dropout(epochs=3, batch=4, draws=2, lr=0.01).plan(target)
    assert (plan.stages[0].steps, plan.stages[1].steps, plan.draws, plan.thin) == (6, 0, 2, (0,))
    streams, training = Streams(0, [0, 1], 0), plan.stages[0].kernel
    state = training.init(first_networks(model, target.layout, "fresh", [0, 1], 0), streams)
    for step in range(6):
        state, _ = training.step(state, StepIndex(step, 6), streams)
    kernel = kernel_of(plan)
    kept = kernel.init(training.draw(state, streams), streams)
    assert kernel.step(kept, StepIndex(0, 0), streams) == (kept, {})
    networks = kernel.draw(kept, Streams(0, [0, 1], "draw 0"))
    assert networks.position.dtype == torch.float32 and bool(torch.isfinite(networks.log_density).all())


def test_folding_knows_groups() -> None:
    model = nn.Sequential(nn.Conv1d(2, 4, 1), nn.Dropout1d(0.5), nn.Conv1d(4, 6, 2, groups=2), nn.Flatten()).double()
    kernel = kernel_of(Dropout().plan(target_of(model, (numbers(8, 2, 3), numbers(8, 12)), noise=1.0)))
    factor = columns(kernel.outputs.model.get_submodule("2"), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert factor is not None and factor[:, :, 0].tolist() == [[1.0, 2.0]] * 3 + [[3.0, 4.0]] * 3
    assert_folded(kernel, model)


def test_tied_weights_are_refused_where_dropping_would_change_both() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    model[2].weight = model[0].weight
    with pytest.raises(InputError, match="found 2, whose weights also act elsewhere"):
        Dropout().plan(target_for(model, FLAT))
    kernel = kernel_of(Dropout(dropout={"4": 0.3}).plan(target_for(model, FLAT)))
    assert_folded(kernel, model)


def test_bad_options_are_told_in_a_sentence() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    with pytest.raises(InputError, match="fits none of 0, 2"):
        Dropout(dropout={"7": 0.1}).plan(target_for(model, FLAT))
    with pytest.raises(InputError, match="from 0 to below 1"):
        Dropout(dropout=1.0).plan(target_for(model, FLAT))
    with pytest.raises(InputError, match="needs data"):
        Dropout().plan(target_of(model, None))
    with pytest.raises(InputError, match="leave one of them out"):
        Dropout(dropout=0.1).plan(target_for(perceptron().double(), FLAT))
    model[2].weight.requires_grad_(False)
    with pytest.raises(InputError, match=r"expected 2.weight among the trained"):
        Dropout(dropout=0.1).plan(target_for(model, FLAT))
