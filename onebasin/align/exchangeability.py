"""Do samples treat the units of a layer alike? A test that independent trainings pass and a stuck chain fails.

With a prior and an initialisation that do not tell units apart, the posterior does not either: relabelling the units
of a space leaves it as it is, so each unit is equally likely to be the one with the largest weight. Approximate
posteriors, and Monte Carlo chains in practice, break this (Laurent, Aldea & Franchi 2024). Which unit it is, is
counted over the members of a population, and the counts are compared with uniform ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onebasin.align.board import Block, Board, Foot
from onebasin.align.uniformity import adjust, inflation, uniformity
from onebasin.errors import InputError, SpecError
from onebasin.population import Population
from onebasin.symmetry import Symmetry

STATISTICS = ("max", "norm")


@dataclass(frozen=True)
class Row:
    """One space.

    Attributes:
        space: its name.
        units: number of units.
        copies: number of copies, for a space fibred over parents.
        members: networks counted.
        effective: independent networks that would tell as much.
        statistic: chi-square over units and copies, corrected for autocorrelation.
        freedom: its mean if units are alike, copies * (units - 1).
        p: probability of at least this statistic if units are alike.
        adjusted: p corrected for the number of spaces.
        verdict: "rejected"; "consistent" with units that are alike; or "too few to tell" where no outcome whatever
            could have been rejected.
    """

    space: str
    units: int
    copies: int
    members: int
    effective: float
    statistic: float
    freedom: int
    p: float
    adjusted: float
    verdict: str


@dataclass(frozen=True)
class Exchangeability:
    """What `exchangeability` found.

    Attributes:
        rows: one per permutable space of at least two units.
        counts: space name -> integers (copies, units): how often each unit won.
        level: adjusted p-values below it are rejected.
    """

    rows: tuple[Row, ...]
    counts: Mapping[str, Tensor]
    level: float

    @property
    def passed(self) -> bool:
        """Whether no space is rejected, and at least one could have been."""
        return {row.verdict for row in self.rows} in ({"consistent"}, {"consistent", "too few to tell"})

    def __str__(self) -> str:
        """A table for people."""
        cells = [("space", "units", "members", "effective", "chi-square", "on", "p", "adjusted", "verdict")]
        cells += [
            (
                row.space,
                f"{row.units} x {row.copies}" if row.copies > 1 else str(row.units),
                f"{row.members:,}",
                f"{row.effective:,.1f}",
                f"{row.statistic:,.1f}",
                f"{row.freedom:,}",
                f"{row.p:.2g}",
                f"{row.adjusted:.2g}",
                row.verdict,
            )
            for row in self.rows
        ]
        widths = [max(len(row[column]) for row in cells) for column in range(8)]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:8], widths[1:]), row[8]]).rstrip()
            for row in cells
        ]
        lines.insert(1, "-" * max(len(line) for line in lines))
        rejected = sum(row.verdict == "rejected" for row in self.rows)
        said = "passed" if self.passed else "units are not alike" if rejected else "too few members to tell"
        return "\n".join([*lines, "", f"{said}: {rejected} of {len(self.rows)} spaces rejected at {self.level:g}"])


def exchangeability(
    population: Population,
    symmetry: Symmetry,
    *,
    statistic: str = "max",
    chain: Sequence[int] | Tensor | None = None,
    correction: str = "holm",
    level: float = 0.05,
    seed: int = 0,
) -> Exchangeability:
    """Test whether the units of each space are equally likely to come out on top.

    Give the samples as they were drawn: a population that was aligned or put in canonical order has its units told
    apart on purpose and is rejected, as it should be.

    A unit is judged by all weights that touch it, incoming and outgoing alike, each over the mean magnitude in the
    part of the tensor where it stands (running statistics of batch norms are left out); ties are broken at random.
    The copies of a fibred space (the units inside each head) are contests of their own, whose chi-squares are added.

    Draws of one chain count as a sample of what that chain explores, corrected for its autocorrelation, so that a
    chain which stays near one network is rejected however it was started. To ask only whether the starts are alike,
    give one draw per chain.

    Args:
        population: the samples, read block by block; draws of a chain in their order.
        symmetry: of the model they belong to.
        statistic: "max", the largest magnitude of a weight, or "norm", the root of the sum of squares.
        chain: chain of each member (members,), instead of `population.chain`. Members without one, or with a number
            below zero, count as independent; a chain of fewer than 20 draws counts as one draw.
        correction: for the number of spaces, "holm" or "bh".
        level: reject below this adjusted p-value.
        seed: for ties, and for simulated p-values where counts are small.

    Raises:
        InputError: fewer than two members, nothing to permute, or an option that does not exist.
        SpecError: the population is not of the symmetry's model, or holds NaN or infinity.
    """
    board = Board.of(symmetry)
    weighed = {foot.space for block in board.blocks for foot in block.feet}
    tested = [number for number in sorted(weighed) if board.spaces[number].permutable and board.spaces[number].size > 1]
    _check(len(population), bool(tested), statistic, level)
    chains = _chains(population, chain)
    winners = _winners(population, board, tested, statistic, seed)
    found, counts = [], {}
    for number in tested:
        space, won = symmetry.spaces[number], winners[number]
        cells = torch.arange(space.copies) * space.size + won
        counts[space.name] = cells.reshape(-1).bincount(minlength=space.copies * space.size).reshape(-1, space.size)
        factor = inflation(won, chains, space.size)
        found.append(uniformity(counts[space.name], inflation=factor, seed=seed))
    adjusted = adjust([result.p for result in found], correction)
    rows = []
    for number, result, value in zip(tested, found, adjusted, strict=True):
        space = symmetry.spaces[number]
        # The strongest evidence there can be: all effective draws on one unit of each copy. Would it do?
        strongest = space.copies * (result.effective - 1) * math.log(space.size)
        told = strongest > math.log(len(tested) / level)
        verdict = "rejected" if value < level else "consistent" if told else "too few to tell"
        facts = (len(population), result.effective, result.statistic, result.freedom, result.p, value, verdict)
        rows.append(Row(space.name, space.size, space.copies, *facts))
    return Exchangeability(tuple(rows), counts, level)


def _check(members: int, any_tested: bool, statistic: str, level: float) -> None:
    if members < 2:
        raise InputError(f"exchangeability compares networks: it needs at least 2 members, found {members}.")
    if not any_tested:
        raise InputError("this symmetry permutes no units, so there is nothing to compare; discover another model's.")
    if statistic not in STATISTICS:
        raise InputError(f"statistic must be one of {', '.join(STATISTICS)}, found {statistic!r}.")
    if not 0 < level < 1:
        raise InputError(f"level must lie between 0 and 1, found {level}.")


def _chains(population: Population, chain: Sequence[int] | Tensor | None) -> Tensor:
    """Chain of each member, -1 for none."""
    members = len(population)
    given = population.chain if chain is None else torch.as_tensor(chain)
    if given is None:
        return torch.full((members,), -1)
    if tuple(given.shape) != (members,) or given.is_floating_point():
        raise InputError(
            f"chain should be {members} integers, one per member, found {given.dtype} of shape {tuple(given.shape)}."
        )
    return given.long().cpu()


def _winners(population: Population, board: Board, tested: list[int], statistic: str, seed: int) -> dict[int, Tensor]:
    """Number of each space -> which unit came out on top in each copy, (members, copies)."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[int, list[Tensor]] = {number: [] for number in tested}
    for start, stacked in population.blocks():
        board.check(stacked, where="the population", batched=True)
        scores: dict[int, Tensor] = {}
        for block in board.blocks:
            part = _in_mean_magnitudes(block, stacked[block.tensor], start)
            for foot in block.feet:
                if foot.space in found:
                    score = _score(block, foot, part, statistic)
                    old = scores.get(foot.space, torch.zeros_like(score))
                    scores[foot.space] = torch.maximum(old, score) if statistic == "max" else old + score
        for number, score in scores.items():
            found[number].append(_top(score.reshape(len(score), -1, board.spaces[number].size).cpu(), generator))
    return {number: torch.cat(parts) for number, parts in found.items()}


