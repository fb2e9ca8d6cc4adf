"""Sources of members: tensors in memory, or tensors in files.

A source has `count` members and fills buffers with any of its rows. `gather` reads rows out of several sources.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from onebasin.state import Spec, State, TensorSpec
from onebasin.storage import TensorFile, map_tensors


class Source(Protocol):
    """Some members that are kept in one place."""

    @property
    def count(self) -> int:
        """Number of members."""

    @property
    def device(self) -> torch.device:
        """Where its tensors live once they are read."""

    def views(self, names: Iterable[str], start: int, stop: int) -> State:
        """Return consecutive members as tensors (stop - start, *shape) without a copy."""

    def fill(self, buffers: Mapping[str, Tensor], rows: Tensor) -> None:
        """Copy members `rows` (n,) into buffers (n, *shape)."""


@dataclass(frozen=True)
class MemorySource:
    """Stacked tensors (count, *shape) in memory."""

    tensors: Mapping[str, Tensor]
    count: int

    @property
    def device(self) -> torch.device:
        """The device of the first tensor."""
        return next((tensor.device for tensor in self.tensors.values()), torch.device("cpu"))

    def fill(self, buffers: Mapping[str, Tensor], rows: Tensor) -> None:
        """Copy members `rows` (n,) into buffers (n, *shape)."""
        for name, buffer in buffers.items():
            buffer.copy_(self.tensors[name][rows.to(self.tensors[name].device)])

    def views(self, names: Iterable[str], start: int, stop: int) -> State:
        """Return consecutive members without a copy."""
        return {name: self.tensors[name][start:stop] for name in names}


@dataclass(frozen=True)
class FileSource:
    """Members in one safetensors file: stacked tensors (count, *shape), or one network without a member axis.

    `stored` maps our names to those of the file, which may carry a prefix. Floating-point tensors are converted to
    `dtype`, if there is one, whenever they are read.
    """

    file: TensorFile
    stored: Mapping[str, str]
    count: int
    stacked: bool = True
    dtype: torch.dtype | None = None

    @property
    def device(self) -> torch.device:
        """Files are read into the memory of the CPU."""
        return torch.device("cpu")

    @property
    def path(self) -> Path:
        """The file."""
        return self.file.path

    def views(self, names: Iterable[str], start: int, stop: int) -> State:
        """Map consecutive members; the disk is read when their values are."""
        return {name: converted(tensor[start:stop], self.dtype) for name, tensor in self._mapped(names).items()}

    def _mapped(self, names: Iterable[str]) -> State:
        names = list(names)
        mapped = map_tensors(self.file, {self.stored[name]: None for name in names})
        return {name: mapped[self.stored[name]][() if self.stacked else None] for name in names}

    def fill(self, buffers: Mapping[str, Tensor], rows: Tensor) -> None:
        """Read members `rows` (n,) into buffers (n, *shape); only their pages are read."""
        runs = consecutive(rows)
        for name, tensor in self._mapped(buffers).items():
            for first, row, length in runs:
                buffers[name][first : first + length].copy_(tensor[row : row + length])


def converted(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A tensor in a dtype if there is one and the tensor is real; else as it is."""
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def convert_source(source: Source, dtype: torch.dtype | None) -> Source:
    """The same members with floating-point tensors in a dtype; those in files are converted when they are read."""
    if dtype is None:
        return source
    if isinstance(source, MemorySource):
        return MemorySource({name: converted(value, dtype) for name, value in source.tensors.items()}, source.count)
    assert isinstance(source, FileSource)
    return replace(source, dtype=dtype)


def consecutive(rows: Tensor) -> list[tuple[int, int, int]]:
    """Cut rows into runs (position, first row, length) that rise by one.

    >>> consecutive(torch.tensor([4, 5, 6, 0, 9]))
    [(0, 4, 3), (3, 0, 1), (4, 9, 1)]
    """
    if not len(rows):
        return []
    breaks = ((rows[1:] - rows[:-1]) != 1).nonzero().flatten() + 1
    starts = [0, *breaks.tolist()]
    stops = [*breaks.tolist(), len(rows)]
    return [(start, int(rows[start]), stop - start) for start, stop in zip(starts, stops, strict=True)]


def gather(sources: Sequence[Source], rows: Tensor, spec: Spec) -> State:
    """Return members `rows` (n,) of the sources laid end to end as tensors (n, *shape).

    Consecutive members of one source are views; everything else is copied or read once.
    """
    offsets = torch.tensor([0, *(source.count for source in sources)]).cumsum(0)
    owner = torch.searchsorted(offsets, rows, right=True) - 1
    runs = consecutive(rows)
    if len(runs) == 1 and bool((owner == owner[0]).all()):
        source, start = sources[int(owner[0])], int(rows[0] - offsets[owner[0]])
        return source.views(list(spec), start, start + len(rows))
    device = sources[int(owner[0])].device if len(rows) else torch.device("cpu")
    result = {name: empty(tensor, len(rows), device) for name, tensor in spec.items()}
    breaks = [0, *((owner[1:] != owner[:-1]).nonzero().flatten() + 1).tolist(), len(rows)]
    for start, stop in pairwise(breaks):
        if stop > start:
            index = int(owner[start])
            local = rows[start:stop] - offsets[index]
            sources[index].fill({name: tensor[start:stop] for name, tensor in result.items()}, local)
    return result


def empty(tensor: TensorSpec, count: int, device: torch.device | None = None) -> Tensor:
    """Return room for `count` members of one tensor."""
    return torch.empty((count, *tensor.shape), dtype=tensor.dtype, device=device)
