"""Graph networks: messages are gathered by edge and added up by node; nodes and edges are positions, features units."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .expect import Case, Expected, numbers, seeded

EDGES = torch.tensor([[0, 1, 2, 3, 4, 0, 2, 5, 1], [1, 2, 3, 4, 5, 2, 1, 0, 4]])


def graph() -> tuple[Tensor, Tensor]:
    """Six nodes with three features, and nine edges (from, to)."""
    return numbers(6, 3)(), EDGES.clone()


class Messages(nn.Module):
    """Two layers of message passing: `index_add`, then a mean by `scatter_add` and counts; a skip in each."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.stay = nn.Linear(3, 5), nn.Linear(3, 5, bias=False)
        self.two, self.keep = nn.Linear(5, 4), nn.Linear(5, 4, bias=False)
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        start, stop = edges
        sent = self.one(x)[start]
        x = F.relu(self.stay(x) + torch.zeros(len(x), 5, dtype=x.dtype).index_add(0, stop, sent))
        sent = self.two(x)[start]
        total = torch.zeros(len(x), 4, dtype=x.dtype).scatter_add(0, stop[:, None].expand(-1, 4), sent)
        count = torch.zeros(len(x), dtype=x.dtype).index_add(0, stop, torch.ones(len(stop), dtype=x.dtype))
        return self.out(F.relu(self.keep(x) + total / count[:, None].clamp_min(1)))


class Attending(nn.Module):
    """A graph attention layer: 2 heads of 3 features, softmax over the edges that arrive at a node."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.out = nn.Linear(3, 6), nn.Linear(6, 2)
        self.source, self.target = nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.randn(2, 3))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        start, stop = edges
        h = self.lin(x).view(-1, 2, 3)
        score = F.leaky_relu((h * self.source).sum(-1)[start] + (h * self.target).sum(-1)[stop], 0.2)
        place = stop[:, None].expand(-1, 2)
        top = torch.full((len(x), 2), -torch.inf, dtype=x.dtype).scatter_reduce(0, place, score, "amax")
        weight = (score - top[stop]).exp()
        weight = weight / torch.zeros(len(x), 2, dtype=x.dtype).scatter_add(0, place, weight)[stop]
        mixed = torch.zeros(len(x), 2, 3, dtype=x.dtype).index_add(0, stop, weight[..., None] * h[start])
        return self.out(F.relu(mixed.flatten(1)))


class Readout(nn.Module):
    """Node features pooled by graph: a mean and a maximum side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = nn.Linear(3, 5), nn.Linear(10, 2)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        h = F.leaky_relu(self.body(x), 0.1)
        place, empty = (edges[0, :6] % 2)[:, None].expand(-1, 5), torch.zeros(2, 5, dtype=x.dtype)
        pooled = [empty.scatter_reduce(0, place, h, kind, include_self=False) for kind in ("mean", "amax")]
        return self.out(torch.cat(pooled, 1))


def rows(name: str, where: str = "u") -> str:
    """Weight rows with their bias."""
    return f"{name}.weight({where})&{name}.bias({where})"


GRAPHS: tuple[Case, ...] = (
    Case(
        "graph_messages",
        seeded(Messages),
        graph,
        (
            Expected(5, scales=1, legs=f"{rows('one')} stay.weight(u) two.weight(*,u)&keep.weight(*,u)"),
            Expected(4, scales=1, legs=f"{rows('two')} keep.weight(u) out.weight(*,u)"),
        ),
        why="sums and means over edges treat every feature alike; relu behind them: one scale",
    ),
    Case(
        "graph_attention",
        seeded(Attending),
        graph,
        (
            Expected(2, covered=(1, 0, 0, 0), legs=f"{rows('lin', 'u.3')} source(u) target(u) out.weight(*,u.3)"),
            Expected(3, 2, scales=1, legs=f"{rows('lin', 'a2.u')} source(a2,u)&target(a2,u) out.weight(*,a2.u)"),
        ),
        why="heads change places with their attention vectors; a feature's factor is undone in both vectors (they are "
        "summed over features before the softmax) and, behind the relu, in the reader",
    ),
    Case(
        "graph_readout",
        seeded(Readout),
        graph,
        (Expected(5, scales=1, legs=f"{rows('body')} out.weight(*,0:5|u)&out.weight(*,5:10|u)"),),
        why="mean and maximum over the nodes of a graph pass positive factors",
    ),
)
