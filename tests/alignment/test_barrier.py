"""Paths between networks and their corrections, against closed forms and against the module itself."""

import json
from collections.abc import Callable, Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import onebasin as ob
from onebasin.alignment.barrier import barrier, barrier_report, temperature
from onebasin.alignment.repair import blend, recalibrate, repair, unit_statistics
from onebasin.errors import InputError, SpecError
from onebasin.functional.call import outputs
from onebasin.functional.losses import losses
from onebasin.metrics.calibration import COLDEST, HOTTEST
from onebasin.state import State, interpolate, state_of
from tests.models import BATTERY, Case


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def wide(state: dict[str, Tensor], dtype: torch.dtype = torch.float64) -> State:
    return {name: t.detach().to(dtype) if t.is_floating_point() else t.detach() for name, t in state.items()}


def noisy(model: nn.Module, seed: int) -> State:
    """A network of the same architecture, running variances kept positive; shared tensors keep one value."""
    generator = torch.Generator().manual_seed(seed)
    made: dict[int, Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        fresh = value.detach().double() * noise.exp() if name.endswith("running_var") else value.detach() + 0.5 * noise
        made.setdefault(id(value), fresh if value.is_floating_point() else value.detach().clone())
    return {name: made[id(value)] for name, value in model.state_dict(keep_vars=True).items()}


def case_of(name: str) -> Case:
    return next(case for case in BATTERY if case.name == name)


class Mlp(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3))


def rings(seed: int, examples: int = 240) -> tuple[Tensor, Tensor]:
    """Three noisy rings around the origin, one class each."""
    y = torch.arange(examples) % 3
    x = F.normalize(normal(examples, 2, seed=seed), dim=1) * (1.0 + y[:, None])
    return (x + 0.15 * normal(examples, 2, seed=seed + 1000)).float(), y


@pytest.fixture(scope="module")
def trained() -> State:
    """A network that tells the rings apart."""
    model = Mlp()
    generator = torch.Generator().manual_seed(0)
    weights = {n: torch.randn(p.shape, generator=generator) / p.shape[-1] ** 0.5 for n, p in model.named_parameters()}
    speed = {name: torch.zeros_like(value) for name, value in weights.items()}
    x, y = rings(0)
    slope = torch.func.grad(lambda w: F.cross_entropy(torch.func.functional_call(model, w, (x,)), y))
    for _ in range(200):  # gradient descent with momentum
        for name, gradient in slope(weights).items():
            speed[name] = 0.9 * speed[name] - 0.1 * gradient
            weights[name] = weights[name] + speed[name]
    return weights


@pytest.fixture(scope="module")
def symmetry() -> ob.Symmetry:
    return ob.discover(Mlp(), torch.zeros(2, 2))


def use_elements(monkeypatch: pytest.MonkeyPatch, keep: ob.Element, reference: ob.Element) -> None:
    """A search whose result is known: what is tested here is what is done with it."""

    def match(a: State, b: State, symmetry: ob.Symmetry, *, scale: str = "reference") -> Any:
        return SimpleNamespace(element={"keep": keep, "reference": reference}[scale])

    monkeypatch.setattr(import_module("onebasin.alignment.barrier"), "match", match)


# ------------------------------------------------------------------ the path


