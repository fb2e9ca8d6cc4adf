"""Models of which short examples hide something: weights that only later steps read, tables that start with zeros.

Each is worked out for `inputs` like real ones; `HIDING` names inputs of the same model that show less.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .expect import Case, Expected, numbers, seeded, tokens
from .recurrent import layer_legs


class ProjectedLSTM(nn.Module):
    """torch's LSTM with projections: the hidden state is a linear map of the cells' output."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(3, 5, proj_size=3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # oneDNN has no projections, which torch says once
            return self.head(self.rnn(x)[0])


class TutorialRNN(nn.Module):
    """The recurrent network of torch's tutorials: input and state side by side into one Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.head = nn.Linear(3 + 5, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.new_zeros(len(x), 5)
        for t in range(x.shape[1]):
            hidden = torch.tanh(self.step(torch.cat((x[:, t], hidden), 1)))
        return self.head(hidden)


class ConvLSTM(nn.Module):
    """Gates by a convolution over pictures and state, pictures (batch, time, channels, height, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.head = nn.Conv2d(2 + 4, 4 * 4, 3, padding=1), nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = memory = x.new_zeros(x.shape[0], 4, *x.shape[3:])
        for t in range(x.shape[1]):
            enter, forget, leave, fresh = self.gates(torch.cat((x[:, t], hidden), 1)).chunk(4, 1)
            memory = torch.sigmoid(forget) * memory + torch.sigmoid(enter) * torch.tanh(fresh)
            hidden = torch.sigmoid(leave) * torch.tanh(memory)
        return self.head(hidden)


class MarkovModel(nn.Module):
    """Log likelihood of sequences (batch, time, 2) under a hidden Markov model with Gaussian emissions."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.move = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4, 4))
        self.emit = nn.Linear(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        alpha = self.start.log_softmax(0) + self.emit(x[:, 0])
        for t in range(1, x.shape[1]):
            alpha = torch.logsumexp(alpha[:, :, None] + self.move.log_softmax(1), 1) + self.emit(x[:, t])
        return alpha.logsumexp(1)


class Feedback(nn.Module):
    """A time loop whose second step on reads a map of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.back, self.head = nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.stem(x[:, 0]))
        for t in range(1, x.shape[1]):
            hidden = torch.tanh(self.stem(x[:, t]) + self.back(hidden))
        return self.head(hidden)


class TokenShift(nn.Module):
    """As in RWKV: every token is mixed with the one before, and the first with zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.now, self.before = nn.Embedding(7, 6), nn.Linear(6, 5, bias=False), nn.Linear(6, 5, bias=False)
        self.head = nn.Linear(5, 2)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        return self.head(F.relu(self.now(x) + self.before(F.pad(x, (0, 0, 1, -1)))))


class Sines(nn.Module):
    """Positions as sines, computed in Python from the length: all of them are zero at position 0."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(3, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        waves = [[math.sin(place / 3.0**unit) for unit in range(5)] for place in range(x.shape[1])]
        return self.head(F.relu(self.stem(x) + torch.tensor(waves, dtype=x.dtype, device=x.device)))


class Turned(nn.Module):
    """Rotary positions with angles computed in Python: at position 0 nothing is turned."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.head = nn.Linear(3, 8), nn.Linear(3, 8), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.tensor([[place / 5.0**pair for pair in range(4)] for place in range(x.shape[1])], dtype=x.dtype)
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        q, k = (y * cos + torch.cat([-y[..., 4:], y[..., :4]], -1) * sin for y in (self.query(x), self.key(x)))
        return self.head((q @ k.mT).softmax(-1) @ x)


class ViewedBatch(nn.Module):
    """`view` in place of a transpose: with a batch of one it is one, with two it mixes examples and units."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mix, self.head = nn.Linear(3, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        columns = F.relu(self.stem(x)).view(4, -1)
        return self.head(F.relu(self.mix.weight @ columns).T)


