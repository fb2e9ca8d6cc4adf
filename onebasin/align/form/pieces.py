"""Networks cut into the blocks of a board, in float64, to be rescaled and looked at without touching the originals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from onebasin.align.board import Block, Board, Foot

Tables = dict[tuple[int, int], Tensor]
"""(space, generator) -> factors (M, coordinates)."""


class Pieces:
    """The blocks of M networks: values (M, *dims, rest) of every block."""

    def __init__(self, board: Board, stacked: Mapping[str, Tensor]) -> None:
        """Cut stacked networks (M, *shape)."""
        self.board = board
        self.values = [block.take(stacked[block.tensor]).double() for block in board.blocks]

    def rescale(self, tables: Tables) -> None:
        """Act with factors."""
        for number, block in enumerate(self.board.blocks):
            for foot in block.feet:
                for generator, power in enumerate(foot.powers):
                    table = tables.get((foot.space, generator))
                    if power and table is not None:
                        self.values[number] = self.values[number] * block.spread(foot, table**power)

    def standing(self, space: int) -> Iterator[tuple[Block, Foot, Tensor]]:
        """Every block in which a space stands, with its foot there and the values."""
        for block, values in zip(self.board.blocks, self.values, strict=True):
            for foot in block.feet:
                if foot.space == space:
                    yield block, foot, values


def along(foot: Foot, table: Tensor) -> Tensor:
    """A table over a foot's dims in their order in the block, as (M, coordinates)."""
    kept = sorted(foot.dims)
    return table.permute(0, *[1 + kept.index(dim) for dim in foot.dims]).flatten(1)
