"""Both crowds without their symmetries: the forms in which they can be compared.

A form "SCALE/ORDER" brings every network by itself into the normal form of `canonicalise`: it does not know which crowd
the network belongs to, so permutation tests stay exact. "aligned" moves all networks of both crowds into one frame that
they agree on (`align`). The frame depends a little on the order in which they come, so they come in a random one.

Networks in half precision are brought into a form in float32: to round them once more would cost them half a per cent
of each weight, and differences with it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from onebasin.align import align, canonicalise
from onebasin.align.form.canonical import SCALES
from onebasin.align.form.order_keys import ORDERS
from onebasin.cluster import Cluster
from onebasin.errors import InputError
from onebasin.population import Population
from onebasin.symmetry import Symmetry

ALIGNED = "aligned"
FORMS = (
    "balanced/max",
    "balanced/norm",
    "unit-norm/max",
    "unit-norm/first",
    "unit-norm/norm",
    "unit-norm/mean",
    "keep/max",
    "unit-norm/keep",
    ALIGNED,
)
LARGE = 1 << 30  # bytes; larger crowds are written to a scratch folder in the meantime

Crowds = tuple[Population, Population, tuple[str, ...]]
PathLike = str | os.PathLike[str]


def check_form(form: str) -> None:
    """Raise `InputError` unless the form is one."""
    scale, _, order = form.partition("/")
    if form != ALIGNED and not (scale in SCALES and order in (*ORDERS, "keep")):
        raise InputError(
            f'expected a form "SCALE/ORDER" with SCALE out of {", ".join(SCALES)} and ORDER out of '
            f'{", ".join(ORDERS)}, keep, or {ALIGNED!r}; found {form!r}: as in "balanced/max"'
        )


@contextmanager
def in_form(
    a: Population,
    b: Population,
    symmetry: Symmetry,
    form: str,
    *,
    cluster: Cluster,
    scratch: PathLike | None = None,
    seed: int = 0,
) -> Iterator[Crowds]:
    """Both crowds in a form, and what there is to say about it.

    Args:
        a: one crowd.
        b: the other.
        symmetry: of their model.
        form: see above.
        cluster: who moves the networks.
        scratch: where a folder is made for crowds above 1 GB, and deleted at the end; the system's temporary folder
            by default.
        seed: of the order in which networks are aligned.
    """
    check_form(form)
    if scratch is not None and not Path(scratch).is_dir():
        raise InputError(f"expected a folder as scratch=, found nothing of this kind at {scratch}: create it first")
    with tempfile.TemporaryDirectory(prefix="onebasin-", dir=scratch) as name:
        folder = Path(name) if a.nbytes + b.nbytes > LARGE else None
        a, b = (
            _wide(crowd, None if folder is None else folder / f"wide-{side}") for side, crowd in (("a", a), ("b", b))
        )
        if form == ALIGNED:
            yield _aligned(a, b, symmetry, folder, seed, cluster)
        else:
            yield _canonical(a, b, symmetry, form, folder, cluster)


def _wide(crowd: Population, path: Path | None) -> Population:
    """The crowd in float32 at least."""

    def widened(value: Tensor) -> Tensor:
        return value.float() if value.is_floating_point() and value.dtype.itemsize < 4 else value

    if not any(spec.dtype.is_floating_point and spec.dtype.itemsize < 4 for spec in crowd.spec.values()):
        return crowd
    return crowd.map(lambda block, _: {name: widened(value) for name, value in block.items()}, path=path)


def _canonical(
    a: Population, b: Population, symmetry: Symmetry, form: str, folder: Path | None, cluster: Cluster
) -> Crowds:
    scale, order = form.split("/")
    moved, notes, tied = [], dict[str, None](), 0
    for name, crowd in (("a", a), ("b", b)):
        path = None if folder is None else folder / name
        found = canonicalise(crowd, symmetry, scale=scale, order=order, path=path, cluster=cluster)
        assert found.population is not None
        moved.append(found.population)
        notes.update(dict.fromkeys(f"{form}: {note}" for note in found.notes))
        tied += sum(int(counts.sum()) for counts in found.ties.values())
    if tied:
        notes[f"{form}: {tied:,} units with equal keys, of all networks, kept their order"] = None
    return moved[0], moved[1], tuple(notes)


def _aligned(
    a: Population, b: Population, symmetry: Symmetry, folder: Path | None, seed: int, cluster: Cluster
) -> Crowds:
    both = Population.concatenate([a, b])
    order = torch.randperm(len(both), generator=torch.Generator().manual_seed(seed))
    path = None if folder is None else folder / "both"
    found = align(both[order], symmetry, path=path, cluster=cluster).population[order.argsort()]
    return found[: len(a)], found[len(a) :], ()