class OnePatch(nn.Module):
    """Patches of four pixels whose channels are viewed as tokens: one patch is one token, four are a scramble."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mix, self.head = nn.Conv2d(1, 6, 4, stride=4), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        patches = F.relu(self.stem(x)).view(len(x), -1, 6)
        return self.head(F.relu(self.mix(patches)).mean(1))


GATES = " ".join(f"gates.weight({g}#4.u)&gates.bias({g}#4.u)" for g in range(4))
LSTM = layer_legs(4, "l0")[:-1]
BACK = "stem.weight(u)&stem.bias(u)&back.weight(u)&back.bias(u)"
TURNED = "query.weight(2.u)&query.bias(2.u) key.weight(2.u)&key.bias(2.u)"
SERIES = numbers(2, 3, 3)

HIDDEN: tuple[Case, ...] = (
    Case(
        "hidden_lstm_projected",
        seeded(ProjectedLSTM),
        SERIES,
        (
            Expected(5, signs=1, legs=" ".join([*LSTM, "rnn.weight_hr_l0(*,u)"])),
            Expected(3, scales=1, signs=1, legs="rnn.weight_hr_l0(u) rnn.weight_hh_l0(*,u) head.weight(*,u)"),
        ),
        why="as lstm_projected; with one step the recurrent columns meet zeros",
    ),
    Case(
        "hidden_tutorial_rnn",
        seeded(TutorialRNN),
        SERIES,
        (Expected(5, signs=1, legs="step.weight(u)&step.bias(u) step.weight(*,3:8|u) head.weight(*,u)"),),
        why="tanh: rows, recurrent columns and head flip together",
    ),
    Case(
        "hidden_conv_lstm",
        seeded(ConvLSTM),
        numbers(2, 3, 2, 4, 4),
        (Expected(4, signs=1, legs=f"{GATES} gates.weight(*,2:6|u) head.weight(*,u)"),),
        why="as lstm, with channels for units",
    ),
    Case(
        "hidden_markov",
        seeded(MarkovModel),
        numbers(2, 3, 2),
        (Expected(4, legs="start(u) move(u) move(*,u) emit.weight(u) emit.bias(u)"),),
        why="states may be renamed, in both axes of the transitions; logarithms pin every factor",
    ),
    Case(
        "hidden_feedback",
        seeded(Feedback),
        SERIES,
        (Expected(5, signs=1, legs=f"{BACK} back.weight(*,u) head.weight(*,u)"),),
        why="the map that only later steps read moves along on both axes",
    ),
    Case(
        "hidden_token_shift",
        seeded(TokenShift),
        tokens(2, 4, high=7),
        (
            Expected(6, scales=1, signs=1, legs="table.weight(*,u) now.weight(*,u) before.weight(*,u)"),
            Expected(5, scales=1, legs="now.weight(u)&before.weight(u) head.weight(*,u)"),
        ),
        why="the map of the token before moves with both: its columns with the table, its rows with the hidden units",
    ),
    Case(
        "hidden_sines",
        seeded(Sines),
        SERIES,
        (),
        why="every unit has a wave of its own, so none may change its place or its scale",
    ),
    Case(
        "hidden_turned",
        seeded(Turned),
        SERIES,
        (Expected(4, permutation=False, scales=1, signs=1, legs=TURNED),),
        why="a pair of query and key dimensions scales against its partner; frequencies keep pairs in place",
    ),
)

# name of the case -> inputs that hide something of it
HIDING: dict[str, Callable[[], Any]] = {
    **dict.fromkeys(("hidden_lstm_projected", "hidden_tutorial_rnn", "hidden_feedback"), numbers(1, 1, 3)),
    **dict.fromkeys(("hidden_sines", "hidden_turned"), numbers(1, 1, 3)),
    "hidden_conv_lstm": numbers(1, 1, 2, 4, 4),
    "hidden_markov": numbers(1, 1, 2),
    "hidden_token_shift": tokens(1, 1, high=7),
}
