"""Parts of a tensor that this input never reads: a table of 16 positions of which a short example reads 4.

They have no effect here, so nothing about them can be proved; but a longer input will read them. They are held rigid
where they were cut off, and follow the part that is read everywhere else.
"""

from __future__ import annotations

from collections.abc import Iterator

from onebasin.symmetry.axes import Reason, rigidify
from onebasin.symmetry.constraints import Blocks, Constraints, Move, Pin, Relation, Value

Block = tuple[int, ...]


def unread(constraints: Constraints, blocks: dict[Value, Blocks]) -> Iterator[tuple[Value, Block, Block]]:
    """For each block of a state tensor that is never read: the tensor, the block, and the nearest block that is."""
    heard = _heard(constraints, blocks)
    for value in constraints.states.values():
        read = heard.get(value, set())
        if read and len(read) < len(list(blocks[value])):
            for block in blocks[value]:
                if block not in read:
                    yield value, block, min(sorted(read), key=lambda other: _differences(block, other))


def _differences(left: Block, right: Block) -> int:
    return sum(one != other for one, other in zip(left, right, strict=True))


def _heard(constraints: Constraints, blocks: dict[Value, Blocks]) -> dict[Value, set[Block]]:
    """The blocks of each value that some computation reads, followed backwards through what only moves entries."""
    moves: dict[Value, list[Move]] = {}
    computed: set[Value] = set()
    for relation in constraints.relations:
        if isinstance(relation, Move):
            moves.setdefault(relation.source, []).append(relation)
        elif isinstance(relation, Relation):
            computed |= {part.value for part in relation.parts} | {relation.out} & set(constraints.states.values())
        elif isinstance(relation, Pin) and relation.axis is None and not relation.value.state_name:
            computed.add(relation.value)  # an output, or the operand of an operation without a rule
    heard: dict[Value, set[Block]] = {}
    for value in reversed(constraints.values):
        if value in computed:
            heard[value] = set(blocks[value])
            continue
        found = heard.setdefault(value, set())
        for move in moves.get(value, ()):
            for block in blocks[value]:
                landed = move.forth(blocks[value].base(block))
                if landed is not None and blocks[move.out].at(landed) in heard.get(move.out, set()):
                    found.add(block)
    return heard


def hold(constraints: Constraints, blocks: dict[Value, Blocks]) -> None:
    """Forbid permutations of what is not read, along the axes where it was cut off."""
    for value, block, read in unread(constraints, blocks):
        for axis in range(len(block)):
            if block[axis] != read[axis]:
                for direction in blocks[value].strip(block, axis).directions:
                    if direction.atom is not None:
                        rigidify(direction.atom, Reason("part of it is not read for this input", value.node))
