"""Check: findings about everything under a path, as lines or JSON, and a population of the networks that are whole."""

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import click

from onebasin.cli.networks import is_plain
from onebasin.cli.options import check_writable, remove_before
from onebasin.cli.progress import progress_bar
from onebasin.errors import InputError, StorageError
from onebasin.inference import inspect_run, is_run
from onebasin.population import (
    MANIFEST,
    NETWORKS,
    SUFFIXES,
    inspect_file,
    inspect_population,
    is_archive,
    save_whole,
    shard_key,
    whole_files,
)
from onebasin.posterior import FORMAT as POSTERIOR
from onebasin.posterior import read_parts
from onebasin.reporting import FILE, read_record
from onebasin.storage import (
    DAMAGED,
    NOTE,
    WHOLE,
    Finding,
    Tally,
    finding_of,
    is_taken,
    read_header,
    real_path,
    tally,
    tensor_problems,
    unfinished,
)
from onebasin_papers.study import PARTS, SETTINGS_FILE, inspect_study

_DEEP = 6  # folders below each other
_JOURNAL = ".journal"


def check(*, path: Path, goal: Path | None, as_json: bool, force: bool) -> int:
    """Read everything under PATH, compare it with its checksums, and say what is whole."""
    if goal is not None:
        if is_taken(goal) and not force:
            raise InputError(
                f"{goal} exists and is not empty: choose another --save, or give --force to replace the population "
                "there"
            )
        check_writable(goal, "--save")
    findings: list[Finding] = []
    entries = sum(1 for _ in path.iterdir()) if path.is_dir() else 1
    with progress_bar(f"checking {path}") as show:
        for finding in inspect(path):
            findings.append(finding)
            show(len(findings), max(entries, len(findings)), finding.path.name)
    if not any(finding.state != NOTE or finding.kind != "leftover" for finding in findings):
        raise StorageError(f"{path} holds nothing that onebasin writes or reads: check the path")
    saved = _save(path, findings, goal, force) if goal is not None else ""
    counts = tally(findings)
    if as_json:
        content = {"path": str(path), "whole": not counts.damaged, **vars(counts)}
        click.echo(json.dumps({**content, "findings": [entry.to_json() for entry in findings]}, indent=1))
    else:
        click.echo("\n".join([*_lines(findings), "", _summary(path, findings, counts), saved]).rstrip())
    return StorageError.exit_code if counts.damaged else 0


def _save(path: Path, findings: Sequence[Finding], goal: Path, force: bool) -> str:
    if not path.is_dir() or len({one.path.parent for one in findings if one.kind in NETWORKS}) > 1:
        raise InputError(f"--save wants the folder of one population, and {path} is not: give the folder of each")
    if real_path(goal).is_relative_to(real_path(path)):
        raise InputError(f"{goal} lies inside {path}, which is to stay as it is: choose another --save")
    if force:
        remove_before(goal, is_plain(goal), "a population", needed=[path])
    return f"{goal}: the {_count(save_whole(path, findings, goal), 'network')} that are whole"


def _lines(findings: Sequence[Finding]) -> Iterator[str]:
    """One line for all whole files of a kind in a folder, and one for each that is not."""
    groups: dict[tuple[Path, str], list[Finding]] = {}
    for one in findings:
        if one.state == WHOLE:
            groups.setdefault((one.path.parent, one.kind), []).append(one)
    for (folder, kind), inside in groups.items():
        name, what = (inside[0].path, kind) if len(inside) == 1 else (folder, _count(len(inside), kind))
        members = sum(one.members or 0 for one in inside)
        holding = f" with {_count(members, 'network')}" if members and kind != "network" else ""
        yield f"{WHOLE:8} {what}{holding}: {name}"
    for state in (NOTE, DAMAGED):
        yield from (f"{state:8} {one.kind}: {one.sentence}" for one in findings if one.state == state)


def _summary(path: Path, findings: Sequence[Finding], counts: Tally) -> str:
    networks = f"{_count(counts.networks, 'network')} whole"
    if not counts.damaged:
        return f"{networks}; nothing is damaged" if counts.networks else "nothing is damaged"
    if not counts.files:
        return f"{networks}, none lost; see above for what is damaged"
    lost = _count(counts.lost, "network")
    if counts.unknown:
        lost = f"{lost} and an unknown number more" if counts.lost else "an unknown number"
    summary = f"{networks}, {lost} lost with {_count(counts.files, 'file')}"
    if not whole_files(findings):
        return f"{summary}; nothing can be saved from here"
    return f"{summary}; what can be saved: onebasin check {path} --save DIR writes the whole ones into a new population"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 or what == 'diagnostics' else 's'}"


def inspect(path: Path, depth: int = 0) -> Iterator[Finding]:
    """Inspect everything under a path, and what killed writers left beside it.

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
    if (folder / SETTINGS_FILE).exists():
        yield from inspect_study(folder)
        below = [entry for entry in below if entry.name != PARTS]
    else:
        yield from (_file(entry) for entry in entries if _is_ours(entry))
        yield from unfinished(folder)
    if depth < _DEEP:
        for entry in below:
            yield from inspect(entry, depth + 1)


def _population(folder: Path) -> Iterator[Finding]:
    """A population, which may be the draws of a run; one that was killed before its first draw has no manifest."""
    run = is_run(folder)
    if run and not (folder / MANIFEST).exists() and not any(map(shard_key, folder.iterdir())):
        sentence = f"{folder} is a run that was stopped before its first draw: give its command again"
        yield Finding(folder, "run", NOTE, sentence)
        return
    damaged = False
    for finding in inspect_population(folder):
        damaged |= finding.state == DAMAGED and finding.kind.endswith("shard")
        yield finding
    if run:
        yield from inspect_run(folder)
    if run and damaged:
        sentence = (
            f"{folder} is a run, so its lost draws can be made again bit for bit: move each damaged shard away, with "
            "the later ones of the same writer, and give the command of the run again"
        )
        yield Finding(folder, "run", NOTE, sentence)
    for path in sorted(folder.glob("*.json")):
        if path.name != MANIFEST:
            yield _file(path)


def _is_ours(path: Path) -> bool:
    known = path.suffix.lower() in SUFFIXES or is_archive(path) or path.suffix == _JOURNAL or path.name == FILE
    return path.is_file() and known and not path.name.startswith(".")


def _file(path: Path) -> Finding:
    """One file, by its name and by what its header says."""
    if path.suffix == _JOURNAL:
        return finding_of(path, "journal", partial(_journal, path))
    if path.suffix == ".json":
        return finding_of(path, "record", partial(_json, path))
    if path.suffix.lower() == ".safetensors":
        try:
            kind = read_header(path).metadata.get("onebasin")
        except StorageError:
            kind = None
        if kind == POSTERIOR:
            return finding_of(path, "posterior", partial(_posterior, path))
    if path.suffix.lower() in SUFFIXES or is_archive(path):
        return inspect_file(path)
    raise StorageError(f"{path} is nothing that onebasin writes or reads: give a folder or a file of networks")


def _journal(path: Path) -> Finding:
    problems = tensor_problems(read_header(path))
    if problems:
        sentence = f"{problems[0]}; without it the alignment starts again from its beginning"
        return Finding(path, "journal", DAMAGED, sentence)
    sentence = (
        f"{path} is whole, the journal of an alignment that was interrupted: give the same command again to go on"
    )
    return Finding(path, "journal", NOTE, sentence)


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
