"""Networks in tar archives: the layout of the "Checkpoints" data set of Laurent, Aldea & Franchi (2024).

    models/<name>/<name>-<first>-<last>.tgz     with name = <dataset>-<architecture>, as mnist-optunet
        <name>-<first>-<last>/<name>-<number>.safetensors     one network each, in half precision

A packed archive has no way to jump to a member, so that its networks are read once, into memory, in the order of the
numbers in their names. Nothing is unpacked to the disk.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from onebasin.errors import InputError, StorageError, UnsafeFileError
from onebasin.population.durable import make_folder, publish
from onebasin.population.read import natural_key, own_names
from onebasin.population.tar_stream import RATIO, files_in
from onebasin.population.writer import Crowd
from onebasin.state import Spec, State, check_spec, spec_of

ARCHIVES = (".tgz", ".tar.gz", ".tar")
PER_ARCHIVE = 1024  # networks, as published
_NOTES = (".md", ".txt", ".json", ".yaml", ".yml", ".csv")  # beside networks these explain; they are not read
_NAMED_NOTES = ("README", "LICENSE", "LICENCE", "NOTICE")


def is_archive(path: Path) -> bool:
    """Whether a name says that a file is a tar archive."""
    return path.name.lower().endswith(ARCHIVES)


def archive_paths(folder: Path) -> list[Path]:
    """List the archives of a folder, in natural order."""
    found = [path for path in folder.iterdir() if is_archive(path) and path.is_file() and path.name[0] != "."]
    return sorted(found, key=natural_key)


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


def networks_in(
    path: str | os.PathLike[str], *, spec: Spec | None = None, ratio: float = RATIO
) -> Iterator[tuple[str, State]]:
    """Yield the name and the weights of one network after the other, in the order of the archive.

    Files that explain (README, LICENSE, .md, .txt, .json, .yaml, .csv), and hidden ones, are passed over.

    Args:
        path: the archive.
        spec: refuse networks that differ from it; a shared prefix of names is stripped. By default the first network
            decides.
        ratio: see `files_in`.

    Raises:
        StorageError: the archive or a member is damaged, or none holds a network; the message names the member.
        UnsafeFileError: a member is a link, a device, a pickle, or leads out of its folder; or there is too much.
        SpecError: two networks differ.
    """
    expected, origin, found = spec, "the given spec", 0
    for name, content in files_in(Path(path), ratio=ratio):
        where = f"member {name!r} of {path}"
        if not _holds_network(name, where):
            continue
        state = _read(content, where, spec)
        if expected is None:
            expected, origin = spec_of(state), PurePosixPath(name).name
        check_spec(spec_of(state), expected, where=f"{where}, compared with {origin},")
        found += 1
        yield name, state
    if not found:
        raise StorageError(f"expected .safetensors files in {path}, found none: check the path")


def _holds_network(name: str, where: str) -> bool:
    file = PurePosixPath(name)
    if file.name.startswith("."):
        return False
    if file.suffix.lower() == ".safetensors":
        return True
    if file.suffix.lower() in _NOTES or file.stem.upper() in _NAMED_NOTES:
        return False
    raise UnsafeFileError(
        f"{where} is neither a .safetensors file nor a note ({', '.join(_NOTES)}): unpack the archive yourself "
        "and open the files that you trust"
    )


def _read(content: bytes, where: str, expected: Spec | None) -> State:
    try:
        loaded: Mapping[str, Tensor] = load(content)
        found = {name: loaded[name] for name in _stored_names(content)}
    except (SafetensorError, ValueError, KeyError) as error:
        raise StorageError(
            f"expected a whole safetensors file, but {where} ({len(content):,} bytes) is truncated or corrupt "
            f"({error}): copy the archive again from its source"
        ) from error
    if not found:
        raise StorageError(f"{where} holds no tensor: choose an archive with the weights of networks")
    return {own: found[stored] for own, stored in own_names(found, expected).items()}


def _stored_names(content: bytes) -> list[str]:
    """The names of a safetensors file in its own order; the library gives them in another one each time.

    >>> _stored_names(save({"b": torch.zeros(1), "a": torch.zeros(1)}))
    ['a', 'b']
    """
    length = int.from_bytes(content[:8], "little")
    return [name for name in json.loads(content[8 : 8 + length]) if name != "__metadata__"]


def stacked_archive(path: Path, expected: Spec | None = None) -> tuple[list[str], State]:
    """All networks of an archive as tensors (members, *shape), and their names; ordered by the numbers in the names."""
    found = sorted(networks_in(path, spec=expected), key=lambda item: _order(item[0]))
    names, states = [name for name, _ in found], [state for _, state in found]
    del found
    # Tensor by tensor, so that only one is in memory twice.
    stacked = {name: torch.stack([state.pop(name) for state in states]) for name in list(states[0])}
    return names, stacked


def _order(name: str) -> list[list[tuple[int, str]]]:
    return [natural_key(Path(part)) for part in PurePosixPath(name).parts]
