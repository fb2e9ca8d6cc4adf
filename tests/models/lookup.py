"""Tables, codebooks, sorting, patches and products of two layers: operations that address or compare entries."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .expect import Case, Expected, numbers, seeded, tokens


class Bags(nn.Module):
    """Words of a sentence averaged in one table, their maximum taken in another."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.top = nn.EmbeddingBag(7, 5), nn.EmbeddingBag(7, 3, mode="max")
        self.join, self.out = nn.Linear(8, 4), nn.Linear(4, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(F.relu(self.join(torch.cat([self.mean(ids), self.top(ids)], 1))))


class Pairing(nn.Module):
    """A bilinear layer over two branches."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 5), nn.Linear(3, 4)
        self.both, self.out = nn.Bilinear(5, 4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.both(self.left(x), F.relu(self.right(x)))))


class Patches(nn.Module):
    """Patches cut out, mixed alike for every channel, and added up again; windows along a row read by a Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mix = nn.Conv2d(2, 5, 3, padding=1), nn.Parameter(torch.randn(9, 9))
        self.deep, self.out = nn.Conv2d(5, 3, 1), nn.Linear(3 * 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        patches = F.unfold(F.relu(self.stem(x)), 3, padding=1).unflatten(1, (5, 9))
        mixed = torch.einsum("ncpl,pq->ncql", patches, self.mix).flatten(1, 2)
        rows = torch.tanh(self.deep(F.fold(mixed, x.shape[-2:], 3, padding=1))).mean(2)
        return self.out(rows.unfold(2, 2, 1).transpose(1, 2).flatten(2))


class Codebook(nn.Module):
    """The nearest of 7 codes of 5 numbers, as in VQ-VAE, beside radial features of the distances to 4 centres."""

    def __init__(self, one_hot: bool = False) -> None:
        super().__init__()
        self.one_hot = one_hot
        self.encode, self.codes = nn.Linear(3, 5), nn.Embedding(7, 5)
        self.centres = nn.Parameter(torch.randn(4, 5))
        self.out = nn.Linear(9, 2)

    def forward(self, x: Tensor) -> Tensor:
        z = self.encode(x)
        nearest = torch.cdist(z, self.codes.weight).argmin(-1)
        code = F.one_hot(nearest, 7).to(z.dtype) @ self.codes.weight if self.one_hot else self.codes(nearest)
        radial = torch.exp(-torch.cdist(z, self.centres, p=1.0))
        return self.out(torch.cat([z + (code - z).detach(), radial], 1))


class Ranked(nn.Module):
    """A sparse autoencoder that keeps the 3 largest of 7 units, and a second layer read in order of size."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(3, 7), nn.Linear(7, 4)
        self.scores, self.out = nn.Linear(4, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.encode(x)
        values, places = h.topk(3, dim=-1)
        kept = torch.zeros_like(h).scatter(-1, places, F.relu(values))
        return self.out(torch.relu(self.scores(self.decode(kept))).sort(dim=-1).values)


class Masked(nn.Module):
    """Two fixed masks, one for each half of the batch, as Masksembles keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.out = nn.Linear(3, 6), nn.Linear(6, 2)
        mask = torch.tensor([[1, 0, 1, 1, 0, 1], [0, 1, 1, 0, 1, 1]], dtype=torch.bool)
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        halves = torch.cat(torch.split(torch.tanh(self.one(x))[:, None], len(x) // 2), 1).transpose(0, 1)
        return self.out(torch.cat(torch.split(halves * self.mask[:, None], 1), 1).squeeze(0))


def rows(name: str, where: str = "u") -> str:
    """Weight rows with their bias."""
    return f"{name}.weight({where})&{name}.bias({where})"


CODEBOOK = (
    Expected(5, signs=1, legs=f"{rows('encode')} codes.weight(*,u) centres(*,u) out.weight(*,0:5|u)"),
    Expected(7, legs="codes.weight(u)"),
    Expected(4, legs="centres(u) out.weight(*,5:9|u)"),
)

LOOKUP: tuple[Case, ...] = (
    Case(
        "embedding_bag",
        seeded(Bags),
        tokens(6, 4, high=7),
        (
            Expected(5, scales=1, signs=1, legs="mean.weight(*,u) join.weight(*,0:5|u)"),
            Expected(3, scales=1, legs="top.weight(*,u) join.weight(*,5:8|u)"),
            Expected(4, scales=1, legs=f"{rows('join')} out.weight(*,u)"),
        ),
        why="a mean of rows is linear, a maximum passes positive factors only",
    ),
    Case(
        "bilinear",
        seeded(Pairing),
        numbers(8, 3),
        (
            Expected(5, scales=1, signs=1, legs=f"{rows('left')} both.weight(*,u)"),
            Expected(4, scales=1, legs=f"{rows('right')} both.weight(*,*,u)"),
            Expected(6, signs=1, legs=f"{rows('both')} out.weight(*,u)"),
        ),
        why="each branch is contracted with its own axis of the weight: linear, relu, and tanh behind",
    ),
    Case(
        "patches",
        seeded(Patches),
        numbers(2, 2, 4, 4),
        (
            Expected(5, scales=1, legs=f"{rows('stem')} deep.weight(*,u)"),
            Expected(3, signs=1, legs=f"{rows('deep')} out.weight(*,u.2)"),
        ),
        why="patches and windows move positions, alike for every channel; the 9 positions inside a patch are rigid",
        extra=1,
    ),
    Case(
        "codebook",
        seeded(Codebook),
        numbers(8, 3),
        CODEBOOK,
        steps=True,
        why="distances of order 1 and 2 do not see the order of coordinates nor their signs; codes change places with "
        "the position that argmin finds; radial features are exp of a distance: no factor",
    ),
    Case(
        "codebook_one_hot",
        seeded(lambda: Codebook(one_hot=True)),
        numbers(8, 3),
        CODEBOOK,
        steps=True,
        why="the same, the position turned into a one-hot code",
    ),
    Case(
        "ranked_units",
        seeded(Ranked),
        numbers(8, 3),
        (
            Expected(7, legs=f"{rows('encode')} decode.weight(*,u)"),
            Expected(4, scales=1, signs=1, legs=f"{rows('decode')} scores.weight(*,u)"),
            Expected(5, legs=rows("scores")),
        ),
        steps=True,
        why="the largest entries are written back where they were, so units change places; sorted values do not know "
        "where they were at all, and their reader counts ranks. Factors would change who is largest",
    ),
    Case(
        "masked_units",
        seeded(Masked),
        numbers(8, 3),
        (Expected(6, permutation=False, signs=1, legs=f"{rows('one')} out.weight(*,u)"),),
        why="a mask stands at positions; signs commute with it. (Units 1 and 4, 2 and 5, 0 and 3 have the same mask "
        "and could change places: not looked for, because another network of a population may have other masks)",
    ),
)
