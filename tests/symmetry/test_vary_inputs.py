"""What one example hides: other sizes, other numbers, tables kept between calls; and what once ended in a crash."""

import copy
import re
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onebasin as ob
from onebasin.functional.call import containers, evaluation_mode
from tests.models import BATTERY, HIDING, Case
from tests.models.hidden import OnePatch, ViewedBatch
from tests.symmetry.test_discover import found, wanted
from tests.symmetry.test_soundness import generic

CASES = [pytest.param(case, id=case.name) for case in BATTERY if case.name in HIDING]


def change(model: nn.Module, symmetry: ob.Symmetry, *inputs: Any) -> float:
    """How much random elements change the function at other inputs, relative to its size."""
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    before = torch.func.functional_call(model, state, inputs)
    moved = [symmetry.apply(symmetry.random(seed), state) for seed in range(3)]
    errors = [torch.func.functional_call(model, state, inputs) - before for state in moved]
    return max(float(error.abs().max() / before.abs().max()) for error in errors)


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)).double()


def sizes(symmetry: ob.Symmetry) -> list[tuple[int, tuple[str, ...]]]:
    return [(space.size, space.freedoms) for space in symmetry.spaces]


# ---------------------------------------------------------------------- other sizes


@pytest.mark.parametrize("case", CASES)
def test_a_short_example_shows_what_long_ones_do(case: Case) -> None:
    model = case.build()
    symmetry = ob.discover(model, HIDING[case.name]())
    assert Counter(map(found, symmetry.spaces)) == Counter(map(wanted, case.spaces)), f"{case.why}\n{symmetry}"
    assert ob.verify(model, symmetry, case.inputs(), seed=1).passed


@pytest.mark.parametrize(
    ("build", "example", "other"), [(ViewedBatch, (1, 3), (2, 3)), (OnePatch, (2, 1, 4, 4), (2, 1, 8, 8))]
)
def test_a_view_for_a_transpose_is_found_out(
    build: type[nn.Module], example: tuple[int, ...], other: tuple[int, ...]
) -> None:
    model = generic(build())
    symmetry = ob.discover(model, numbers(*example))
    assert change(model, symmetry, numbers(*other)) < 1e-12
    assert change(model, symmetry, numbers(*example)) < 1e-12
    assert (4 if build is ViewedBatch else 6) in [space.size for space in symmetry.spaces], "the mixed units are free"


class Shaped(nn.Module):
    """One step only: the state is laid out for one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(3, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        steps = x.chunk(1, 1)
        assert len(steps) == 1
        return self.head(F.relu(self.stem(steps[0].reshape(-1, 1, 3) + x.view(len(x), 1, 3))))


def test_a_size_of_one_that_cannot_be_varied_is_named() -> None:
    sentences = ob.discover(Shaped(), torch.randn(2, 1, 3)).unexplained
    assert any("size 1 along axis 1" in sentence and "also=[" in sentence for sentence in sentences), sentences


def test_a_size_of_one_that_weights_ask_for_hides_nothing() -> None:
    picture = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 1))
    assert not ob.discover(picture, torch.randn(1, 1, 4, 4)).unexplained
    assert not ob.discover(nn.Sequential(nn.Linear(1, 5), nn.Tanh(), nn.Linear(5, 1)), torch.randn(1, 1)).unexplained


class Fused(nn.Module):
    """Two inputs that may be absent: each has a map of its own into the same hidden units."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.image, self.head = nn.Linear(3, 5), nn.Linear(2, 5), nn.Linear(5, 2)

    def forward(self, text: Tensor, image: Tensor | None = None) -> Tensor:
        hidden = self.text(text) if image is None else self.text(text) + self.image(image)
        return self.head(F.relu(hidden))


def test_further_examples_are_analysed_together() -> None:
    model = generic(Fused())
    symmetry = ob.discover(model, numbers(2, 3), also=[(numbers(2, 3), numbers(2, 2))], vary=False)
    assert sizes(symmetry) == [(5, ("permutation", "scale"))]
    assert {leg.tensor for leg in symmetry.spaces[0].legs} >= {"text.weight", "image.weight", "image.bias"}
    assert change(model, symmetry, numbers(2, 3)) < 1e-12
    assert change(model, symmetry, numbers(2, 3), numbers(2, 2)) < 1e-12


# ---------------------------------------------------------------------- other numbers


