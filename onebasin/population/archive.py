"""Networks in tar archives, read without unpacking to the disk, and written.

Members of a population come in the order of the numbers in the names of their files. A packed archive has no way to
jump to a file. So it is looked through once for names, and read once more if it is in order; if it is not, files wait
in a buffer, and what the buffer cannot hold is read again.

Written in the layout of the "Checkpoints" data set of Laurent, Aldea & Franchi (2024):

    models/<name>/<name>-<first>-<last>.tgz     with name = <dataset>-<architecture>, as mnist-optunet
    <name>-<first>-<last>/<name>-<number>.safetensors     one network each, in half precision.
"""

from __future__ import annotations

import gzip
import heapq
import io
import json
import os
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from onebasin.errors import InputError, StorageError, UnsafeFileError
from onebasin.population.member_storage import converted
from onebasin.population.names import natural_key, strip_prefix
from onebasin.state import Spec, State, check_spec, spec_of
from onebasin.storage import RATIO, TENSORS, is_usual, make_folder, publish, tar_files

if TYPE_CHECKING:
    from onebasin.population.population import Population

ARCHIVES = (".tgz", ".tar.gz", ".tar")
BUFFER = 256 << 20  # bytes of members that came before their turn
_NOTES = (".md", ".txt", ".json", ".yaml", ".yml", ".csv")  # beside networks these explain; they are not read
_NAMED_NOTES = ("README", "LICENSE", "LICENCE", "NOTICE")


def is_archive(path: Path) -> bool:
    """Whether a name says that a file is a tar archive."""
    return path.name.lower().endswith(ARCHIVES)


def archive_paths(folder: Path) -> list[Path]:
    """List the archives of a folder, in natural order."""
    paths = [path for path in folder.iterdir() if is_archive(path) and path.is_file() and path.name[0] != "."]
    return sorted(paths, key=natural_key)


@dataclass(frozen=True)
class Contents:
    """What an archive holds: the names of its networks in natural order, and the bytes of all of them."""

    names: tuple[str, ...]
    nbytes: int


def networks_in(
    path: str | os.PathLike[str],
    *,
    spec: Spec | None = None,
    dtype: torch.dtype | None = None,
    ratio: float = RATIO,
) -> Iterator[tuple[str, State]]:
    """Yield the name and the weights of one network after the other, in the order of the archive.

    Files that explain (README, LICENSE, .md, .txt, .json, .yaml, .csv), and hidden ones, are passed over.

    Args:
        path: the archive.
        spec: refuse networks that differ from it; a shared prefix of names is stripped. By default the first network
            decides.
        dtype: dtype of floating-point tensors; None leaves theirs.
        ratio: see `tar_files`.

    Raises:
        StorageError: the archive or a member is damaged, or none holds a network; the message names the member.
        UnsafeFileError: a member is a link, a device, a pickle, or leads out of its folder; or there is too much.
        SpecError: two networks differ.
    """
    return _checked_states(_network_files(Path(path), ratio), path, spec, dtype)


def contents_of(path: Path) -> Contents:
    """Look through an archive; what it holds is looked at no further.

    Raises:
        StorageError: the archive is damaged, holds no network, or two under one name.
        UnsafeFileError: see `networks_in`.
    """
    sizes: dict[str, int] = {}
    for name, content in _network_files(path):
        if name in sizes:
            raise StorageError(f"{path} holds member {name!r} twice, expected each name once: pack it again")
        sizes[name] = len(content)
    names = sorted(sizes, key=lambda name: natural_key(PurePosixPath(name)))
    return Contents(tuple(names), sum(sizes.values()))


def ordered_networks(
    path: Path,
    names: Sequence[str],
    *,
    spec: Spec | None = None,
    dtype: torch.dtype | None = None,
    buffer: int = BUFFER,
) -> Iterator[tuple[str, State]]:
    """Yield the networks of these names in this order, with at most `buffer` bytes and one network in memory."""
    return _checked_states(in_order(lambda: _network_files(path), names, buffer), path, spec, dtype)


def in_order(
    passes: Callable[[], Iterable[tuple[str, bytes]]], names: Sequence[str], buffer: int
) -> Iterator[tuple[str, bytes]]:
    """Yield named contents in the order of `names`, though each pass has them in an order of its own.

    What comes too early waits, the last of it being dropped when more than `buffer` bytes wait, and found again by
    another pass. A pass in the right order is the only one.

    >>> mixed = [("c", b"3"), ("a", b"1"), ("b", b"2"), ("d", b"4")]
    >>> [name for name, _ in in_order(lambda: mixed, "abd", buffer=1)]
    ['a', 'b', 'd']
    """
    turn = {name: number for number, name in enumerate(names)}
    done = 0
    while done < len(names):
        before, held = done, 0
        waiting: dict[int, bytes] = {}
        latest: list[int] = []  # a heap of those that wait or waited, the last one first
        for name, content in passes():
            number = turn.get(name, -1)
            if number < done:
                continue
            waiting[number], held = content, held + len(content)
            heapq.heappush(latest, -number)
            while done in waiting:
                held -= len(waiting[done])
                yield names[done], waiting.pop(done)
                done += 1
            while held > buffer and waiting:
                held -= len(waiting.pop(-heapq.heappop(latest), b""))
            if done == len(names):
                return
        if done == before:
            raise StorageError(f"member {names[done]!r} was there before and is gone: do not change what is being read")