class Point(nn.Module):
    """The output is linear in the weights: x @ w."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(size, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


@settings(max_examples=25, deadline=None)
@given(size=st.integers(1, 5), examples=st.integers(1, 30), seed=st.integers(0, 999), half=st.integers(1, 8))
def test_linear_regression_is_a_parabola(size: int, examples: int, seed: int, half: int) -> None:
    """L(t) = (1 - t) L(0) + t L(1) - t (1 - t) mean((x (b - a))^2), exactly."""
    x, y = normal(examples, size, seed=seed), normal(examples, seed=seed + 1)
    a, b = {"w": normal(size, seed=seed + 2)}, {"w": normal(size, seed=seed + 3)}
    found = barrier(Point(size), a, b, (x, y), points=2 * half + 1, loss="mse", batch=7)
    t = torch.linspace(0, 1, 2 * half + 1, dtype=torch.float64)
    left, right = (((x @ end["w"] - y) ** 2).mean() for end in (a, b))
    bow = ((x @ (b["w"] - a["w"])) ** 2).mean()
    torch.testing.assert_close(found.t, t)
    torch.testing.assert_close(found.loss, (1 - t) * left + t * right - t * (1 - t) * bow, rtol=1e-10, atol=1e-12)
    assert found.max == pytest.approx(0, abs=1e-12)  # it sags between the ends
    assert found.midpoint == pytest.approx(-float(bow) / 4, rel=1e-9, abs=1e-12)
    assert found.error is None and found.error_max is None and found.error_midpoint is None
    upside_down = barrier(
        Point(size), a, b, (x, y), points=2 * half + 1, loss=lambda out, target: -((out - target) ** 2).mean()
    )
    on_grid = max(float(s * (1 - s) * bow) for s in t)
    assert upside_down.max == pytest.approx(on_grid, rel=1e-9, abs=1e-12)


def test_above_the_chord_and_above_the_mean_of_the_ends_differ() -> None:
    """On the way from 0 to 1 the square root rises at most 1/4 above its chord, at 1/4; the cube never does."""
    a, b, x, y = {"w": torch.zeros(1)}, {"w": torch.ones(1)}, torch.ones(4, 1), torch.zeros(4)
    root = barrier(Point(1), a, b, (x, y), loss=lambda out, _: out.sqrt())
    assert root.max == pytest.approx(0.25, abs=1e-7)
    assert float(root.t[(root.loss - root.t).argmax()]) == 0.25
    assert root.midpoint == pytest.approx(0.5**0.5 - 0.5, abs=1e-7)
    cube = barrier(Point(1), a, b, (x, y), loss=lambda out, _: out**3)
    assert cube.max == 0 and cube.midpoint == 0.125 - 0.5
    assert float(cube.loss.max() - cube.loss[[0, -1]].mean()) == 0.5  # what "max minus mean of ends" would have said


def test_error_has_the_same_two_barriers() -> None:
    """The class is the sign of w: wrong until the middle, where the first class wins the tie, right after it."""
    model = nn.Linear(1, 2, bias=False)
    a, b = {"weight": torch.tensor([[1.0], [-1.0]])}, {"weight": torch.tensor([[-1.0], [1.0]])}
    found = barrier(model, a, b, (torch.ones(3, 1), torch.ones(3).long()), points=5)
    assert found.error is not None and found.error.tolist() == [1, 1, 1, 0, 0]
    assert found.error_max == 0.5 and found.error_midpoint == 0.5


def test_a_permuted_copy_is_one_permutation_away(
    trained: State, symmetry: ob.Symmetry, monkeypatch: pytest.MonkeyPatch
) -> None:
    element = symmetry.random(3, freedoms=["permutation"])
    moved = symmetry.apply(element, trained)
    use_elements(monkeypatch, symmetry.invert(element), symmetry.invert(element))
    model, (x, y) = Mlp(), rings(0)
    assert losses(model, trained, x, y).loss < 0.2
    found = barrier(model, trained, moved, (x, y), points=11, test=rings(1), symmetry=symmetry)
    assert found.test is not None and found.aligned is not None and found.aligned.test is not None
    for raw, straight in ((found, found.aligned), (found.test, found.aligned.test)):
        assert raw.max > 0.3 and raw.midpoint > 0.3
        assert straight.max == 0 and straight.midpoint == 0  # the same network all the way
        assert straight.error_max == 0
    paths = ["as given, train", "as given, test", "aligned, train", "aligned, test"]
    assert list(found.to_dataframe()["path"]) == paths


def test_the_way_to_an_equivalent_network_is_found(trained: State, symmetry: ob.Symmetry) -> None:
    """With the search itself: permuted and rescaled, and brought back."""
    moved = symmetry.apply(symmetry.random(4), wide(trained))
    found = barrier(Mlp(), wide(trained), moved, rings(0), points=5, symmetry=symmetry)
    assert found.aligned is not None and found.max > 0.3
    assert found.aligned.max == pytest.approx(0, abs=1e-6)


def test_ends_may_be_modules_and_nothing_changes() -> None:
    case = case_of("bn_mlp_tanh")
    model, first, second = case.build().train(), case.build(), case.build()
    with torch.no_grad():
        for p in second.parameters():
            p.mul_(1.5)
    x = case.inputs()
    y = torch.arange(len(x)) % outputs(first, state_of(first), x).shape[1]
    kept = [{n: t.clone() for n, t in m.state_dict().items()} for m in (model, first, second)]
    x_before, flags = x.clone(), [m.training for m in model.modules()]
    for variance in (None, "recalibrate", "repair"):
        found = barrier(model, first, second, (x, y), points=3, variance=variance)
        assert found.loss[0] == losses(model, state_of(first), x, y).loss  # the ends are never corrected
        assert found.loss[-1] == losses(model, state_of(second), x, y).loss
    for m, before in zip((model, first, second), kept, strict=True):
        assert all(torch.equal(t, before[n]) for n, t in m.state_dict().items())
    assert torch.equal(x, x_before) and flags == [m.training for m in model.modules()]


class Tangle(nn.Module):
    """Views and products of its input, and a buffer beside its state: all that autograd might want to keep."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True), nn.Linear(6, 3))
        self.last = nn.Linear(3, 2)
        self.register_buffer("gain", torch.arange(1.0, 4.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.layers(x) * x.view(-1, 3) * self.gain)
        return result


VARIANCES = (None, "recalibrate", "repair")


def test_inference_mode_makes_no_difference() -> None:
    """Whether the networks and the data were made in it, or the path is walked in it."""
    model, y = Tangle(), torch.arange(20) % 2
    a, b, x = wide(noisy(model, 0)), wide(noisy(model, 1)), normal(20, 3)
    with torch.inference_mode():
        c, d, z = ({n: t.clone() for n, t in a.items()}, {n: t.clone() for n, t in b.items()}, x.clone())
    for variance in VARIANCES:
        expected = barrier(model, a, b, (x, y), points=3, variance=variance)
        for inside in (True, False):
            with torch.inference_mode(inside):
                for first, second, inputs in ((a, b, x), (c, d, z)):
                    found = barrier(model, first, second, (inputs, y), points=3, variance=variance)
                    assert torch.equal(found.loss, expected.loss)


def test_live_parameters_are_read_without_their_gradients(symmetry: ob.Symmetry, trained: State) -> None:
    a, (x, y) = trained, rings(0, 30)
    b = wide(noisy(Mlp(), 3), torch.float32)
    live, alive = ({name: nn.Parameter(value.clone()) for name, value in state.items()} for state in (a, b))
    for variance in (None, "repair"):
        plain = barrier(Mlp(), a, b, (x, y), points=3, symmetry=symmetry, variance=variance)
        found = barrier(Mlp(), live, alive, (x.requires_grad_(), y), points=3, symmetry=symmetry, variance=variance)
        assert plain.aligned is not None and found.aligned is not None
        assert torch.equal(found.loss, plain.loss) and torch.equal(found.aligned.loss, plain.aligned.loss)
        assert not found.loss.requires_grad
    report = barrier_report(Mlp(), live, alive, symmetry, (x, y), points=3)
    assert report.rows == barrier_report(Mlp(), a, b, symmetry, (x.detach(), y), points=3).rows
    done = repair(Mlp(), live, unit_statistics(Mlp(), alive, x), x)
    assert not any(value.requires_grad for value in done.state.values())


def test_corrections_act_between_the_ends() -> None:
    case = case_of("squeeze_excite")  # with layers that a batch norm follows, and layers without
    model, x = case.build(), normal(24, 2, 6, 6)
    a, b = noisy(model, 0), noisy(model, 1)
    y = torch.arange(24) % outputs(model, a, x).shape[1]
    quarter = interpolate(a, b, 0.25)
    targets = blend([unit_statistics(model, end, x) for end in (a, b)], (0.75, 0.25))
    by_hand = {
        None: quarter,
        "recalibrate": recalibrate(model, quarter, x),
        "repair": repair(model, quarter, targets, x).state,
    }
    for variance, state in by_hand.items():
        found = barrier(model, a, b, (x, y), points=5, variance=variance)
        assert float(found.loss[1]) == losses(model, state, x, y).loss
    assert len({losses(model, state, x, y).loss for state in by_hand.values()}) == 3


# ------------------------------------------------------------------ batch norm


def entering(model: nn.Module, state: State, x: Any, kinds: Any) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(name, input, output) of every module of some kinds, by hooks on a module that holds the weights."""
    model.double().eval().load_state_dict(state)
    seen: list[tuple[str, Tensor, Tensor]] = []

    def note(name: str) -> Callable[..., None]:
        return lambda module, args, out: seen.append((name, args[0].clone(), out.clone()))

    for name, module in model.named_modules():
        if isinstance(module, kinds):
            module.register_forward_hook(note(name))
    with torch.no_grad():
        model(*x) if isinstance(x, tuple) else model(x)
    yield from seen


def over_units(values: Tensor, axis: int) -> Tensor:
    return values.movedim(axis, 0).flatten(1)


@pytest.mark.parametrize("name", ["resnet_bn", "bn_mlp_tanh", "densenet_bn", "squeeze_excite"])
def test_recalibrated_norms_know_what_enters_them(name: str) -> None:
    case = case_of(name)
    model = case.build()
    x = normal(12, *case.inputs().shape[1:])
    state = noisy(model, 0)
    new = recalibrate(model, state, x)
    norms = list(entering(case.build(), new, x, nn.modules.batchnorm._BatchNorm))
    assert norms
    for norm, inside, _ in norms:
        torch.testing.assert_close(new[f"{norm}.running_mean"], over_units(inside, 1).mean(1), rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(new[f"{norm}.running_var"], over_units(inside, 1).var(1), rtol=1e-9, atol=1e-11)
        assert not torch.allclose(new[f"{norm}.running_var"], state[f"{norm}.running_var"])
    measured = {f"{norm}.{kind}" for norm, _, _ in norms for kind in ("running_mean", "running_var")}
    assert all(torch.equal(new[n], state[n]) for n in state if n not in measured)


def test_batches_are_combined_by_the_law_of_total_variance() -> None:
    """Sorted data: every batch has nearly no variance, and their average, as torch has it, would be nearly zero."""
    model = nn.Sequential(nn.BatchNorm1d(2, momentum=None), nn.Dropout(0.9), nn.Linear(2, 1)).double()
    x = normal(101, 2).sort(0).values
    before = state_of(model)
    new = recalibrate(model, before, x, batch=10)
    torch.testing.assert_close(new["0.running_mean"], x.mean(0))
    torch.testing.assert_close(new["0.running_var"], x.var(0))
    assert bool((torch.stack([part.var(0) for part in x.split(10)[:-1]]).mean(0) < 0.2 * x.var(0)).all())
    assert torch.equal(before["0.running_var"], torch.ones(2))


def test_one_batch_is_what_torch_measures() -> None:
    case = case_of("resnet_bn")
    model, x = case.build(), case.inputs()
    mine = recalibrate(model, state_of(model), x)
    theirs = case.build().train()
    for norm in (m for m in theirs.modules() if isinstance(m, nn.BatchNorm2d)):
        norm.reset_running_stats()
        norm.momentum = None
    theirs(x)
    # the stem is measured before any norm; behind one, torch normalises by the biased variance
    for kind in ("norm.running_mean", "norm.running_var"):
        torch.testing.assert_close(mine[kind], theirs.state_dict()[kind])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_recalibration_keeps_dtypes(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    state, x = wide(model.state_dict(), dtype), normal(50, 3).float()
    new = recalibrate(model, state, x)
    assert {n: t.dtype for n, t in new.items()} == {n: t.dtype for n, t in state.items()}
    pre = x.double() @ state["0.weight"].double().T + state["0.bias"].double()
    tolerance = max(torch.finfo(dtype).eps, 1e-5)
    torch.testing.assert_close(new["1.running_var"].double(), pre.var(0), rtol=tolerance, atol=1e-6)


def test_nothing_to_recalibrate() -> None:
    with pytest.raises(InputError, match="repair works for networks without one"):
        recalibrate(Mlp(), state_of(Mlp()), torch.zeros(4, 2))
    norm = nn.BatchNorm1d(2)
    with pytest.raises(InputError, match="give more examples"):
        recalibrate(norm, state_of(norm), torch.zeros(1, 2))


# ------------------------------------------------------------------ REPAIR

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def unit_rows(name: str, model: nn.Module, out: Tensor) -> Tensor:
    return over_units(out, -1 if isinstance(model.get_submodule(name), nn.Linear) else 1)


@pytest.mark.parametrize(
    "name",
    ["mlp_relu", "residual_mlp", "conv_flatten", "grouped", "depthwise_separable", "unet", "squeeze_excite",
     "encoder_prenorm_relu", "swiglu", "experts_modules", "decoder_gqa"],
)  # fmt: skip
def test_repaired_units_have_the_mean_and_spread_of_their_parents(name: str) -> None:
    case = case_of(name)
    model, x = case.build(), case.inputs()
    x = normal(24, *x.shape[1:]) if x.is_floating_point() else x
    ends = [noisy(model, 0), noisy(model, 1)]
    middle = interpolate(*ends, 0.25)
    done = repair(model, middle, blend([unit_statistics(model, end, x) for end in ends], (0.75, 0.25)), x)
    wanted: dict[str, list[Tensor]] = {}
    for end, share in zip(ends, (0.75, 0.25), strict=True):
        for layer, _, out in entering(case.build(), end, x, LAYERS):
            rows = unit_rows(layer, model, out)
            sums = wanted.setdefault(layer, [torch.zeros(()), torch.zeros(())])
            sums[0], sums[1] = sums[0] + share * rows.mean(1), sums[1] + share * rows.std(1, correction=0)
    assert (done.corrected or done.scaled) and not done.constant
    for layer, _, out in entering(case.build(), done.state, x, LAYERS):
        rows, (mean, std) = unit_rows(layer, model, out), wanted[layer]
        if f"{layer}.weight" in done.corrected:
            torch.testing.assert_close(rows.mean(1), mean, rtol=1e-8, atol=1e-8)
        if f"{layer}.weight" in (*done.corrected, *done.scaled):
            torch.testing.assert_close(rows.std(1, correction=0), std, rtol=1e-8, atol=1e-8)
        else:
            assert f"{layer}.weight" in done.left
            assert torch.equal(done.state[f"{layer}.weight"], middle[f"{layer}.weight"])


def test_which_layers_are_left_alone_and_why() -> None:
    def left(name: str, x: Any = None) -> dict[str, str]:
        case = case_of(name)
        model = case.build()
        x = case.inputs() if x is None else x
        return dict(repair(model, state_of(model), unit_statistics(model, state_of(model), x), x).left)

    assert set(left("mlp_relu")) == {"4.weight"} and "gives the output" in left("mlp_relu")["4.weight"]
    assert set(left("experts_modules")) == {"gate.weight", *(f"experts.{i}.2.weight" for i in range(3))}
    assert "batch norm follows" in left("resnet_bn")["blocks.0.conv1.weight"]
    assert all("more than once" in why for why in left("tied_autoencoder_tanh").values())
    assert "more than once" in left("siamese")["shared.weight"]
    assert "more than once" in left("encoder_tied")["embed.weight"]


def test_an_activation_in_place_hides_no_layer_from_repair() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    x, state = normal(30, 3), state_of(model)
    done = repair(model, state, unit_statistics(model, state, x), x)
    assert done.corrected == ("0.weight",) and done.norms == ("2.running_mean",)
    assert done.summary == "1 layer rescaled, 1 batch norm recalibrated"


def test_repairing_a_network_to_itself_changes_nothing() -> None:
    model = Mlp().double()
    x, state = normal(40, 2), noisy(Mlp().double(), 0)
    done = repair(model, state, unit_statistics(model, state, x), x)
    for name, value in state.items():
        torch.testing.assert_close(done.state[name], value, rtol=1e-10, atol=1e-12)


def test_constant_units_are_shifted_only() -> None:
    model = Mlp().double()
    x, a, b = normal(40, 2), noisy(Mlp().double(), 0), noisy(Mlp().double(), 1)
    b["0.weight"][3] = -a["0.weight"][3] * (1 + 1e-12)  # half way between, this unit sees nothing of the input
    middle = interpolate(a, b, 0.5)
    targets = blend([unit_statistics(model, end, x) for end in (a, b)], (0.5, 0.5))
    done = repair(model, middle, targets, x)
    assert done.constant == {"0.weight": 1} and "1 constant unit shifted" in str(done)
    found = unit_statistics(model, done.state, x)["0.weight"]
    torch.testing.assert_close(found[0], targets["0.weight"][0])
    assert found[1][3] < 1e-9  # rounding noise was not blown up to the size of a unit


def test_several_batches() -> None:
    """Statistics of parents are exact, the first layer is exact, later ones come close."""
    model = Mlp().double()
    x, ends = normal(400, 2), [noisy(Mlp().double(), seed) for seed in (0, 1)]
    for end in ends:
        whole, parts = unit_statistics(model, end, x), unit_statistics(model, end, x, batch=70)
        for name, pair in whole.items():
            torch.testing.assert_close(parts[name], pair, rtol=1e-10, atol=1e-12)
    targets = blend([unit_statistics(model, end, x) for end in ends], (0.5, 0.5))
    middle = interpolate(*ends, 0.5)
    done = repair(model, middle, targets, x, batch=70)
    found, raw = unit_statistics(model, done.state, x), unit_statistics(model, middle, x)
    torch.testing.assert_close(found["0.weight"], targets["0.weight"], rtol=1e-10, atol=1e-12)
    off, was_off = ((s["2.weight"][1] - targets["2.weight"][1]).norm() for s in (found, raw))
    assert off < 0.2 * was_off


def test_layers_can_be_chosen() -> None:
    model, x = Mlp().double(), normal(40, 2)
    ends = [noisy(model, 0), noisy(model, 1)]
    targets = blend([unit_statistics(model, end, x) for end in ends], (0.5, 0.5))
    middle = interpolate(*ends, 0.5)
    done = repair(model, middle, targets, x, layers=["4.weight"])
    assert done.corrected == ("4.weight",)
    torch.testing.assert_close(unit_statistics(model, done.state, x)["4.weight"], targets["4.weight"])
    with pytest.raises(InputError, match=r"choose among 0\.weight, 2\.weight, 4\.weight"):
        repair(model, middle, targets, x, layers=["1.weight"])


def test_repair_keeps_dtypes_and_originals() -> None:
    model, x = Mlp(), rings(0)[0]
    ends = [wide(noisy(model, seed), torch.float16) for seed in (0, 1)]
    middle = interpolate(*ends, 0.5)
    before = {n: t.clone() for n, t in middle.items()}
    targets = blend([unit_statistics(model, end, x) for end in ends], (0.5, 0.5))
    done = repair(model, middle, targets, x)
    assert all(t.dtype == torch.float16 for t in done.state.values())
    assert all(torch.equal(t, before[n]) for n, t in middle.items())
    found = unit_statistics(model, done.state, x)
    torch.testing.assert_close(found["0.weight"], targets["0.weight"], rtol=0.01, atol=0.01)


# ------------------------------------------------------------------ temperature


@settings(max_examples=60, deadline=None)
@given(classes=st.integers(2, 6), seed=st.integers(0, 999), size=st.floats(-3, 3))
def test_the_slope_vanishes_at_the_temperature(classes: int, seed: int, size: float) -> None:
    """The loss is convex in 1/T, so a stationary point is the minimum; its slope comes from autograd."""
    y = torch.randint(classes, (40,), generator=torch.Generator().manual_seed(seed))
    z = normal(40, classes, seed=seed) + 1.5 * F.one_hot(y, classes)
    z[0, y[0]] = z[0].min() - 1  # wrong at least once, or no temperature would be low enough
    z = z * 10**size
    found = temperature(z, y)
    assert COLDEST < found < HOTTEST
    s = torch.tensor(1 / found, dtype=torch.float64, requires_grad=True)
    loss = F.cross_entropy(z * s, y)
    loss.backward()
    assert s.grad is not None and abs(float(s.grad) / found) < 1e-10  # slope in log T
    for factor in (0.9, 1.1):
        assert float(F.cross_entropy(z / (found * factor), y)) > float(loss.detach())
    assert temperature(3 * z, y) == pytest.approx(3 * found, rel=1e-9)


def test_temperature_against_scipy() -> None:
    optimize = pytest.importorskip("scipy.optimize")
    y = torch.arange(60) % 4
    z = 5 * (normal(60, 4) + F.one_hot(y, 4))
    best = optimize.minimize_scalar(
        lambda log: float(F.cross_entropy(z / torch.tensor(log).exp(), y)), bounds=(-5, 5), method="bounded",
        options={"xatol": 1e-10},
    )  # fmt: skip
    assert temperature(z, y) == pytest.approx(float(torch.tensor(best.x).exp()), rel=1e-6)
    assert temperature(z.half(), y) == pytest.approx(temperature(z.half().double(), y), rel=1e-12)


def test_temperatures_at_the_limits() -> None:
    y = torch.arange(6) % 3
    assert temperature(F.one_hot(y, 3).double(), y) == COLDEST  # always right: the surer the better
    assert temperature(-F.one_hot(y, 3).double(), y) == HOTTEST  # always wrong: better say nothing
    assert temperature(torch.zeros(6, 3), y) == HOTTEST
    assert temperature(normal(2, 3, 5), torch.zeros(2, 5).long()) > 0  # pixels
    with pytest.raises(InputError, match="at least two classes"):
        temperature(torch.zeros(6, 1), torch.zeros(6).long())


# ------------------------------------------------------------------ the report


def test_the_report_tells_permutation_from_scale(
    trained: State, symmetry: ob.Symmetry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that was permuted and rescaled: undoing the permutation is not enough, undoing both is everything."""
    turn, stretch = symmetry.random(1, freedoms=["permutation"]), symmetry.random(2, freedoms=["scale"])
    full = symmetry.compose(turn, stretch)
    start = wide(trained)
    moved = symmetry.apply(full, start)
    use_elements(monkeypatch, symmetry.invert(turn), symmetry.invert(full))
    model, train, test = Mlp(), rings(0), rings(1)
    before = {name: value.clone() for name, value in moved.items()}
    report = barrier_report(model, start, moved, symmetry, train, test, points=5)
    rows = {(row["step"], row["data"]): row for row in report.rows}
    for data in ("train", "test"):
        raw, turned, scaled, repaired, hot, control = (rows[step.name, data] for step in report.steps)
        assert raw["loss_barrier"] > 0.3 and raw["gain"] is None
        assert raw["midpoint_barrier"] > turned["midpoint_barrier"] > 1e-4
        assert scaled["loss_barrier"] == pytest.approx(0, abs=1e-9)
        assert scaled["midpoint_gain"] == pytest.approx(turned["midpoint_barrier"], abs=1e-9)
        assert repaired["loss_barrier"] == pytest.approx(0, abs=1e-9)  # there is nothing to repair any more
        gains = [row["midpoint_gain"] for row in (turned, scaled, repaired, hot)]
        assert sum(gains) == pytest.approx(raw["midpoint_barrier"] - hot["midpoint_barrier"], abs=1e-12)
        assert control["gain"] is None and control["midpoint_barrier"] == pytest.approx(0, abs=1e-9)
        assert hot["midpoint_loss"] == control["midpoint_loss"] and hot["error_barrier"] == repaired["error_barrier"]
    assert rows["temperature", "train"]["midpoint_loss"] <= rows["variance", "train"]["midpoint_loss"]
    raw_path = barrier(model, start, moved, train, points=5, test=test)
    assert report.steps[0].path.max == raw_path.max
    data = json.loads(report.to_json())
    assert data["rows"] == report.rows and len(data["curves"]) == 12 and data["t"] == [0, 0.25, 0.5, 0.75, 1]
    text = str(report)
    assert "2 layers rescaled" in text and "T = " in text and len(text.splitlines()) == 2 * 7 + 1 + 1 + 2
    assert all(torch.equal(value, before[name]) for name, value in moved.items())


def test_temperature_explains_a_network_that_only_doubts(monkeypatch: pytest.MonkeyPatch) -> None:
    """w at one end and 5 w at the other: the middle 3 w is some 1/T w, so one temperature for each removes it all."""
    model, (x, y) = nn.Linear(2, 3).double(), rings(0)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()
    centres = torch.stack([x[y == label].mean(0) for label in range(3)]).double()
    w = {"weight": centres, "bias": -centres.square().sum(1) / 2}
    symmetry = ob.discover(model, torch.zeros(2, 2).double())
    use_elements(monkeypatch, symmetry.identity(), symmetry.identity())
    report = barrier_report(model, w, {n: 5 * t for n, t in w.items()}, symmetry, (x.double(), y), points=5)
    assert [step.name for step in report.steps][1:3] == ["permutation and sign", "variance"]  # there is no scale
    last = report.steps[-1].path
    torch.testing.assert_close(last.loss, last.loss[:1].expand(5), rtol=1e-9, atol=0)
    assert abs(report.steps[0].path.midpoint) > 1e-3


def test_temperatures_are_fitted_where_one_asks(
    trained: State, symmetry: ob.Symmetry, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_elements(monkeypatch, symmetry.identity(), symmetry.identity())
    x, y = rings(0)
    noise = torch.where(torch.arange(len(y)) % 5 == 0, (y + 1) % 3, y)  # a fifth of the answers count as wrong
    ends = trained, {name: 2 * value for name, value in trained.items()}
    report = barrier_report(Mlp(), *ends, symmetry, (x, y), points=3, calibration=(x, noise))
    for t, end in zip((0, -1), ends, strict=True):
        logits = outputs(Mlp(), end, x)
        expected = float(F.cross_entropy(logits / temperature(logits, noise), y))
        assert float(report.steps[-1].path.loss[t]) == pytest.approx(expected, rel=1e-5)
    plain, between = (step.path.loss for step in report.steps[-3:-1])
    assert plain[0] == between[0] and plain[1] != between[1] and plain[2] == between[2]
    # on the training data the network is always right, which would call for T = 0: it is left as it is
    assert losses(Mlp(), trained, x, y).error == 0
    usual = barrier_report(Mlp(), *ends, symmetry, (x, y), points=3)
    assert float(usual.steps[-1].path.loss[0]) == losses(Mlp(), trained, x, y).loss


def test_regression_has_no_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Mlp().double(), normal(20, 2)
    symmetry = ob.discover(model, x)
    use_elements(monkeypatch, symmetry.identity(), symmetry.identity())
    report = barrier_report(model, noisy(model, 0), noisy(model, 1), symmetry, (x, normal(20, 3)), points=3, loss="mse")
    assert [step.name for step in report.steps] == ["as given", "permutation and sign", "scale", "variance"]
    assert all(row["error_barrier"] is None and row["midpoint_error"] is None for row in report.rows)
    assert json.loads(report.to_json())["curves"][0]["error"] is None and "variance" in str(report)


# ------------------------------------------------------------------ refusals

A = {"w": torch.zeros(1)}
X, Y = torch.ones(4, 1), torch.zeros(4)


def misspelt(function: Callable[..., Any], *args: Any, **options: Any) -> Callable[[], Any]:
    """A call that a type checker would refuse."""
    return lambda: function(*args, **options)


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda: barrier(Point(1), A, A, (X, Y), points=10, loss="mse"), InputError, "must be in the middle"),
        (lambda: barrier(Point(1), A, A, (X, Y), points=1, loss="mse"), InputError, "must be in the middle"),
        (lambda: barrier(Point(1), A, A, (X, Y), loss="mse", variance="more"), InputError, '"recalibrate" or "repair"'),
        (lambda: barrier(Point(1), A, A, (X, Y), loss="mse", variance="recalibrate"), InputError, "nothing to recal"),
        (lambda: barrier(Point(1), A, A, (X, torch.zeros(3)), loss="mse"), InputError, "found 3 targets"),
        (lambda: barrier(Point(1), A, {"w": torch.zeros(2)}, (X, Y), loss="mse"), SpecError, "one architecture"),
        (lambda: barrier(Point(2), A, A, (X, Y), loss="mse"), SpecError, "one architecture"),
        (misspelt(barrier, Point(1), A, {"w": [0.0]}, (X, Y), loss="mse"), SpecError, "only dense tensors"),
        (misspelt(barrier, Point(1), A, A, (X, Y), varience="repair"), TypeError, "varience"),
        (misspelt(barrier_report, Point(1), A, A, None, (X, Y), calibrate=3), TypeError, "calibrate"),
        (
            lambda: barrier(Point(1), A, {"w": torch.full((1,), torch.nan)}, (X, Y), points=3, loss="mse"),
            InputError,
            "t = 0.500: .* NaN or infinity in the weights",
        ),
    ],
)
def test_refusals(call: Callable[[], Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        call()