class Tasks(nn.Module):
    """One trunk, and a head for each task."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.heads = nn.Linear(3, 5), nn.ModuleList(nn.Linear(5, 2) for _ in range(4))

    def forward(self, x: Tensor, task: int) -> Tensor:
        return self.heads[task](F.relu(self.stem(x)))


class Power(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(3, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor, power: float) -> Tensor:
        return self.head(self.stem(x) ** power)


class Slope(Power):
    def forward(self, x: Tensor, slope: float) -> Tensor:
        return self.head(F.leaky_relu(self.stem(x), slope))


class Branch(Power):
    def forward(self, x: Tensor, bounded: bool) -> Tensor:
        hidden = self.stem(x)
        return self.head(torch.tanh(hidden) if bounded else hidden)


@pytest.mark.parametrize(
    ("build", "given", "others", "freedoms"),
    [
        (Tasks, 1, (0, 2, 3), ("permutation", "scale")),
        (Power, 2, (1, 3), ("permutation", "scale", "sign")),
        (Slope, 1.0, (0.0, 0.3), ("permutation", "scale")),
        (Slope, 0.0, (1.0, 0.3), ("permutation", "scale")),
        (Branch, False, (True,), ("permutation", "sign")),
    ],
)
def test_a_number_does_not_fix_the_branch(
    build: type[nn.Module], given: float, others: tuple[float, ...], freedoms: tuple[str, ...]
) -> None:
    """x^2 and x^3 both let factors out; a bounded and a linear unit have only the sign in common."""
    model = generic(build())
    symmetry = ob.discover(model, (numbers(2, 3), given))
    for other in (given, *others):
        assert change(model, symmetry, numbers(2, 3), other) < 1e-12, other
    if build is not Power:  # a different exponent for each power: only what they share can be left
        assert sizes(symmetry) == [(5, freedoms)]


class Only(Power):
    def forward(self, x: Tensor, mode: int) -> Tensor:
        return {7: self.head}[mode](F.relu(self.stem(x)))


def test_a_number_without_an_alternative_is_named() -> None:
    symmetry = ob.discover(Only(), (torch.randn(2, 3), 7))
    assert any("the number 7" in sentence and "also=[" in sentence for sentence in symmetry.unexplained)
    assert sizes(symmetry) == [(5, ("permutation", "scale"))]


class Verbose(Power):
    def forward(self, x: Tensor, hidden: bool) -> Any:
        inside = F.relu(self.stem(x))
        return (self.head(inside), inside) if hidden else self.head(inside)


def test_another_kind_of_answer_is_another_question() -> None:
    symmetry = ob.discover(Verbose(), (torch.randn(2, 3), False))
    assert sizes(symmetry) == [(5, ("permutation", "scale"))] and not symmetry.unexplained


# ---------------------------------------------------------------------- what is kept between calls


class KeptInDict(nn.Module):
    """Attention with a bias per head that is kept in a dict in evaluation mode, as in LeViT."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(4, 18), nn.Linear(6, 2)
        self.biases = nn.Parameter(torch.zeros(2, 3))
        self.kept: dict[str, Tensor] = {}

    def bias(self) -> Tensor:
        if self.training:
            return self.biases
        if "cpu" not in self.kept:
            self.kept["cpu"] = self.biases[:, torch.arange(3)]
        return self.kept["cpu"]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(len(x), 3, 3, 2, 3).unbind(2)
        scores = torch.einsum("bihd,bjhd->bhij", q, k) + self.bias()[None, :, None]
        return self.out(torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v).flatten(2))


class KeptInAttribute(KeptInDict):
    """The same table as an attribute that `train(False)` sets, as in EfficientFormer and TinyViT."""

    def train(self, mode: bool = True) -> "KeptInAttribute":
        super().train(mode)
        if mode and hasattr(self, "ab"):
            del self.ab
        else:
            self.ab = self.biases[:, torch.arange(3)]
        return self

    def bias(self) -> Tensor:
        return self.biases if self.training else self.ab


class KeptAsNone(KeptInDict):
    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    def bias(self) -> Tensor:
        if self.table is None:
            self.table = self.biases * 1
        return self.table


def remembered(model: nn.Module) -> list[Any]:
    return [list(held.items()) if isinstance(held, dict) else list(held) for held in containers(model)]


@pytest.mark.parametrize("called_before", [False, True])
@pytest.mark.parametrize("build", [KeptInDict, KeptInAttribute, KeptAsNone])
def test_a_table_kept_between_calls_moves_with_its_parameter(build: type[nn.Module], called_before: bool) -> None:
    model = build().double()
    model.train()
    if called_before:
        model.eval()
        with torch.no_grad():
            model(numbers(2, 3, 4))
    before = remembered(model)
    symmetry = ob.discover(model, numbers(2, 3, 4))
    assert all(
        [(key, id(value)) for key, value in one] == [(key, id(value)) for key, value in other]
        for one, other in zip(remembered(model), before, strict=True)
        if one and isinstance(one[0], tuple)
    )
    heads = [space for space in symmetry.spaces if space.size == 2]
    assert len(heads) == 1 and "biases" in {leg.tensor for leg in heads[0].legs}
    assert any("kept between calls" in sentence for sentence in symmetry.unexplained)
    assert ob.verify(model, symmetry, numbers(2, 3, 4)).passed
    fresh = copy.deepcopy({name: tensor.detach() for name, tensor in model.state_dict().items()})
    fresh["biases"] = numbers(2, 3)
    results = []
    for state in (fresh, symmetry.apply(symmetry.random(0), fresh)):
        network = build().double()
        network.load_state_dict(state)
        results.append(network.eval()(numbers(2, 3, 4)))
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)


