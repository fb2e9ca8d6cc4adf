"""What a model computes with given weights: against the module itself, and with nothing left behind."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from onebasin.errors import InputError, SlowWarning, SpecError
from onebasin.functional import population_pass as population
from onebasin.functional.call import outputs
from onebasin.functional.losses import losses, score
from onebasin.functional.norms import Moments
from onebasin.functional.population_pass import predictions
from onebasin.population.population import Population
from onebasin.state import State, state_of
from tests.models import BATTERY, Case

NAMES = (
    "mlp_relu", "weight_norm_tanh", "tied_autoencoder_tanh", "repeated_linear_relu", "siamese", "conv_flatten",
    "grouped", "resnet_bn", "bn_mlp_tanh", "lstm_bidirectional", "gru_learned_start", "encoder_prenorm_relu",
    "encoder_tied", "decoder_rope_gqa", "attention_fused", "experts",
)  # fmt: skip
CASES = [case for case in BATTERY if case.name in NAMES]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def other_state(model: nn.Module, seed: int = 7) -> State:
    """Weights other than the module's own; shared tensors keep one value."""
    generator = torch.Generator().manual_seed(seed)
    made: dict[int, Tensor] = {}
    for value in model.state_dict(keep_vars=True).values():
        noise = torch.rand(value.shape, generator=generator) if value.is_floating_point() else None
        made.setdefault(id(value), value.detach() + 0.1 * noise if noise is not None else value.detach().clone())
    return {name: made[id(value)] for name, value in model.state_dict(keep_vars=True).items()}


def fingerprint(model: nn.Module) -> list[Any]:
    """Every attribute of every module by identity, and every tensor by value."""
    tensors = [(name, t.detach().clone()) for name, t in [*model.named_parameters(), *model.named_buffers()]]
    kept = [
        [(key, id(value)) for key, value in held.items()]
        for m in model.modules()
        for held in (vars(m), m._parameters, m._buffers, m._modules)
    ]
    return [tensors, kept, [m.training for m in model.modules()]]


def same(before: list[Any], after: list[Any]) -> bool:
    values = all(n == m and torch.equal(a, b) for (n, a), (m, b) in zip(before[0], after[0], strict=True))
    return values and before[1:] == after[1:]


def by_the_module(case: Case, state: State) -> Tensor:
    """The plain way: load the weights into a fresh module and call it."""
    model = case.build().eval()
    model.load_state_dict(state)
    inputs = case.inputs()
    with torch.no_grad():
        result = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
    assert isinstance(result, Tensor)
    return result


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_outputs_are_those_of_the_module_which_stays_as_it_was(case: Case) -> None:
    model = case.build()
    next(iter(model.children()), model).train()  # a mixture of modes, to be kept
    state, inputs = other_state(model), case.inputs()
    copies = {name: value.clone() for name, value in state.items()}
    before, random_before = fingerprint(model), torch.random.get_rng_state()
    found = outputs(model, state, inputs)
    torch.testing.assert_close(found, by_the_module(case, state), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(found, by_the_module(case, state_of(model)))  # its own weights were not used
    assert same(before, fingerprint(model))
    assert torch.equal(random_before, torch.random.get_rng_state())
    assert all(torch.equal(state[name], copies[name]) for name in state)


@pytest.mark.filterwarnings("ignore::onebasin.errors.SlowWarning")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_population_predicts_like_its_members(case: Case) -> None:
    model = case.build().double()
    states = [other_state(model, seed) for seed in range(3)]
    before = fingerprint(model)
    found = predictions(model, Population.from_states(states), case.inputs(), chunk=2)
    expected = torch.stack([outputs(model, state, case.inputs()) for state in states])
    assert found.dtype == torch.float64  # the float32 inputs followed
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    assert same(before, fingerprint(model))


def test_members_are_vectorised_where_torch_can(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any) -> Any:
        raise AssertionError("fell back to one by one")

    monkeypatch.setattr(population._OneByOne, "__call__", refuse)
    for case in CASES:
        if case.name in ("mlp_relu", "resnet_bn", "grouped", "tied_autoencoder_tanh", "weight_norm_tanh"):
            model = case.build()
            predictions(model, Population.from_models([model, model]), case.inputs())


def test_a_model_that_cannot_be_vectorised_runs_member_by_member() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.w if self.w.item() > 0 else -x  # vmap has no `item`

    population = Population.from_stacked({"w": torch.tensor([[2.0], [-1.0], [3.0]])})
    with pytest.warns(SlowWarning, match=r"of Branch in one pass .*item\(\).* one after the other"):
        found = predictions(Branch(), population, torch.tensor([[1.0], [2.0]]), chunk=2, batch=1)
    assert found.squeeze(-1).tolist() == [[2.0, 4.0], [-1.0, -2.0], [3.0, 6.0]]


@settings(max_examples=25, deadline=None)
@given(examples=st.integers(1, 23), batch=st.integers(1, 30), seed=st.integers(0, 99))
def test_batches_do_not_matter(examples: int, batch: int, seed: int) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.9), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double()
    state, x = other_state(model, seed), normal(examples, 3, seed=seed).double()
    y = torch.arange(examples) % 2
    torch.testing.assert_close(outputs(model, state, x, batch=batch), outputs(model, state, x), rtol=1e-12, atol=0)
    whole, part = losses(model, state, x, y), losses(model, state, x, y, batch=batch)
    assert part.loss == pytest.approx(whole.loss, rel=1e-12)
    assert part.error == pytest.approx(whole.error, abs=1e-12)
    assert part.examples == examples


