"""Which atoms may be permuted differently for each index of another: heads and their inside, groups and their members.

An atom D may depend on an atom H if every block that holds D also holds H, so that the permutation to use is always
known. Where H occurs more than once, D belongs to the one on its own axis. Summing over that H while D survives
forbids the dependence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from onebasin.symmetry.axes import Atom
from onebasin.symmetry.constraints import Blocks, Constraints, Direction, Fusions, Leaf, Relation, Value

Parents = dict[Atom, frozenset[Atom]]


def home(laid: Blocks, block: tuple[int, ...], leaf: Leaf, parent: Atom) -> tuple[int, Direction] | None:
    """Where `parent` stands for `leaf` in this block: axis and direction; None if nowhere or in several places."""
    on_axis: list[tuple[int, Direction]] = []
    elsewhere: list[tuple[int, Direction]] = []
    for other, direction in laid.leaves(block):
        if other.atom is parent:
            (on_axis if other.axis == leaf.axis else elsewhere).append((other.axis, direction))
    if len(on_axis) == 1:
        return on_axis[0]
    return elsewhere[0] if not on_axis and len(elsewhere) == 1 else None


def parents_of(constraints: Constraints, blocks: dict[Value, Blocks]) -> Parents:
    """For each atom, the atoms it may depend on."""
    found: dict[Atom, set[Atom]] = {}
    for laid in blocks.values():
        for block in laid:
            for leaf, candidates in _candidates(laid, block):
                known = found.get(leaf.atom)
                found[leaf.atom] = set(candidates) if known is None else known & candidates
    for child, parent in forbidden(constraints, blocks):
        found[child].discard(parent)
    return {atom: frozenset(others) for atom, others in found.items()}


def _candidates(laid: Blocks, block: tuple[int, ...]) -> Iterator[tuple[Leaf, set[Atom]]]:
    leaves = [leaf for leaf, _ in laid.leaves(block)]
    by_axis = Counter((leaf.axis, leaf.atom) for leaf in leaves)
    total = Counter(leaf.atom for leaf in leaves)
    for leaf in leaves:
        yield (
            leaf,
            {
                other
                for other in total
                if other is not leaf.atom
                and (by_axis[leaf.axis, other] == 1 or (not by_axis[leaf.axis, other] and total[other] == 1))
            },
        )


def forbidden(
    constraints: Constraints, blocks: dict[Value, Blocks], *, sums: bool = True
) -> Iterator[tuple[Atom, Atom]]:
    """Pairs (child, parent): the parent is summed over but the child survives, or two indices claim to be it.

    Without `sums` only the latter: a factor per pair may be summed over, since the equations see to it that it cancels.
    """
    for relation in constraints.relations:
        if not isinstance(relation, Relation):
            continue
        homes: dict[tuple[str, int, Atom, Atom], str] = {}
        for value, labels in [(relation.out, relation.labels), *[(part.value, part.labels) for part in relation.parts]]:
            laid = blocks[value]
            for block in laid:
                for leaf, candidates in _candidates(laid, block):
                    own = labels[leaf.axis]
                    for parent in candidates:
                        place = home(laid, block, leaf, parent)
                        assert place is not None
                        label = labels[place[0]]
                        same = homes.setdefault((own, leaf.step, leaf.atom, parent), label)
                        if same != label or (sums and label not in relation.labels and own in relation.labels):
                            yield leaf.atom, parent


def settle(found: Parents, blocks: dict[Value, Blocks], fusions: Fusions) -> tuple[Parents, Fusions]:
    """Resolve mutual dependence: fuse atoms that always stand side by side, else keep one direction only."""
    relation = {atom: set(others) for atom, others in found.items()}
    new: Fusions = {}
    taken: set[Atom] = set()
    for atom in sorted(relation, key=lambda a: a.serial):
        for other in sorted(relation[atom], key=lambda a: a.serial):
            if atom not in relation.get(other, ()):
                continue
            pair = None if {atom, other} & taken else _side_by_side(atom, other, blocks)
            if pair is not None and atom.rigid is None and other.rigid is None:
                new[pair] = Atom(atom.size * other.size)
                taken |= {atom, other}
            else:
                outer, inner = pair or (atom, other)
                if (outer.rigid is None) and inner.rigid is not None:
                    outer, inner = inner, outer
                relation[outer].discard(inner)
    changed = True
    while changed:  # what a parent depends on, its children must be able to see
        changed = False
        for atom, others in relation.items():
            visible = {other for other in others if relation.get(other, set()) <= others}
            changed |= visible != others
            relation[atom] = visible
    return {atom: frozenset(others) for atom, others in relation.items()}, {**fusions, **new}


def _side_by_side(left: Atom, right: Atom, blocks: dict[Value, Blocks]) -> tuple[Atom, Atom] | None:
    """The pair (outer, inner) if one always directly follows the other on the same axis."""
    orders = set()
    for laid in blocks.values():
        for axis in range(len(laid.value.axes)):
            for strip in {laid.strip(block, axis) for block in laid}:
                places = {
                    direction.atom: n for n, direction in enumerate(strip.directions) if direction.atom in (left, right)
                }
                if not places:
                    continue
                if len(places) < 2:
                    return None
                outer, inner = (left, right) if places[left] < places[right] else (right, left)
                first, second = strip.directions[places[outer]], strip.directions[places[inner]]
                if places[inner] != places[outer] + 1 or first.step != second.size * second.step:
                    return None
                orders.add((outer, inner))
    return orders.pop() if len(orders) == 1 else None
