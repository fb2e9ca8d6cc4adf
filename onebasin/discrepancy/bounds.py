"""How much memory a comparison of two crowds takes, at most: in this process, and for work on one shard."""

from __future__ import annotations

from typing import TypedDict

from onebasin.discrepancy.distances import BLOCK_BYTES
from onebasin.discrepancy.forms import LARGE
from onebasin.discrepancy.judge import Judge
from onebasin.discrepancy.tiles import MEMBERS
from onebasin.population import Population
from onebasin.population.writer import member_bytes

_KERNELS = 2  # matrices beside distances: of a kernel, and of its sums over runs


class Bytes(TypedDict):
    """What `cluster_for` asks for."""

    each: int
    here: int


def compare_bytes(a: Population, b: Population, judge: Judge, held: int) -> Bytes:
    """Upper estimates.

    Args:
        a: one crowd.
        b: the other.
        judge: of their distances: of one tensor and of all so far, for each metric, and of what follows from them.
        held: bytes of predictions.
    """
    members, crowds = len(a) + len(b), a.nbytes + b.nbytes
    matrices = 8 * members**2 * (2 * len(judge.metrics) + _KERNELS)
    forms = 2 * min(LARGE, 2 * crowds)  # in float32 at least, and moved
    tiles = 4 * BLOCK_BYTES + 8 * 8 * min(members, MEMBERS) ** 2
    moving = 16 * member_bytes(a.spec) + 4 * min(crowds, BLOCK_BYTES)
    return {"each": max(tiles, moving), "here": matrices + judge.nbytes + max(forms, 2 * held)}
