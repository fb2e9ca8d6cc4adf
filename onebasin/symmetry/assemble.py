"""Spaces assembled from atoms: the legs of every atom, its generators, its name.

An atom that stands in tensors of the state becomes a space if its units may be permuted or if its system of exponents
has a solution. A leg says where the units stand in one tensor and with which power each generator acts there: the
entry of the solution at the leaf. Parents come before children, since a child's order is written for each index of its
parent. A factor per head that multiplies all units inside of the head alike is already a combination of theirs and
would be counted twice: generators of a parent are kept only as far as they raise the rank over those of its children.
Cost: the number of leaves in the state's tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from onebasin.symmetry.axes import Atom, atoms
from onebasin.symmetry.blocks import Blocks, Direction, Leaf, Parents, Strip, forbidden, home
from onebasin.symmetry.constraints import Constraints, Value
from onebasin.symmetry.solve import Systems, sparse_rank
from onebasin.symmetry.space import Grid, Leg, Space


@dataclass
class Draft:
    """A space in the making: its atom, its leaves in the state's tensors, and the generators found so far."""

    atom: Atom
    leaves: list[tuple[Leaf, Direction]] = field(default_factory=list)
    parents: tuple[Atom, ...] = ()
    kinds: list[str] = field(default_factory=list)
    vectors: list[list[int]] = field(default_factory=list)


def spaces(
    constraints: Constraints, blocks: dict[Value, Blocks], parents: Parents, systems: Systems
) -> tuple[Space, ...]:
    """All spaces with any freedom, parents before children."""
    laid = {blocks[value].number: blocks[value] for value in constraints.states.values()}
    drafts = _drafts(constraints, laid, parents)
    hidden = {atom for term in constraints.hidden for atom in atoms(term)}
    for atom, draft in drafts.items():
        if atom not in hidden:
            _solve(draft, constraints, laid, systems)
    _drop_inherited(drafts, laid)
    padded = {atom for pad in constraints.padding for atom in atoms(pad) if atom.rigid is None}
    free = [d for d in drafts.values() if d.kinds or (d.atom.rigid is None and (d.atom.size > 1 or d.atom in padded))]
    free.sort(key=lambda draft: len(draft.parents))
    names = _names(free, drafts, laid)
    made = [_space(draft, constraints, laid, names) for draft in free]
    return tuple(_join_twins(made, free, blocks, padded))


def _drafts(constraints: Constraints, laid: dict[int, Blocks], parents: Parents) -> dict[Atom, Draft]:
    drafts: dict[Atom, Draft] = {}
    for number in sorted(laid):
        for block in laid[number]:
            for leaf, direction in laid[number].leaves(block):
                drafts.setdefault(leaf.atom, Draft(leaf.atom)).leaves.append((leaf, direction))
    for atom, draft in drafts.items():
        over = [parent for parent in parents.get(atom, ()) if parent in drafts and parent.size > 1]
        draft.parents = tuple(sorted(over, key=lambda p: (len(parents[p]), p.serial)))
    return drafts


def _solve(draft: Draft, constraints: Constraints, laid: dict[int, Blocks], systems: Systems) -> None:
    """Find the generators; columns of batch-norm statistics come first, so that what touches them is kept apart."""

    def statistic(leaf: Leaf) -> bool:
        name = laid[leaf.value].value.state_name
        return name in constraints.means or name in constraints.variances

    draft.leaves.sort(key=lambda item: not statistic(item[0]))
    columns = [leaf for leaf, _ in draft.leaves]
    front = sum(statistic(leaf) for leaf in columns)
    for kind in ("scale", "sign"):
        system = systems[kind].get(draft.atom)
        for vector in system.solutions(columns) if system is not None else []:
            touches = any(vector[:front])
            draft.kinds.append(f"norm-{kind}" if touches else kind)
            draft.vectors.append(vector)


def missed(
    constraints: Constraints, blocks: dict[Value, Blocks], parents: Parents, systems: Systems
) -> tuple[str, ...]:
    """Sentences about factors that could differ along another axis, where a space has only ones that are equal there.

    In a BatchEnsemble each member may scale each unit by itself. A factor per pair (unit of an atom, index of another)
    is one that touches only blocks that hold both: the atom's own equations, with all else set to 0, tell if there are
    any. They are not searched for further.
    """
    laid = {blocks[value].number: blocks[value] for value in constraints.values}
    states = {blocks[value].number: blocks[value] for value in constraints.states.values()}
    hidden = {atom for term in constraints.hidden for atom in atoms(term)}
    found: list[tuple[Atom, Atom, str, dict[str, None]]] = []
    for atom, draft in _drafts(constraints, states, parents).items():
        if atom in hidden or atom.size < 2:
            continue
        columns = [leaf for leaf, _ in draft.leaves]
        beside = {other.atom for leaf in columns for other, _ in laid[leaf.value].leaves(leaf.block)}
        # Two atoms that are in all these blocks both tell the same: one of them is asked.
        others = [o for o in beside if o.size > 1 and o.serial > atom.serial and o not in draft.parents]
        for kind in ("scale", "sign"):
            system = systems[kind].get(atom)
            if not others or system is None or not system.solutions(columns):
                continue
            for other in sorted(others, key=lambda o: o.serial):
                alone = [leaf for leaf in system if home(laid[leaf.value], leaf.block, leaf, other) is None]
                for vector in system.solutions(columns, zero=alone)[:1]:
                    held = [leaf for leaf, power in zip(columns, vector, strict=True) if power]
                    found.append((atom, other, kind, {laid[leaf.value].value.state_name: None for leaf in held}))
    apart = set(forbidden(constraints, blocks, sums=False)) if found else set()
    return tuple(
        f"{', '.join(names)}: a {kind} for each of {atom.size} x {other.size} pairs of units would keep the function, "
        "of which only those are found that are equal along one of the two axes"
        for atom, other, kind, names in found
        if (atom, other) not in apart and (other, atom) not in apart and atom not in parents.get(other, ())
    )


