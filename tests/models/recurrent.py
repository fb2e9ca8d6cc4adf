"""Recurrent networks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .expect import Case, Expected, numbers, seeded


class Recurrent(nn.Module):
    """A recurrent layer of torch and a Linear on every step's output."""

    def __init__(self, kind: type[nn.RNNBase], hidden: int = 5, **options: Any) -> None:
        super().__init__()
        self.rnn = kind(3, hidden, batch_first=True, **options)
        self.head = nn.Linear(hidden * (2 if options.get("bidirectional") else 1), 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


def layer_legs(gates: int, suffix: str, bias: bool = True) -> list[str]:
    """Rows of every gate block (all that writes one gate joined) and the recurrent columns."""
    names = [f"weight_ih_{suffix}", f"weight_hh_{suffix}"]
    names += [f"bias_ih_{suffix}", f"bias_hh_{suffix}"] if bias else []
    legs = ["&".join(f"rnn.{name}({g}#{gates}.u)" for name in names) for g in range(gates)]
    return [*legs, f"rnn.weight_hh_{suffix}(*,u)"]


def stacked(gates: int, hidden: int = 5, bidirectional: bool = False, **freedoms: int) -> tuple[Expected, ...]:
    """Two layers; with two directions each layer has two spaces, read at the two halves of the columns."""
    ways = ["", "_reverse"] if bidirectional else [""]
    found = []
    for layer in range(2):
        for place, way in enumerate(ways):
            legs = layer_legs(gates, f"l{layer}{way}")
            column = f"(*,{place}#{len(ways)}.u)"
            readers = [f"rnn.weight_ih_l1{other}" for other in ways] if layer == 0 else ["head.weight"]
            legs += [reader + column for reader in readers]
            found.append(Expected(hidden, **freedoms, legs=" ".join(legs)))
    return tuple(found)


def single(gates: int, bias: bool = True, **freedoms: int) -> tuple[Expected, ...]:
    """One layer of five units."""
    return (Expected(5, **freedoms, legs=" ".join([*layer_legs(gates, "l0", bias), "head.weight(*,u)"])),)


class Cell(nn.Module):
    """An LSTM by hand: the gates come out of one Linear as (4, H) and are unbound."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.head = nn.Linear(3 + 5, 4 * 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = memory = x.new_zeros(x.shape[0], 5)
        for step in x.unbind(1):
            gates = self.gates(torch.cat([step, hidden], dim=-1)).view(-1, 4, 5)
            enter, forget, leave, fresh = gates.unbind(1)
            memory = torch.sigmoid(forget) * memory + torch.sigmoid(enter) * torch.tanh(fresh)
            hidden = torch.sigmoid(leave) * torch.tanh(memory)
        return self.head(hidden)


class Projected(nn.Module):
    """An LSTM by hand with seven cells whose output is projected to a state of three."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.project, self.head = nn.Linear(3 + 3, 4 * 7), nn.Linear(7, 3, bias=False), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        memory, state = x.new_zeros(x.shape[0], 7), x.new_zeros(x.shape[0], 3)
        for step in x.unbind(1):
            enter, forget, fresh, leave = self.gates(torch.cat([step, state], dim=-1)).chunk(4, dim=-1)
            memory = torch.sigmoid(forget) * memory + torch.sigmoid(enter) * torch.tanh(fresh)
            state = self.project(torch.sigmoid(leave) * torch.tanh(memory))
        return self.head(state)


class Start(nn.Module):
    """A GRU cell in a loop from a learned first state."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(3, 5), nn.Linear(5, 2)
        self.first = nn.Parameter(torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first.expand(x.shape[0], 5)
        for t in range(x.shape[1]):
            hidden = self.cell(x[:, t], hidden)
        return self.head(hidden)


CELL = " ".join(f"gates.weight({g}#4.u)&gates.bias({g}#4.u)" for g in range(4))
START = " ".join(
    "&".join(f"cell.{n}({g}#3.u)" for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")) for g in range(3)
)
SERIES = numbers(4, 3, 3)

RECURRENT: tuple[Case, ...] = (
    Case(
        "rnn_tanh",
        seeded(lambda: Recurrent(nn.RNN, num_layers=2)),
        SERIES,
        stacked(1, signs=1),
        why="rows, both biases, recurrent rows and columns, next layer's columns flip together",
    ),
    Case(
        "rnn_relu",
        seeded(lambda: Recurrent(nn.RNN, nonlinearity="relu")),
        SERIES,
        single(1, scales=1),
        why="rows +1, recurrent rows +1 and columns -1, head -1",
    ),
    Case(
        "rnn_no_bias",
        seeded(lambda: Recurrent(nn.RNN, bias=False)),
        SERIES,
        single(1, bias=False, signs=1),
        why="as rnn_tanh, one layer without biases",
    ),
    Case(
        "lstm",
        seeded(lambda: Recurrent(nn.LSTM)),
        SERIES,
        single(4, signs=1),
        why="gates i, f, o are pinned by the sigmoid; g rows, the cell and h flip together",
    ),
    Case(
        "lstm_two_layers", seeded(lambda: Recurrent(nn.LSTM, num_layers=2)), SERIES, stacked(4, signs=1), why="as lstm"
    ),
    Case(
        "lstm_bidirectional",
        seeded(lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True)),
        SERIES,
        stacked(4, bidirectional=True, signs=1),
        why="four independent hidden states; those of layer 0 are both read by both directions of layer 1",
    ),
    Case(
        "lstm_projected",
        seeded(Projected),
        SERIES,
        (
            Expected(7, signs=1, legs=f"{CELL} project.weight(*,u)"),
            Expected(3, scales=1, signs=1, legs="project.weight(u) gates.weight(*,3:6|u) head.weight(*,u)"),
        ),
        why="the projected state is linear between projection and readers: scale and sign; the cell keeps its sign",
    ),
    Case(
        "gru_two_layers",
        seeded(lambda: Recurrent(nn.GRU, num_layers=2)),
        SERIES,
        stacked(3, signs=1),
        why="the candidate's rows (both halves and biases) flip, reset and update gates are pinned",
    ),
    Case(
        "gru_bidirectional",
        seeded(lambda: Recurrent(nn.GRU, num_layers=2, bidirectional=True)),
        SERIES,
        stacked(3, bidirectional=True, signs=1),
        why="four independent hidden states",
    ),
    Case(
        "lstm_by_hand",
        seeded(Cell),
        SERIES,
        (Expected(5, signs=1, legs=f"{CELL} gates.weight(*,3:8|u) head.weight(*,u)"),),
        why="as lstm, with input and hidden columns in one matrix: only columns 3..7 belong to the space",
    ),
    Case(
        "gru_learned_start",
        seeded(Start),
        SERIES,
        (Expected(5, signs=1, legs=f"{START} cell.weight_hh(*,u) first(u) head.weight(*,u)"),),
        why="the learned first state belongs to the hidden space and flips with it",
    ),
)