def test_keyword_inputs_and_notes_left_by_a_forward_pass() -> None:
    class Notes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))
            self.register_buffer("calls", torch.zeros(()))
            self.register_buffer("offset", torch.ones(2), persistent=False)

        def forward(self, x: Tensor, *, times: Tensor, power: int = 1) -> Tensor:
            self.calls += 1
            self.offset *= 1
            self.last = x
            return (self.w * x + self.offset) ** power * times

    model, x = Notes(), normal(5, 2)
    state = {"w": torch.full((2,), 3.0), "calls": torch.zeros(())}
    before = fingerprint(model)
    found = outputs(model, state, {"x": x, "times": torch.arange(5.0)[:, None], "power": 2}, batch=2)
    torch.testing.assert_close(found, (3 * x + 1) ** 2 * torch.arange(5.0)[:, None])
    assert same(before, fingerprint(model)) and not hasattr(model, "last")
    assert state["calls"] == 0


def test_a_module_under_two_names_and_random_numbers() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = self.two = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x)) + torch.rand(2)  # somebody else's model may draw

    model, x = Twice(), normal(3, 2)
    state = other_state(model)
    before, random_before = fingerprint(model), torch.random.get_rng_state()
    found = outputs(model, state, x)
    assert same(before, fingerprint(model)) and torch.equal(random_before, torch.random.get_rng_state())
    noise = torch.rand(2)
    torch.random.set_rng_state(random_before)
    w, b = state["one.weight"], state["two.bias"]
    torch.testing.assert_close(found, (x @ w.T + b) @ w.T + b + noise)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_weights_decide_the_dtype(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.BatchNorm1d(3), nn.ReLU(), nn.Flatten(), nn.Linear(9, 2))
    state = {n: t.to(dtype) if t.is_floating_point() else t for n, t in other_state(model).items()}
    x = normal(6, 2, 4)
    wide = {n: t.double() if t.is_floating_point() else t for n, t in state.items()}
    exact = outputs(model, wide, x.double())
    found = outputs(model, state, x)
    assert found.dtype == dtype and exact.dtype == torch.float64
    # computed in float32 at least: only the last rounding to the dtype is left
    torch.testing.assert_close(found.double(), exact, rtol=max(torch.finfo(dtype).eps, 1e-5), atol=1e-6)
    assert predictions(model, Population.from_states([state]), x).dtype == dtype
    y = torch.tensor([0, 1, 0, 1, 1, 0])
    assert losses(model, state, x, y).loss == pytest.approx(losses(model, wide, x.double(), y).loss, rel=1e-5)


