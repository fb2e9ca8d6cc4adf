"""Parameters that are only ever read in parts: rows 0 to 5 here, rows 6 to 17 there.

Torch's attention keeps the projections of queries, keys and values in one matrix, and cuts it when queries come from
elsewhere than keys. The parts are parameters of their own that happen to be stored together: their other axes need not
belong to the same units.
"""

from __future__ import annotations

from dataclasses import dataclass

from onebasin.symmetry.constraints import Value
from onebasin.symmetry.trace import Graph, Node

Range = tuple[int, int]


@dataclass(frozen=True)
class Pieces:
    """The parts of one parameter along `axis`, by their first and last (exclusive) position."""

    axis: int
    values: dict[Range, Value]

    def read(self, node: Node) -> tuple[Value, ...]:
        """What a node that cuts the parameter gets, in order."""
        return tuple(self.values[start, stop] for _, start, stop in _cuts(node) or ())


def parted(graph: Graph) -> dict[str, tuple[int, list[Range]]]:
    """For each parameter that every reader cuts along one axis, into the same two or more parts: axis and parts."""
    nodes: dict[str, list[Node]] = {}
    for node in graph.nodes:
        if node.kind == "state":
            nodes.setdefault(graph.shared.get(node.state_name, node.state_name), []).append(node)
    found = {}
    for name, twins in nodes.items():
        readers = [user for node in twins for user in node.users]
        cuts = [_cuts(user) for user in readers]
        if not readers or None in cuts or name in graph.entangled or twins[0].buffer or not twins[0].shape:
            continue
        spans = sorted({cut for several in cuts for cut in several or ()})
        axes = {axis for axis, _, _ in spans}
        ends = [0] + [stop for _, _, stop in spans]
        if len(axes) == 1 and len(spans) > 1 and ends[:-1] == [start for _, start, _ in spans]:
            axis = axes.pop()
            if ends[-1] == twins[0].shape[axis] and len(twins[0].shape) > 1:
                found[name] = axis, [(start, stop) for _, start, stop in spans]
    return found


def _cuts(node: Node) -> list[tuple[int, int, int]] | None:
    """The parts (axis, start, stop) that a node cuts out of its first operand; None if it does anything else."""
    if node.short not in ("split_with_sizes", "split", "chunk", "slice"):
        return None
    source, *rest = node.arguments
    if node.short == "slice":
        given = [*rest, *[0, None, None, 1][len(rest) :]]
        axis = given[0] % len(source.shape)
        first, last, step = slice(*given[1:]).indices(source.shape[axis])
        return [(axis, first, last)] if step == 1 and first < last else None
    sizes, dim = rest[0], rest[1] if len(rest) > 1 else node.options.get("dim", 0)
    axis = dim % len(source.shape)
    length = source.shape[axis]
    if isinstance(sizes, int):
        size = -(-length // sizes) if node.short == "chunk" else sizes
        sizes = [min(size, length - start) for start in range(0, length, size)]
    return [(axis, sum(sizes[:number]), sum(sizes[: number + 1])) for number in range(len(sizes))]