def _in_mean_magnitudes(block: Block, stacked: Tensor, start: int) -> Tensor:
    """The magnitudes in a block, (M, *dims, rest), over their mean in each member."""
    wide = stacked if stacked.dtype in (torch.float32, torch.float64) else stacked.float()
    part = block.take(wide).abs()
    mean = part.reshape(len(part), -1).mean(1)
    if not bool(mean.isfinite().all()):
        member = start + int((~mean.isfinite()).nonzero()[0, 0])
        raise SpecError(
            f"member {member} is not finite: tensor {block.tensor} holds NaN or infinity; leave this network out or "
            "train it again with a smaller step"
        )
    return part / torch.where(mean > 0, mean, 1).reshape(-1, *[1] * (part.dim() - 1))


def _score(block: Block, foot: Foot, part: Tensor, statistic: str) -> Tensor:
    """What each unit scores in a block: (M, copies * size)."""
    if statistic == "norm":
        return block.gather(foot, part.square().sum(-1))
    others = [1 + dim for dim in range(len(block.dims)) if dim not in foot.dims]
    return block.gather(foot, part.amax([*others, part.dim() - 1], keepdim=True)[..., 0])


def _top(score: Tensor, generator: torch.Generator) -> Tensor:
    """The unit with the largest score, one of them at random where several are equal: (..., n) -> (...)."""
    tied = score == score.amax(-1, keepdim=True)
    lots = torch.rand(score.shape, generator=generator)
    return torch.where(tied, lots, -1.0).argmax(-1)
