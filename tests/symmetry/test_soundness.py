"""What an example input hides must not be taken for a freedom: each case once broke the analysis."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onebasin as ob


def outputs(model: nn.Module, state: dict[str, Tensor], inputs: Tensor) -> Tensor:
    return torch.func.functional_call(model, state, (inputs,))


def generic(model: nn.Module) -> nn.Module:
    """Float64 weights without special values."""
    model = model.double().eval()
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=noise, dtype=torch.float64)
    return model


def change(model: nn.Module, example: Tensor, other: Tensor) -> float:
    """How much random elements, found with `example`, change the function at `other`."""
    symmetry = ob.discover(model, example)
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    before = outputs(model, state, other)
    moved = [symmetry.apply(symmetry.random(seed), state) for seed in range(5)]
    return max(float((outputs(model, state, other) - before).abs().max() / before.abs().max()) for state in moved)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cell, self.head = kind(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0])


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_one_time_step_hides_the_recurrent_weights(kind: type[nn.RNNBase]) -> None:
    model = generic(Recurrent(kind))
    symmetry = ob.discover(model, torch.randn(2, 1, 3).double(), vary=False)
    assert not symmetry.spaces
    assert any("at least two steps" in sentence for sentence in symmetry.unexplained)
    assert change(model, torch.randn(2, 1, 3).double(), torch.randn(2, 6, 3).double()) < 1e-12
    assert len(ob.discover(model, torch.randn(2, 1, 3).double()).spaces) == 1
    assert change(model, torch.randn(2, 2, 3).double(), torch.randn(2, 6, 3).double()) < 1e-12


class Positions(nn.Module):
    """A table of 12 positions, of which an input reads as many as it is long, and a mask kept as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(3, 5), nn.Linear(5, 2)
        self.table = nn.Parameter(torch.randn(1, 12, 5))
        self.register_buffer("mask", torch.tril(torch.ones(12, 12)))

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        hidden = F.relu(self.stem(x) + self.table[:, :length])
        return self.head(self.mask[:length, :length] @ hidden)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("length", [1, 4])
def test_positions_that_are_not_read_do_not_move(length: int, batch: int) -> None:
    model = generic(Positions())
    example = torch.randn(batch, length, 3).double()
    symmetry = ob.discover(model, example)
    assert [space.size for space in symmetry.spaces] == [5]
    assert change(model, example, torch.randn(2, 12, 3).double()) < 1e-12


class Rotary(nn.Module):
    """Rotary positions: at position 0 nothing is rotated, and pairs look interchangeable."""

    def __init__(self, cached: bool) -> None:
        super().__init__()
        self.query, self.key, self.head = nn.Linear(3, 8), nn.Linear(3, 8), nn.Linear(3, 2)
        angles = torch.arange(16)[:, None] / 10.0 ** torch.arange(4)
        self.register_buffer("angles", angles if cached else None, persistent=False)

    def turned(self, x: Tensor) -> Tensor:
        angles = self.angles
        if angles is None:
            angles = torch.arange(x.shape[1])[:, None] / 10.0 ** torch.arange(4)
        cos, sin = (f(angles[: x.shape[1]]).repeat(1, 2).to(x.dtype) for f in (torch.cos, torch.sin))
        return x * cos + torch.cat([-x[..., 4:], x[..., :4]], -1) * sin

    def forward(self, x: Tensor) -> Tensor:
        scores = self.turned(self.query(x)) @ self.turned(self.key(x)).mT
        return self.head(scores.softmax(-1) @ x)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("length", [1, 4])
def test_one_position_does_not_free_rotary_pairs(length: int, cached: bool) -> None:
    model = generic(Rotary(cached))
    example = torch.randn(2, length, 3).double()
    symmetry = ob.discover(model, example)
    assert not any(space.permutable for space in symmetry.spaces)
    assert change(model, example, torch.randn(2, 9, 3).double()) < 1e-9  # angles are float32


