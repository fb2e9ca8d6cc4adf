"""How much memory a comparison of two crowds takes, at most: in this process, and for work on one shard."""

from __future__ import annotations

from onebasin.align.crowd.align import shard_bytes
from onebasin.cluster import Needs
from onebasin.discrepancy.distances import BLOCK_BYTES
from onebasin.discrepancy.forms import LARGE
from onebasin.discrepancy.judge import Judge
from onebasin.discrepancy.tiles import MEMBERS
from onebasin.population import Population

_KERNELS = 2  # matrices beside distances: of a kernel, and of its sums over runs


def compare_bytes(a: Population, b: Population, judge: Judge, held: int) -> Needs:
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
    return {"each": max(tiles, shard_bytes(a.spec, crowds)), "here": matrices + judge.nbytes + max(forms, 2 * held)}