def _drop_inherited(drafts: dict[Atom, Draft], laid: dict[int, Blocks]) -> None:
    """A factor per head that is also a factor of every unit inside the heads is no freedom of its own."""
    for atom, draft in drafts.items():
        below = [other for other in drafts.values() if atom in other.parents and other.kinds]
        if not below:
            continue
        for kind, modulus in (("scale", 0), ("sign", 2)):
            known = [
                _seen_from(draft, child, n, laid)
                for child in below
                for n, k in enumerate(child.kinds)
                if k.endswith(kind)
            ]
            keep = []
            for number, own in enumerate(draft.kinds):
                if not own.endswith(kind):
                    keep.append(number)
                elif _rank([*known, draft.vectors[number]], modulus) > _rank(known, modulus):
                    known.append(draft.vectors[number])
                    keep.append(number)
            draft.kinds = [draft.kinds[number] for number in keep]
            draft.vectors = [draft.vectors[number] for number in keep]


def _rank(vectors: Iterable[list[int]], modulus: int) -> int:
    return sparse_rank([dict(enumerate(vector)) for vector in vectors], modulus)


def _seen_from(draft: Draft, child: Draft, number: int, laid: dict[int, Blocks]) -> list[int]:
    """A child's generator as a vector over the leaves of its parent."""
    columns = {leaf: index for index, (leaf, _) in enumerate(draft.leaves)}
    vector = [0] * len(columns)
    for (leaf, _), power in zip(child.leaves, child.vectors[number], strict=True):
        place = home(laid[leaf.value], leaf.block, leaf, draft.atom)
        if place is not None:
            axis, direction = place
            vector[columns[Leaf(leaf.value, leaf.block, axis, direction.step, draft.atom)]] += power
    return vector


def _space(draft: Draft, constraints: Constraints, laid: dict[int, Blocks], names: dict[Atom, str]) -> Space:
    groups: dict[tuple[int, int, int, int], dict[tuple[int, ...], tuple[int, ...]]] = {}
    for column, (leaf, _) in enumerate(draft.leaves):
        powers = tuple(vector[column] for vector in draft.vectors)
        groups.setdefault((leaf.value, leaf.axis, leaf.block[leaf.axis], leaf.step), {})[leaf.block] = powers
    legs: list[Leg] = []
    for (value, axis, _, step), found in groups.items():
        leaf = Leaf(value, next(iter(found)), axis, step, draft.atom)
        if len(set(found.values())) == 1:
            legs += _legs(leaf, draft, constraints, laid, next(iter(found.values())), False)
        else:
            for block, powers in found.items():
                legs += _legs(replace(leaf, block=block), draft, constraints, laid, powers, True)
    legs = _whole_again(legs, constraints)
    order = {name: number for number, name in enumerate(constraints.graph.shared)}
    legs.sort(key=lambda leg: (order[leg.tensor], leg.axis, leg.grid.runs))
    over = tuple((names[parent], parent.size) for parent in draft.parents)
    permutable = draft.atom.rigid is None and draft.atom.size > 1
    return Space(names[draft.atom], draft.atom.size, permutable, tuple(draft.kinds), over, tuple(legs))


def _legs(
    leaf: Leaf, draft: Draft, constraints: Constraints, laid: dict[int, Blocks], powers: tuple[int, ...], inside: bool
) -> Iterable[Leg]:
    """One leg per name of the tensor (tied weights have several)."""
    blocks = laid[leaf.value]
    part, first = blocks.value.part or (-1, 0)

    def strip(axis: int) -> Strip:
        """Where the leaf's block lies along an axis of the whole tensor."""
        found = blocks.strip(leaf.block, axis)
        return replace(found, start=found.start + first) if axis == part else found

    own = next(d for d in strip(leaf.axis).directions if d.atom is leaf.atom and d.step == leaf.step)
    grid = _grid(leaf.axis, strip(leaf.axis), own)
    over = []
    for parent in draft.parents:
        place = home(blocks, leaf.block, leaf, parent)
        assert place is not None  # parents are those that every leaf can see
        over.append(_grid(place[0], strip(place[0]), place[1]))
    others = [axis for axis in range(len(leaf.block)) if axis != leaf.axis] if inside else []
    within = tuple(_whole(axis, strip(axis)) for axis in others)
    if not inside and part not in (-1, leaf.axis):
        within = (_span(part, first, blocks.value.shape[part]),)
    for name, canonical in constraints.graph.shared.items():
        if canonical == blocks.value.state_name:
            yield Leg(name, grid, tuple(over), powers, within, constraints.variances.get(canonical, 0.0))


