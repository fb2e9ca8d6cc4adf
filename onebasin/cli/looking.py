"""What lies under a path, of all that onebasin writes or reads, and whether it is whole."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from onebasin.errors import StorageError
from onebasin.inference import inspect_run, is_run
from onebasin.population import MANIFEST, SUFFIXES, inspect_file, inspect_population, is_archive, shard_key
from onebasin.posterior import FORMAT as POSTERIOR
from onebasin.posterior import read_parts
from onebasin.reporting import FILE, read_record
from onebasin.storage import (
    DAMAGED,
    NOTE,
    WHOLE,
    Finding,
    looked_at,
    read_header,
    real_path,
    tensor_problems,
    unfinished,
)
from onebasin_papers.inspection import inspect_study
from onebasin_papers.study import PARTS, PLAN

_DEEP = 6  # folders below each other
_JOURNAL = ".journal"


def look(path: Path, depth: int = 0) -> Iterator[Finding]:
    """Look at everything under a path, and at what killed writers left beside it.

    Raises:
        StorageError: there is nothing.
    """
    if not depth and real_path(path).parent.is_dir():
        yield from unfinished(real_path(path).parent, lambda other: other.name.startswith(f".{real_path(path).name}."))
    if not path.exists():
        raise StorageError(f"{path} does not exist: check the path")
    yield from _folder(path, depth) if path.is_dir() else [_file(path)]


def _folder(folder: Path, depth: int) -> Iterator[Finding]:
    entries = sorted(folder.iterdir())
    if (folder / MANIFEST).exists() or is_run(folder) or any(map(shard_key, entries)):
        yield from _population(folder)
        return
    below = [entry for entry in entries if entry.is_dir() and not entry.is_symlink() and entry.name[0] != "."]
    if (folder / PLAN).exists():
        yield from inspect_study(folder)
        below = [entry for entry in below if entry.name != PARTS]
    else:
        yield from (_file(entry) for entry in entries if _is_ours(entry))
        yield from unfinished(folder)
    if depth < _DEEP:
        for entry in below:
            yield from look(entry, depth + 1)


def _population(folder: Path) -> Iterator[Finding]:
    """A population, which may be the draws of a run; one that was killed before its first draw has no manifest."""
    run = is_run(folder)
    if run and not (folder / MANIFEST).exists() and not any(map(shard_key, folder.iterdir())):
        said = f"{folder} is a run that was stopped before its first draw: give its command again"
        yield Finding(folder, "run", NOTE, said)
        return
    damaged = False
    for finding in inspect_population(folder):
        damaged |= finding.state == DAMAGED and finding.kind.endswith("shard")
        yield finding
    if run:
        yield from inspect_run(folder)
    if run and damaged:
        said = (
            f"{folder} is a run, so its lost draws can be made again bit for bit: move each damaged shard away, with "
            "the later ones of the same writer, and give the command of the run again"
        )
        yield Finding(folder, "run", NOTE, said)
    for path in sorted(folder.glob("*.json")):
        if path.name != MANIFEST:
            yield _file(path)


def _is_ours(path: Path) -> bool:
    known = path.suffix.lower() in SUFFIXES or is_archive(path) or path.suffix == _JOURNAL or path.name == FILE
    return path.is_file() and known and not path.name.startswith(".")


def _file(path: Path) -> Finding:
    """One file, by its name and by what its header says."""
    if path.suffix == _JOURNAL:
        return looked_at(path, "journal", partial(_journal, path))
    if path.suffix == ".json":
        return looked_at(path, "record", partial(_json, path))
    if path.suffix.lower() == ".safetensors":
        try:
            told = read_header(path).metadata.get("onebasin")
        except StorageError:
            told = None
        if told == POSTERIOR:
            return looked_at(path, "posterior", partial(_posterior, path))
    if path.suffix.lower() in SUFFIXES or is_archive(path):
        return inspect_file(path)
    raise StorageError(f"{path} is nothing that onebasin writes or reads: give a folder or a file of networks")


def _journal(path: Path) -> Finding:
    problems = tensor_problems(read_header(path))
    if problems:
        said = f"{problems[0]}; without it the alignment starts again from its beginning"
        return Finding(path, "journal", DAMAGED, said)
    said = f"{path} is whole, the journal of an alignment that was interrupted: give the same command again to go on"
    return Finding(path, "journal", NOTE, said)


def _posterior(path: Path) -> Finding:
    read_parts(path)
    return Finding(path, "posterior", WHOLE)


def _json(path: Path) -> Finding:
    if path.name == FILE:
        read_record(path)
        return Finding(path, "record")
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise StorageError(f"{path} is damaged ({error}): run the command that makes it again") from error
    return Finding(path, "record")
