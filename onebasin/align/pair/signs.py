"""Signs of units under several characters: the best ones for given gains.

A *character* says which of a unit's signs a tensor sees; its value chi is their product. Signs that no character
mixes are chosen apart; those that are mixed are tried in all combinations.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

Character = tuple[int, ...]
Component = tuple[list[int], list[int]]
_ENUMERATED = 8  # up to so many signs of one unit are tried in all combinations, more one after the other


def components(count: int, characters: list[Character]) -> list[Component]:
    """Groups of signs that no character mixes with others: (signs, characters that see them)."""
    groups = [{number} for number in range(count)]
    for character in characters:
        seen = {number for number, on in enumerate(character) if on}
        touched = [group for group in groups if group & seen]
        if touched:
            groups = [group for group in groups if not group & seen] + [set().union(*touched)]
    return [
        (sorted(group), [c for c, character in enumerate(characters) if any(character[g] for g in group)])
        for group in sorted(groups, key=min)
    ]


def _combos(count: int) -> Tensor | None:
    """All sign vectors (2^count, count), the unchanged one first; None when there are too many."""
    if count > _ENUMERATED:
        return None
    return torch.tensor(list(itertools.product((1.0, -1.0), repeat=count)), dtype=torch.float64).reshape(-1, count)


def _table(characters: list[Character], seen: list[int], members: list[int]) -> Tensor:
    """(characters, signs): which sign each character sees."""
    return torch.tensor([[characters[c][g] for g in members] for c in seen], dtype=torch.float64)


def _chi(signs: Tensor, table: Tensor) -> Tensor:
    """Value of each character at signs (generators, N): (characters, N)."""
    return torch.where(table.bool()[:, :, None], signs[None], torch.ones((), dtype=signs.dtype)).prod(1)


def _climb(chosen: Tensor, table: Tensor) -> Tensor:
    """Signs (generators, N) for gains (characters, N), flipped one after the other while that helps."""
    signs = torch.ones(table.shape[1], chosen.shape[1], dtype=torch.float64)
    for _ in range(2 * len(signs)):
        for g in range(len(signs)):
            pull = (chosen * _chi(signs, table) * table[:, g : g + 1]).sum(0)  # what this sign contributes as it is
            signs[g] = torch.where(pull < 0, -signs[g], signs[g])
    return signs


def merged(gains: Tensor, characters: list[Character], components: list[Component]) -> Tensor:
    """The gain of each pair of coordinates under its best signs: (N, N)."""
    plain = [c for c, character in enumerate(characters) if not any(character)]
    if not components and len(plain) == 1:
        return gains[0]
    gains = gains.cpu().double()  # some devices have no float64
    total = gains[plain].sum(0)
    for members, seen in components:
        if not seen:
            continue
        table = _table(characters, seen, members)
        combos = _combos(len(members))
        part = gains[seen]
        if len(seen) == 1:
            total = total + part[0].abs()
        elif combos is not None:
            rows = _chi(combos.T, table).T
            total = total + torch.stack([torch.tensordot(row, part, 1) for row in rows]).amax(0)
        else:
            flat = part.reshape(len(seen), -1)
            best = _chi(_climb(flat, table), table)
            total = total + (flat * best).sum(0).reshape(total.shape)
    return total


def chosen(gains: Tensor, characters: list[Character], parts: list[Component], count: int) -> Tensor:
    """The best signs (count, N) for gains (characters, N)."""
    signs = torch.ones(count, gains.shape[1], dtype=torch.float32)
    for members, seen in parts:
        if not seen:
            continue
        table, combos = _table(characters, seen, members), _combos(len(members))
        if combos is None:
            signs[members] = _climb(gains[seen], table).float()
        else:
            signs[members] = combos[(_chi(combos.T, table).T @ gains[seen]).argmax(0)].T.float()
    return signs