def test_losses_against_their_formulas() -> None:
    model, x = nn.Linear(3, 4).double(), normal(11, 3).double()
    state = other_state(model)
    out = x @ state["weight"].T + state["bias"]
    classes = torch.arange(11) % 4
    found = losses(model, state, x, classes, batch=4)
    expected = -(out.softmax(1).log()[torch.arange(11), classes]).mean()
    assert found.loss == pytest.approx(float(expected), rel=1e-12)
    assert found.error == pytest.approx(float((out.argmax(1) != classes).double().mean()))
    values = normal(11, 4, seed=1).double()
    mse = losses(model, state, x, values, loss="mse", batch=4)
    assert mse.loss == pytest.approx(float(((out - values) ** 2).mean()), rel=1e-12)
    assert mse.error is None
    own: Callable[[Tensor, Tensor], Tensor]
    for own in (lambda o, t: (o - t).abs().mean(1), lambda o, t: (o - t).abs().mean()):
        found = losses(model, state, x, values, loss=own, batch=4)  # batches of 4, 4 and 3: means must be weighted
        assert found.loss == pytest.approx(float((out - values).abs().mean()), rel=1e-12)
        assert found.error is None


def test_a_column_of_outputs_fits_a_vector_of_targets() -> None:
    assert score(torch.tensor([[1.0], [2.0]]), torch.tensor([1.0, 4.0]), "mse").loss == 2.0


@settings(max_examples=30, deadline=None)
@given(shape=st.lists(st.integers(1, 3), max_size=2), ones=st.tuples(st.integers(0, 2), st.integers(0, 2)))
def test_axes_of_one_at_the_end_do_not_matter(shape: list[int], ones: tuple[int, int]) -> None:
    out, targets = normal(4, *shape), normal(4, *shape, seed=1)
    left, right = ([*out.shape] + [1] * number for number in ones)
    found = score(out.reshape(left), targets.reshape(right), "mse")
    assert found.loss == pytest.approx(float((out - targets).double().square().mean()), rel=1e-5)


@pytest.mark.parametrize(("out", "targets"), [((4, 2, 3), (4, 3, 2)), ((4, 6), (4, 2, 3)), ((4, 1, 3), (4, 3))])
def test_targets_are_not_reshaped(out: tuple[int, ...], targets: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="one value per output"):
        score(torch.zeros(out), torch.zeros(targets), "mse")


@pytest.mark.parametrize("loss", ["cross-entropy", "mse", lambda out, targets: (out - targets).square().mean(1)])
def test_no_gradient_goes_through(loss: Any) -> None:
    """Live parameters are welcome, and so are data that require a gradient: torch has nothing to warn of."""
    live, x = dict(LINEAR.named_parameters()), normal(4, 2).requires_grad_()
    targets = torch.zeros(4).long() if loss == "cross-entropy" else normal(4, 3).requires_grad_()
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # torch warns only once, and another test may have been first
    try:
        assert losses(LINEAR, live, x, targets, loss=loss) == losses(
            LINEAR, GOOD, x.detach(), targets.detach(), loss=loss
        )
        assert score(LINEAR(x), targets, loss) == score(LINEAR(x).detach(), targets.detach(), loss)
    finally:
        torch.set_warn_always(before)
    assert not outputs(LINEAR, live, x).requires_grad
    stacked = {name: value.expand(2, *value.shape) for name, value in live.items()}
    assert not predictions(LINEAR, Population.from_stacked(stacked), x).requires_grad


def test_pixels_have_classes_on_axis_one() -> None:
    out, targets = normal(2, 3, 4, 5), torch.arange(40).reshape(2, 4, 5) % 3
    found = score(out, targets)
    assert found.loss == pytest.approx(float(F.cross_entropy(out, targets)), rel=1e-6)
    assert found.error == pytest.approx(float((out.argmax(1) != targets).double().mean()))


