"""Inspect the files of a population: compare all bytes with their checksums, and say what is whole.

Nothing is changed, and no more than a few megabytes are in memory at a time.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from onebasin.errors import SpecError, StorageError
from onebasin.population.archive import is_archive, networks_in
from onebasin.population.files import SUFFIXES, TORCH_SUFFIXES, network_paths, torch_sources
from onebasin.population.member_storage import FileSource, Source
from onebasin.population.shard import (
    MANIFEST,
    Manifest,
    check_belongs,
    is_shard,
    read_manifest,
    read_shard,
    shard_key,
    shard_name,
    shard_of,
    shard_paths,
)
from onebasin.storage import (
    DAMAGED,
    NOTE,
    WHOLE,
    Finding,
    finding_of,
    read_header,
    sentences,
    tensor_problems,
    unfinished,
)

_HEADER = 100 << 20  # bytes of a header at most, as in the format's own library


def inspect_population(folder: Path) -> Iterator[Finding]:
    """Look at the manifest and every shard of a population folder, at gaps, doubles, other files and leftovers."""
    manifest: Manifest | None = None
    try:
        manifest = read_manifest(folder)
        yield Finding(folder / MANIFEST, "manifest")
    except StorageError as error:
        yield Finding(folder / MANIFEST, "manifest", DAMAGED, str(error))
    for path in shard_paths(folder):
        finding = finding_of(path, "shard", partial(_shard, path, manifest))
        unread = finding.kind == "shard" and finding.members is None
        yield replace(finding, members=_claimed_members(path)) if unread else finding
    yield from _gaps(folder)
    for path in network_paths(folder):
        if not shard_key(path):
            yield Finding(path, "file", NOTE, f"{path} is no shard, so it is not read with this population")
    yield from unfinished(folder)


def _shard(path: Path, manifest: Manifest | None) -> Finding:
    shard = read_shard(path)
    if manifest is not None:
        try:
            check_belongs(shard, manifest)
        except (SpecError, StorageError) as error:  # what is lost is not in this file, but what was in its place
            return Finding(path, "foreign shard", DAMAGED, str(error), None)
    problems = tensor_problems(shard.source.file)
    state, sentence = (DAMAGED, problems[0]) if problems else (WHOLE, "")
    return Finding(path, "shard", state, sentence, shard.source.count)


def _gaps(folder: Path) -> Iterator[Finding]:
    """Shards that must have been there: a writer numbers its own without a gap."""
    numbers: dict[str, set[int]] = defaultdict(set)
    for path in shard_paths(folder):
        sequence, writer = shard_key(path) or (0, "")
        numbers[writer].add(sequence)
    for writer, present in sorted(numbers.items()):
        missing = max(present) - min(present) + 1 - len(present)
        if missing:
            first = next(number for number in range(min(present), max(present)) if number not in present)
            name = shard_name(first, writer)
            yield Finding(
                folder / name,
                "shard",
                DAMAGED,
                f"{folder / name} is missing{f' and {missing - 1} more of its writer' if missing > 1 else ''}, though "
                "later ones are there: put it back from a copy, or save the rest into a new folder if it was removed "
                "on purpose",
                None,
            )


def _claimed_members(path: Path) -> int | None:
    """How many networks a damaged shard says to have, if its header can still be read."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length)) if length < min(_HEADER, path.stat().st_size) else {}
        return int(header["__metadata__"]["members"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def inspect_file(path: Path) -> Finding:
    """Look at one file of networks: a shard, a network of another program, or an archive."""
    if is_archive(path):
        return finding_of(path, "archive", lambda: Finding(path, "archive", members=sum(1 for _ in networks_in(path))))
    if path.suffix.lower() in TORCH_SUFFIXES:
        return finding_of(path, "network", partial(_torch_file, path))
    return finding_of(path, "network", partial(_tensor_file, path))


def _torch_file(path: Path) -> Finding:
    _check_zip(path)
    return Finding(path, "network", members=len(torch_sources(path)))


def _check_zip(path: Path) -> None:
    """A torch file is a zip file with a checksum per tensor, which torch does not look at."""
    try:
        if not zipfile.is_zipfile(path):  # which itself refuses some damaged ones by an error
            return
        with zipfile.ZipFile(path) as file:
            if sum(entry.file_size for entry in file.infolist()) > path.stat().st_size:
                return  # packed: not as torch writes it, and perhaps without end
            bad = file.testzip()
    except (zipfile.BadZipFile, zlib.error, ValueError, RuntimeError, EOFError) as error:
        raise StorageError(f"{path} is a damaged zip file ({error}): copy it again from its source") from error
    if bad is not None:
        raise StorageError(f"{path}: {bad} does not match its checksum: copy the file again from its source")


def _tensor_file(path: Path) -> Finding:
    file = read_header(path)
    if not file.entries:
        raise StorageError(f"{path} holds no tensor: choose a file with the weights of a network")
    kind, members = ("shard", shard_of(file).source.count) if is_shard(file) else ("network", 1)
    problems = tensor_problems(file)
    return Finding(path, kind, DAMAGED if problems else WHOLE, problems[0] if problems else "", members)


def source_problems(sources: Sequence[Source]) -> list[str]:
    """Check the files behind a population; return one sentence per problem."""
    paths = list(dict.fromkeys(source.path for source in sources if isinstance(source, FileSource)))
    folders = list(dict.fromkeys(path.parent for path in paths))
    whole = [folder for folder in folders if (folder / MANIFEST).exists()]
    problems = [sentence for folder in whole for sentence in sentences(inspect_population(folder))]
    problems += sentences(inspect_file(path) for path in paths if path.parent not in whole)
    for folder in folders:
        if folder not in whole:
            problems += sentences(unfinished(folder, lambda path: any(suffix in path.name for suffix in SUFFIXES)))
    return problems