def _grid(axis: int, strip: Strip, own: Direction) -> Grid:
    rest = tuple((d.size, d.step) for d in strip.directions if d is not own and d.size > 1)
    return Grid(axis, ((strip.start, own.size, own.step),), rest)


def _whole(axis: int, strip: Strip) -> Grid:
    return Grid(axis, ((strip.start, 1, 1),), tuple((d.size, d.step) for d in strip.directions))


def _span(axis: int, start: int, size: int) -> Grid:
    return Grid(axis, ((start, 1, 1),), ((size, 1),))


def _whole_again(legs: list[Leg], constraints: Constraints) -> list[Leg]:
    """Join legs that are alike in every part of a parameter that is read in parts."""
    parts: dict[str, list[Grid]] = {}
    for value in constraints.states.values():
        if value.part is not None:
            parts.setdefault(value.state_name, []).append(_span(*value.part, value.shape[value.part[0]]))
    if not parts:
        return legs
    alike: dict[Leg, list[Leg]] = {}
    for leg in legs:
        alike.setdefault(replace(leg, within=()), []).append(leg)
    joined: list[Leg] = []
    for leg, found in alike.items():
        spans = parts.get(constraints.graph.shared[leg.tensor], [])
        whole = bool(spans) and {other.within for other in found} == {(span,) for span in spans}
        joined += [leg] if whole else found
    return joined


def _names(free: list[Draft], drafts: dict[Atom, Draft], laid: dict[int, Blocks]) -> dict[Atom, str]:
    """Name each space after the module whose output axis it is; parents and children say so."""
    names: dict[Atom, str] = {}
    used: Counter[str] = Counter()
    is_parent = {parent for draft in free for parent in draft.parents}
    for draft in free:
        ordered = sorted(draft.leaves, key=lambda item: (item[0].value, item[0].axis))
        writers = [leaf for leaf, _ in ordered if leaf.axis == 0 and len(laid[leaf.value].value.shape) > 1]
        first = (writers or [leaf for leaf, _ in ordered])[0]
        tensor = laid[first.value].value.state_name
        base = tensor.rpartition(".")[0] or tensor
        base += " blocks" if draft.atom in is_parent else " inside" if draft.parents else ""
        used[base] += 1
        names[draft.atom] = base if used[base] == 1 else f"{base} ({used[base]})"
    for number, atom in enumerate(drafts):
        names.setdefault(atom, f"rigid axis {number}")
    return names


def _join_twins(made: list[Space], free: list[Draft], blocks: dict[Value, Blocks], padded: set[Atom]) -> list[Space]:
    """Join paddings by zeros that stand side by side in every tensor and are treated alike."""
    signatures: dict[tuple[object, ...], int] = {}
    parents = {parent for space in made for parent in space.parents}
    seen = _contexts(blocks, {draft.atom for draft in free})
    out: list[Space] = []
    for space, draft in zip(made, free, strict=True):
        legs = [(leg.tensor, leg.axis, leg.grid.rest, leg.over, leg.powers, leg.within) for leg in space.legs]
        alone = draft.atom not in padded or (space.name, space.size) in parents
        signature = (
            frozenset(Counter(legs).items()),
            frozenset(seen[draft.atom].items()),
            space.parents,
            space.generators,
        )
        if alone or signature not in signatures:
            if not alone:
                signatures[signature] = len(out)
            out.append(space)
            continue
        first = out[signatures[signature]]
        joined = tuple(
            replace(a, grid=replace(a.grid, runs=a.grid.runs + b.grid.runs))
            for a, b in zip(first.legs, space.legs, strict=True)
        )
        out[signatures[signature]] = replace(first, size=first.size + space.size, permutable=True, legs=joined)
    return [space for space in out if space.permutable or space.generators]


def _contexts(blocks: dict[Value, Blocks], wanted: set[Atom]) -> dict[Atom, Counter[tuple[object, ...]]]:
    """In which values, on which axes and among which neighbours an atom occurs."""
    found: dict[Atom, Counter[tuple[object, ...]]] = {atom: Counter() for atom in wanted}
    for laid in blocks.values():
        for block in laid:
            leaves = list(laid.leaves(block))
            for leaf, direction in leaves:
                if leaf.atom in found:
                    others = tuple(
                        (o.axis, o.step, o.atom) for o, _ in leaves if o != leaf and (o.atom is not leaf.atom)
                    )
                    found[leaf.atom][laid.number, leaf.axis, direction.step, others] += 1
    return found