LINEAR = nn.Linear(2, 3)
GOOD = state_of(LINEAR)


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda: outputs(LINEAR, {"weight": GOOD["weight"]}, normal(4, 2)), SpecError, "missing bias"),
        (
            lambda: outputs(LINEAR, {"a.weight": GOOD["weight"], "a.bias": GOOD["bias"]}, normal(4, 2)),
            SpecError,
            "strip",
        ),
        (lambda: outputs(LINEAR, {**GOOD, "bias": torch.ones(4)}, normal(4, 2)), SpecError, "width"),
        (lambda: outputs(LINEAR, GOOD, normal(4, 5)), InputError, "expects 2 features and was given 5"),
        (lambda: outputs(LINEAR, GOOD, "words"), InputError, "wrap several inputs"),
        (lambda: outputs(LINEAR, GOOD, (normal(4, 2), normal(3, 2))), InputError, "one row per example"),
        (lambda: outputs(LINEAR, GOOD, normal(0, 2)), InputError, "the data hold no examples"),
        (lambda: outputs(LINEAR, GOOD, normal(4, 2), batch=0), InputError, "leave batch out"),
        (lambda: outputs(nn.LSTM(2, 3), state_of(nn.LSTM(2, 3)), normal(4, 1, 2)), InputError, "give output=0"),
        (
            lambda: losses(LINEAR, GOOD, normal(4, 2), torch.zeros(3).long()),
            InputError,
            "found 3 targets: give as many",
        ),
        (lambda: losses(LINEAR, GOOD, normal(4, 2), torch.zeros(4)), InputError, 'choose loss="mse"'),
        (lambda: losses(LINEAR, GOOD, normal(4, 2), torch.full((4,), 3)), InputError, "number the classes from 0"),
        (lambda: losses(LINEAR, GOOD, normal(4, 2), torch.zeros(4), loss="mse"), InputError, "one value per output"),
        (lambda: losses(LINEAR, GOOD, normal(4, 2), torch.zeros(4).long(), loss="hinge"), InputError, "hinge"),
        (
            lambda: losses(LINEAR, GOOD, normal(4, 2), torch.zeros(4), loss=lambda o, t: o.sum(0)),
            InputError,
            'reduction="none"',
        ),
        (
            lambda: losses(LINEAR, {**GOOD, "bias": torch.full((3,), torch.nan)}, normal(4, 2), torch.zeros(4).long()),
            InputError,
            "12 of 12 outputs are not finite",
        ),
        (lambda: predictions(LINEAR, Population.from_models([LINEAR])[:0], normal(4, 2)), InputError, "add members"),
        (lambda: predictions(LINEAR, Population.from_models([nn.Linear(2, 4)]), normal(4, 2)), SpecError, "width"),
        (lambda: predictions(LINEAR, Population.from_models([LINEAR]), normal(4, 5)), InputError, "forward expects"),
    ],
)
def test_refusals(call: Callable[[], Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        call()


def test_shared_tensors_must_agree() -> None:
    case = next(case for case in BATTERY if case.name == "encoder_tied")
    model = case.build()
    state = other_state(model)
    kept = model.state_dict(keep_vars=True)
    twin = next(n for n in kept for m in kept if n != m and kept[n] is kept[m])
    with pytest.raises(SpecError, match="give both the same value"):
        outputs(model, {**state, twin: state[twin] + 1}, case.inputs())


@settings(max_examples=50, deadline=None)
@given(
    shape=st.lists(st.integers(1, 5), min_size=2, max_size=4),
    pieces=st.integers(1, 5),
    seed=st.integers(0, 999),
    offset=st.sampled_from([0.0, 1e4]),
)
def test_moments_of_pieces_are_those_of_the_whole(shape: list[int], pieces: int, seed: int, offset: float) -> None:
    axis = seed % (len(shape) - 1) + 1
    parts = [normal(*shape, seed=seed + i).double() * (i + 1) + i + offset for i in range(pieces)]
    moments = Moments()
    for part in parts:
        moments.add(part, axis)
    whole = torch.cat([part.movedim(axis, 0).flatten(1) for part in parts], 1)
    assert moments.count == whole.shape[1]
    torch.testing.assert_close(moments.mean, whole.mean(1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(moments.std, whole.std(1, correction=0), rtol=1e-9, atol=1e-9)
    if moments.count > 1:
        torch.testing.assert_close(moments.variance(), whole.var(1), rtol=1e-9, atol=1e-9)


def test_one_value_has_no_variance() -> None:
    moments = Moments()
    moments.add(torch.ones(1, 2), 1)
    with pytest.raises(InputError, match="give more examples"):
        moments.variance()
