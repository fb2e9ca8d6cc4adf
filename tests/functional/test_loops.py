"""Models that vmap refuses run network after network, with the numbers of a twin that vmap takes, and a note."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onebasin as ob
from onebasin.errors import InputError, SlowWarning
from onebasin.inference.target import target_of

X = torch.randn(10, 3, generator=torch.Generator().manual_seed(2)).double()
Y = torch.arange(10) % 2


class Twin(nn.Module):
    """Two layers; subclasses compute the same in a way that vmap refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
        self.register_buffer("offset", torch.zeros(4))

    def hidden(self, x: Tensor) -> Tensor:
        return x.tanh() + self.offset

    def forward(self, x: Tensor) -> Tensor:
        out = self.second(self.hidden(self.first(x)))
        return out * torch.where(self.second.bias.sum() > 0, 2.0, 1.0)


class Branching(Twin):
    """The flow depends on weights."""

    def forward(self, x: Tensor) -> Tensor:
        out = self.second(self.hidden(self.first(x)))
        return out * 2.0 if self.second.bias.sum() > 0 else out * 1.0


class Counting(Twin):
    """Reads a number, and keeps it."""

    peak = 0.0

    def hidden(self, x: Tensor) -> Tensor:
        self.peak = max(self.peak, x.max().item())
        return super().hidden(x) + (0.0 if self.peak >= x.max().item() else 1.0)


class _Tanh(torch.autograd.Function):
    """In the old style: forward with a context, no rule for vmap."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = x.tanh()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Tensor:
        (result,) = ctx.saved_tensors
        return slopes[0] * (1 - result**2)


class Custom(Twin):
    """An operation of its own."""

    def hidden(self, x: Tensor) -> Tensor:
        out: Tensor = _Tanh.apply(x)
        return out + self.offset


class Recurrent(nn.Module):
    """An LSTM of torch, for which it has no batching rule."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(1, 3, batch_first=True), nn.Linear(3, 2)

    def states(self, x: Tensor) -> Tensor:
        out: Tensor = self.rnn(x)[0]
        return out

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.states(x[..., None])[:, -1])


class WrittenOut(Recurrent):
    """The same recurrence, step by step."""

    def states(self, x: Tensor) -> Tensor:
        p = dict(self.rnn.named_parameters())
        h = c = x.new_zeros(len(x), 3)
        for step in x.unbind(1):
            gates = step @ p["weight_ih_l0"].T + p["bias_ih_l0"] + h @ p["weight_hh_l0"].T + p["bias_hh_l0"]
            i, f, g, o = gates.chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        return h[:, None]


CASES = [(Branching, Twin), (Counting, Twin), (Custom, Twin), (Recurrent, WrittenOut)]


def pair_of_models(kind: type[nn.Module], twin: type[nn.Module]) -> tuple[nn.Module, nn.Module]:
    made = []
    for each in (kind, twin):
        with ob.global_seed(3):
            made.append(each().double())
    return made[0], made[1]


@pytest.mark.parametrize(("kind", "twin"), CASES)
@pytest.mark.parametrize("training", [False, True])
def test_gradients_in_a_loop_are_those_of_the_twin(
    kind: type[nn.Module], twin: type[nn.Module], training: bool
) -> None:
    model, other = pair_of_models(kind, twin)
    looped, together = target_of(model, (X, Y)), target_of(other, (X, Y))
    generator = torch.Generator().manual_seed(4)
    position = torch.randn(3, looped.layout.size, generator=generator, dtype=torch.float64)
    rows = torch.stack([torch.randperm(10, generator=generator)[:5] for _ in range(3)])
    for given in (None, rows[0], rows):
        with warnings.catch_warnings(record=True) as notes:
            warnings.simplefilter("always")
            found = looped(position, looped.buffers_for(3), given, training=training)
        expected = together(position, together.buffers_for(3), given, training=training)
        torch.testing.assert_close(found.gradient, expected.gradient, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(found.potential, expected.potential, rtol=1e-10, atol=1e-10)
        kinds = [note for note in notes if note.category is SlowWarning]
        if kind is not Recurrent:  # under grad torch takes an LSTM apart, so that vmap takes it
            assert len(kinds) == 1 and f"several networks of {kind.__name__} in one pass" in str(kinds[0].message)
        assert found.buffers.keys() == expected.buffers.keys()


@pytest.mark.filterwarnings("ignore::onebasin.errors.SlowWarning")
@pytest.mark.parametrize(("kind", "twin"), [CASES[0], CASES[3]])
def test_samples_and_predictions_are_those_of_the_twin(kind: type[nn.Module], twin: type[nn.Module]) -> None:
    model, other = pair_of_models(kind, twin)
    method = ob.HMC(draws=2, warmup=4, epochs=1, leapfrog=3)
    mine, theirs = (ob.sample(each, (X, Y), method, chains=2, seed=1) for each in (model, other))
    for name in mine.names:
        torch.testing.assert_close(mine.tensor(name), theirs.tensor(name), rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(ob.predict(model, theirs, X), ob.predict(other, theirs, X), rtol=1e-10, atol=1e-12)
    assert "peak" not in vars(model)


def test_the_note_says_why_and_comes_only_where_there_are_several_networks() -> None:
    model, _ = pair_of_models(Branching, Twin)
    population = ob.Population.from_models([model, model])
    with pytest.warns(SlowWarning, match=r"RuntimeError: .*control flow.*run one after the other: the same numbers"):
        ob.predict(model, population, X)
    ob.predict(model, population[:1], X)  # warnings are errors


def test_a_model_that_does_not_run_at_all_is_refused_in_a_sentence() -> None:
    class Broken(Twin):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                raise ValueError("no training here")
            return super().forward(x)

    model = Broken().double()
    target = target_of(model, (X, Y))
    with pytest.raises(InputError, match=r"could not be computed in training mode with 10 examples .ValueError: no tr"):
        target(torch.zeros(2, target.layout.size).double(), target.buffers_for(2), training=True)