class Counting(nn.Module):
    """Constants as plain attributes, and a list of what was seen."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(3, 4), nn.Linear(4, 2)
        self.mask, self.calls, self.seen = torch.tensor([1.0, 0.0, 1.0]), torch.zeros(()), []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.shape)
        return self.head(F.relu(self.stem(x * self.mask)))


def test_constants_and_lists_stay_what_they_are() -> None:
    model = Counting()
    symmetry = ob.discover(model, torch.randn(2, 3))
    assert sizes(symmetry) == [(4, ("permutation", "scale"))] and not symmetry.unexplained
    assert model.seen == [] and model.mask.tolist() == [1.0, 0.0, 1.0]


def test_tensors_that_are_no_buffers_get_their_values_back() -> None:
    model = Counting()
    with evaluation_mode(model):
        model.calls += 1
        model(torch.randn(2, 3))
    assert float(model.calls) == 0 and model.seen == []


def test_levit_and_efficientformer_attention() -> None:
    levit = pytest.importorskip("transformers.models.levit.modeling_levit")
    former = pytest.importorskip("transformers.models.deprecated.efficientformer.modeling_efficientformer")
    models = (
        levit.LevitAttention(6, 3, 2, 2, 2),
        former.EfficientFormerSelfAttention(dim=6, key_dim=3, num_heads=2, attention_ratio=2, resolution=2),
    )
    for model in models:
        model.eval()
        symmetry = ob.discover(model, torch.randn(2, 4, 6))
        heads = [space for space in symmetry.spaces if "attention_biases" in {leg.tensor for leg in space.legs}]
        assert [space.size for space in heads] == [2]
        assert any("kept between calls" in sentence for sentence in symmetry.unexplained)
        assert not getattr(model, "attention_bias_cache", {})


# ---------------------------------------------------------------------- what once crashed


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(3, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.stem(x))[x[:, 0] > 0]).sum(0)


class MaskedUnits(Masked):
    """Which units are kept depends on what they say: they stay where they are."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.stem(x))
        return hidden[:, hidden.mean(0) > 0.1].cumsum(1)


def test_a_mask_over_the_batch() -> None:
    model = generic(Masked())
    symmetry = ob.discover(model, numbers(6, 3))
    assert sizes(symmetry) == [(5, ("permutation", "scale"))]
    assert change(model, symmetry, numbers(9, 3)) < 1e-12
    assert not ob.discover(generic(MaskedUnits()), numbers(6, 3)).spaces


class Counted(Masked):
    """Rows are sent to one of two maps, sorted and cut by counts."""

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x[:, 0] > 0).long()
        pieces = F.relu(self.stem(x))[chosen.argsort()].split(torch.bincount(chosen, minlength=2).tolist())
        return torch.cat([self.head(piece) for piece in pieces])


class Looped(Masked):
    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.stem(x))
        for row in (x[:, 0] > 0).nonzero():
            hidden = hidden + row.sum()
        return self.head(hidden)


@pytest.mark.parametrize("build", [Counted, Looped])
def test_sizes_that_cannot_be_followed_are_refused_with_their_line(
    build: type[nn.Module], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ob.errors.TraceError, match=r"test_vary_inputs\.py.*line \d+.*discover") as refused:
        ob.discover(build(), numbers(6, 3).float())
    assert "separately" in str(refused.value) and len(str(refused.value)) < 1000
    assert not capfd.readouterr().err


class Neighbours(nn.Module):
    def __init__(self, units: int) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(3, units), nn.Linear(units - 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.stem(x))
        return self.head(hidden[:, 1:] * hidden[:, :-1])


def test_a_thousand_neighbours() -> None:
    symmetry = ob.discover(Neighbours(1000), torch.randn(2, 3))
    assert not symmetry.spaces and "neighbours" in symmetry.unexplained[0]


class Adjacent(Masked):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("adjacency", torch.eye(4).roll(1, 0).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.sparse.mm(self.adjacency, F.relu(self.stem(x))))


def test_a_sparse_buffer() -> None:
    assert "adjacency" in ob.discover(Adjacent(), torch.randn(4, 3)).unexplained[0]


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.code, self.graph = nn.Linear(3, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.graph(F.relu(self.code(x)))


def test_submodules_may_have_any_name() -> None:
    symmetry = ob.discover(Named(), torch.randn(2, 3))
    assert {leg.tensor for leg in symmetry.spaces[0].legs} == {"code.weight", "code.bias", "graph.weight"}
    assert symmetry.spaces[0].name == "code"


def test_a_state_dict_with_other_names_is_refused() -> None:
    def rename(module: nn.Module, state: dict[str, Tensor], prefix: str, meta: object) -> None:
        for name in list(state):
            state[f"net.{name}"] = state.pop(name)

    model = Named()
    model._register_state_dict_hook(rename)
    with pytest.raises(ob.errors.InputError, match=re.escape("'net.code.bias'") + r".*without the hook"):
        ob.discover(model, torch.randn(2, 3))


def test_mixtral_is_refused_with_the_line_that_routes() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=11, hidden_size=8, intermediate_size=7, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=1,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config).eval()
    with pytest.raises(ob.errors.TraceError, match=r"modeling_mixtral\.py, line \d+: for expert_idx .*separately"):
        ob.discover(model, {"input_ids": torch.randint(11, (2, 4)), "use_cache": False, "return_dict": False})