class Gram(nn.Module):
    """Rows of one matrix against rows of another: columns may not be permuted row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(3, 10), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.stem(x).view(-1, 2, 5)
        return self.head((rows @ rows.mT).flatten(1))


class RunningSum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(3, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stem(x).view(-1, 2, 3).cumsum(1).flatten(1))


class WhereLargest(nn.Module):
    """The position of the largest entry is a result, so channels stand where they are."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(1, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        values, positions = F.max_pool1d(self.stem(x), 2, return_indices=True)
        return values.sum(1, keepdim=True) + positions


class DifferentConstants(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(3, 4), nn.Linear(9, 2)

    def forward(self, x: Tensor) -> Tensor:
        ones = x.new_ones(len(x), 1)
        return self.head(torch.cat([F.relu(self.stem(x)), ones.expand(-1, 2), 2 * ones.expand(-1, 3)], 1))


@pytest.mark.parametrize("build", [Gram, RunningSum, WhereLargest, DifferentConstants])
def test_the_analysis_itself_is_right(build: type[nn.Module]) -> None:
    """Nothing is left for the proof to remove: `unexplained` stays empty and fresh inputs agree."""
    model = generic(build())
    shape = (4, 1, 12) if build is WhereLargest else (4, 3)
    example, other = torch.randn(shape).double(), torch.randn(shape).double()
    assert ob.discover(model, example).unexplained == ()
    assert change(model, example, other) < 1e-12


class Counting(nn.Module):
    """A forward pass that counts its calls and draws noise."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(3, 5), nn.Linear(5, 2)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.head(F.relu(self.stem(x))) + 0.1 * torch.randn_like(x[:, :2])


def test_a_forward_pass_with_side_effects_leaves_none() -> None:
    model = Counting()
    random = torch.get_rng_state()
    symmetry = ob.discover(model, torch.randn(2, 3, generator=torch.Generator().manual_seed(0)))
    assert [space.size for space in symmetry.spaces] == [5]
    assert int(model.calls) == 0
    assert torch.equal(torch.get_rng_state(), random)


def test_tensors_that_overlap_in_memory_stay_where_they_are() -> None:
    flat = torch.randn(60)
    model = nn.Module()
    model.a, model.b, model.c = (nn.Parameter(flat[start:stop]) for start, stop in ((0, 60), (2, 4), (20, 32)))
    model.forward = lambda x: x @ model.c.view(3, 4) @ torch.ones(4, 1) + model.a.sum() + model.b.sum()
    symmetry = ob.discover(model, torch.randn(2, 3))
    assert symmetry.spaces == ()
    assert any("shares memory" in sentence for sentence in symmetry.unexplained)


@pytest.mark.parametrize(
    ("model", "inputs", "remedy"),
    [
        (lambda x: x, torch.ones(2, 3), "wrap functions in a module"),
        (nn.Linear(3, 2), torch.ones(2, 5), "expects 3 features and was given 5"),
        (nn.Linear(3, 2), "text", "found the text"),
        (nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.ones(0, 3), "give other inputs"),
        (nn.DataParallel(nn.Linear(3, 2)), torch.ones(2, 3), "model.module"),
    ],
)
def test_bad_input_is_explained(model: nn.Module, inputs: object, remedy: str) -> None:
    with pytest.raises(ob.OnebasinError, match=remedy):
        ob.discover(model, inputs)


class DataDependent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.stem(x) if x.sum() > 0 else -self.stem(x)


def test_control_flow_on_values_is_refused_with_the_reason() -> None:
    with pytest.raises(ob.errors.TraceError, match="control flow"):
        ob.discover(DataDependent(), torch.ones(2, 3))


class NoRule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(3, 5), nn.Linear(5, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cumprod(self.second(F.relu(self.first(x))), 1))


def test_an_operation_without_a_rule_is_reported_with_its_path() -> None:
    symmetry = ob.discover(NoRule(), torch.ones(2, 3))
    assert [space.size for space in symmetry.spaces] == [5]
    (sentence,) = symmetry.unexplained
    assert "second.weight[0]" in sentence and "head.weight[1]" in sentence
    assert "aten.cumprod" in sentence and "path: second." in sentence
