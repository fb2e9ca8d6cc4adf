"""How much memory a run takes: estimates from above, for those who have to say how much there is."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.utils._pytree import tree_unflatten

from onebasin.inference.density.target import Target
from onebasin.inference.runs.job import Job
from onebasin.inference.runs.pending import BYTES
from onebasin.population.writer import member_bytes

_PASS = 6  # what a pass takes at its height, in what autograd keeps of it: slopes, and buffers of convolutions
_COPIES = 24  # of the position: gradient, momentum, masses, proposals, moments, and what passes by
_DEVIATIONS = 20  # of SWAG, unless options say otherwise
_EXAMPLES = 8  # enough to see what one of them takes


def unit_bytes(job: Job) -> int:
    """Bytes of work on one unit: data, the State of its chains, one pass, and draws that wait to be written."""
    target = job.target()
    weights = target.layout.size * target.layout.dtype.itemsize
    copies = _COPIES + int(job.options.get("rank", _DEVIATIONS if job.method == "swag" else 0))
    passes = int(job.options.get("samples", 1)) * min(target.examples, target.piece) * _saved(target)
    data = 3 * sum(leaf.nbytes for leaf in target.leaves)  # as they travel, as they arrive, and as they are used
    waiting = 3 * (BYTES + job.lanes * weights)  # one by one, joined, and cut into tensors
    return data + job.lanes * (copies * weights + _PASS * passes + _curvature(job, target)) + waiting


def kept_bytes(job: Job) -> int:
    """Bytes of all draws in memory, while the pieces are joined."""
    target = job.target()
    return 3 * job.modes * job.plan(target).draws * member_bytes(target.layout.spec)


def _saved(target: Target) -> int:
    """Bytes that autograd keeps of one example."""
    if not target.leaves:
        return 0
    many = min(_EXAMPLES, target.examples)
    few = many // 2
    return max(0, math.ceil((_saved_for(target, many) - _saved_for(target, few)) / (many - few)))


def _saved_for(target: Target, examples: int) -> int:
    found: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    layout = target.layout
    sampled = layout.split(torch.zeros(layout.size, dtype=layout.dtype, device=layout.device).requires_grad_())
    given = tree_unflatten([leaf[:examples].clone() for leaf in target.leaves], target.structure)
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        values, _ = target.one(sampled, target.rest, given, False)
    del values
    return sum(found.values())


def _curvature(job: Job, target: Target) -> int:
    """Bytes of what the Laplace approximation knows of one chain, in float64 and decomposed."""
    if job.method != "laplace" or job.options.get("structure") == "diagonal":
        return 0
    if job.options.get("structure") == "full":
        return 4 * 8 * target.layout.size**2
    return sum(4 * 8 * (shape[0] ** 2 + (1 + math.prod(shape[1:])) ** 2) for shape in target.layout.shapes if shape)
