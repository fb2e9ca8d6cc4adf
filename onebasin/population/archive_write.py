"""Write networks as tar archives, in the layout of the "Checkpoints" data set of Laurent, Aldea & Franchi (2024).

models/<name>/<name>-<first>-<last>.tgz     with name = <dataset>-<architecture>, as mnist-optunet
<name>-<first>-<last>/<name>-<number>.safetensors     one network each, in half precision.
"""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import BinaryIO

import torch
from safetensors.torch import save
from torch import Tensor

from onebasin.errors import InputError
from onebasin.population.durable import make_folder, publish
from onebasin.population.writer import Crowd
from onebasin.state import State

PER_ARCHIVE = 1024  # networks, as published


def write_archives(
    population: Crowd,
    folder: str | os.PathLike[str],
    name: str,
    *,
    per_archive: int = PER_ARCHIVE,
    dtype: torch.dtype | None = torch.float16,
    first: int = 0,
) -> list[Path]:
    """Write networks as `folder`/models/`name`/`name`-`first`-`last`.tgz, each archive whole or not at all.

    The same networks give the same bytes, whenever and by whomever they are written.

    Args:
        population: the networks.
        folder: of the data set.
        name: <dataset>-<architecture>, as "mnist-optunet".
        per_archive: networks in each.
        dtype: of floating-point tensors; None leaves theirs.
        first: number of the first network.

    Returns:
        The archives, in order.

    Raises:
        InputError: there are no networks, or a name or number that cannot be used, or a weight that does not fit into
            `dtype`.
    """
    if not len(population) or per_archive < 1 or first < 0:
        raise InputError(
            f"expected at least one network, one per archive, and numbers from 0 on, found {len(population)}, "
            f"{per_archive} and {first}: give others"
        )
    if not name or {PurePosixPath(name).name, PureWindowsPath(name).name} != {name} or name.startswith("."):
        raise InputError(
            f"expected a name such as mnist-optunet, found {name!r}: give one without /, \\, : and leading dot"
        )
    target = Path(folder) / "models" / name
    make_folder(target)
    made: list[Path] = []
    contents = (_stored(state, dtype, number) for number, state in _members(population))
    for start in range(0, len(population), per_archive):
        last = min(start + per_archive, len(population)) - 1
        stem = f"{name}-{first + start}-{first + last}"
        names = [f"{stem}/{name}-{first + number}.safetensors" for number in range(start, last + 1)]
        made.append(target / f"{stem}.tgz")
        publish(made[-1], partial(_write, files=zip(names, contents, strict=False)), replace=True)
    return made


def _members(population: Crowd) -> Iterator[tuple[int, State]]:
    """Networks by number, read block by block."""
    for start, block in population.blocks():
        for row in range(len(next(iter(block.values())))):
            yield start + row, {name: value[row] for name, value in block.items()}


def _stored(state: State, dtype: torch.dtype | None, number: int) -> bytes:
    """The content of a safetensors file."""
    kept: dict[str, Tensor] = {}
    for name, value in state.items():
        narrow = value.to(dtype) if dtype is not None and value.is_floating_point() else value
        if not torch.equal(torch.isfinite(narrow), torch.isfinite(value)):
            raise InputError(
                f"tensor {name} of member {number} holds {float(value.abs().max()):.3g}, which {dtype} cannot: "
                "give a wider dtype"
            )
        kept[name] = narrow.detach().cpu().contiguous().clone()  # tensors that share memory are refused
    return save(kept)


def _write(file: BinaryIO, files: Iterable[tuple[str, bytes]]) -> None:
    """A gzipped tar archive without dates, owners or anything else that is not its content."""
    with (
        gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w|") as archive,
    ):
        for name, content in files:
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o644
            archive.addfile(member, io.BytesIO(content))