def stacked_archive(path: Path, expected: Spec | None, room: int, dtype: torch.dtype | None = None) -> State:
    """All networks of an archive as tensors (members, *shape), ordered by the numbers in their names."""
    networks: list[tuple[str, State]] = []
    for name, state in networks_in(path, spec=expected, dtype=dtype):
        room -= sum(value.nbytes for value in state.values())
        if room < 0:
            raise too_large(path)
        networks.append((name, state))
    networks.sort(key=lambda item: natural_key(PurePosixPath(item[0])))
    states = [state for _, state in networks]
    del networks
    # Tensor by tensor, so that only one is in memory twice.
    return {name: torch.stack([state.pop(name) for state in states]) for name in list(states[0])}


def too_large(path: Path | str) -> InputError:
    """The error for archives that do not fit into memory."""
    return InputError(
        f"{path} holds more than can be opened in memory, as archives are: stream it into a folder once, with "
        f"onebasin import '{path}' -o FOLDER, and open that"
    )


def _network_files(path: Path, ratio: float = RATIO) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the networks of an archive, of which there is at least one."""
    empty = True
    for name, content in tar_files(path, ratio=ratio):
        if _holds_network(name, f"member {name!r} of {path}"):
            empty = False
            yield name, content
    if empty:
        raise StorageError(f"expected .safetensors files in {path}, found none: check the path")


def _checked_states(
    members: Iterable[tuple[str, bytes]],
    path: str | os.PathLike[str],
    spec: Spec | None,
    dtype: torch.dtype | None,
) -> Iterator[tuple[str, State]]:
    """Read members, which must agree with the spec or with the first."""
    expected, origin = spec, "the given spec"
    for name, content in members:
        where = f"member {name!r} of {path}"
        state = {key: converted(value, dtype) for key, value in _read(content, where, spec).items()}
        if expected is None:
            expected, origin = spec_of(state), PurePosixPath(name).name
        check_spec(spec_of(state), expected, where=f"{where}, compared with {origin},")
        yield name, state


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
        names = _stored_names(content)
        loaded: Mapping[str, Tensor] = load(content)
        state = {name: loaded[name] for name in names}
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise StorageError(
            f"expected a whole safetensors file, but {where} ({len(content):,} bytes) is truncated or corrupt "
            f"({error}): copy the archive again from its source"
        ) from error
    if not state:
        raise StorageError(f"{where} holds no tensor: choose an archive with the weights of networks")
    return {name: state[stored] for name, stored in strip_prefix(state, expected).items()}


def _stored_names(content: bytes) -> list[str]:
    """The names of a safetensors file in its own order; the library gives them in another one each time.

    >>> from safetensors.torch import save
    >>> _stored_names(save({"b": torch.zeros(1), "a": torch.zeros(1)}))
    ['a', 'b']
    """
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    names = [name for name in header if name != "__metadata__"]
    if len(names) > TENSORS:
        raise ValueError(f"{len(names):,} tensors, which no network has")
    if not all(is_usual(name, header[name]["shape"]) for name in names):
        raise ValueError("a tensor has a name or shape that no network has")
    return names


PER_ARCHIVE = 1024  # networks, as published


def write_archives(
    population: Population,
    folder: str | os.PathLike[str],
    name: str,
    *,
    per_archive: int = PER_ARCHIVE,
    dtype: torch.dtype | None = torch.float16,
    first: int = 0,
) -> list[Path]:
    """Write networks as `folder`/models/`name`/`name`-`first`-`last`.tgz, each archive whole or not at all.

    The same networks always give the same bytes.

    Args:
        population: the networks.
        folder: folder of the data set.
        name: <dataset>-<architecture>, as "mnist-optunet".
        per_archive: networks in each archive.
        dtype: dtype of floating-point tensors; None leaves theirs.
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
            f"{per_archive} and {first}: leave per_archive and first out"
        )
    if not name or {PurePosixPath(name).name, PureWindowsPath(name).name} != {name} or name.startswith("."):
        raise InputError(
            f"expected a name such as mnist-optunet, found {name!r}: give one without /, \\, : and leading dot"
        )
    target = Path(folder) / "models" / name
    make_folder(target)
    archives: list[Path] = []
    contents = (_stored(state, dtype, number) for number, state in _members(population))
    for start in range(0, len(population), per_archive):
        last = min(start + per_archive, len(population)) - 1
        stem = f"{name}-{first + start}-{first + last}"
        names = [f"{stem}/{name}-{first + number}.safetensors" for number in range(start, last + 1)]
        archives.append(target / f"{stem}.tgz")
        publish(archives[-1], partial(_write, files=zip(names, contents, strict=False)), replace=True)
    return archives


def _members(population: Population) -> Iterator[tuple[int, State]]:
    """Networks by number, read block by block."""
    for start, block in population.blocks():
        for row in range(len(next(iter(block.values())))):
            yield start + row, {name: value[row] for name, value in block.items()}


def _stored(state: State, dtype: torch.dtype | None, number: int) -> bytes:
    """The content of a safetensors file."""
    stored: dict[str, Tensor] = {}
    for name, value in state.items():
        narrow = value.to(dtype) if dtype is not None and value.is_floating_point() else value
        if not torch.equal(torch.isfinite(narrow), torch.isfinite(value)):
            raise InputError(
                f"tensor {name} of member {number} holds {float(value.abs().max()):.3g}, which {dtype} cannot: "
                "give a wider dtype"
            )
        stored[name] = narrow.detach().cpu().contiguous().clone()  # tensors that share memory are refused
    return save(stored)


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
