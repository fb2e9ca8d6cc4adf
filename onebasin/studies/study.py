"""A study: parts in order, each kept when it is done, so that an interrupted run goes on."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from onebasin.errors import InputError, StorageError
from onebasin.population.durable import make_folder, publish
from onebasin.record import Record, Section, decode, encode, write_record
from onebasin.record.store import FILE
from onebasin.studies.bench import Bench, Watch

_PACKAGES = ("onebasin", "torch", "numpy", "scipy", "scikit-learn")
PARTS = "parts"  # folder of the parts that are done
PLAN = "plan.json"  # marks the folder of a run, and says of which


@dataclass(frozen=True)
class Part:
    """One question of a study.

    Attributes:
        name: a word, lower case with hyphens: the section's name, and what `--only` takes.
        title: the question, as the section's title.
        run: computes the answer. The section that it returns needs no command and no seconds.
    """

    name: str
    title: str
    run: Callable[[Bench[Any]], Section]


@dataclass(frozen=True)
class Study:
    """A list of questions.

    Attributes:
        name: as in ``onebasin reproduce NAME``.
        title: of the report.
        parts: in the order of reading; a later one may use networks of an earlier one.
        summarise: sections -> sentences for the top of the report.
        terms: word -> definition.
    """

    name: str
    title: str
    parts: tuple[Part, ...]
    summarise: Callable[[Sequence[Section]], Sequence[str]]
    terms: dict[str, str]


def run_study(
    study: Study,
    bench: Bench[Any],
    command: str,
    *,
    only: Sequence[str] = (),
    fresh: bool = False,
    tell: Callable[[str], None] = lambda text: None,
    watch: Watch | None = None,
) -> Record:
    """Run the parts that are not done yet, and write the record of all that are.

    Args:
        study: the questions.
        bench: the settings and the folder. A folder of another run is refused.
        command: what makes the whole record again.
        only: names of parts; empty for all.
        fresh: forget what the folder holds.
        tell: receives one line per part.
        watch: shows a bar while a part is running.

    Returns:
        The record, also under `bench.folder` in record.json. With `only` it holds those parts and what was done before.

    Raises:
        InputError: `only` names no part, or the folder holds another run.
    """
    names = [part.name for part in study.parts]
    if unknown := sorted(set(only) - set(names)):
        raise InputError(f"{study.name} has the parts {', '.join(names)}, found {unknown[0]!r}: give one of these")
    _claim_folder(study, bench, fresh)
    for part in study.parts:
        if (not only or part.name in only) and _kept(bench.folder, part) is None:
            tell(f"{part.name}: {part.title}")
            began = time.perf_counter()
            with watch(part.name) if watch else nullcontext(bench.show) as bench.show:
                section = part.run(bench)
            seconds = time.perf_counter() - began
            again = f"{command} --only {part.name}"
            _keep(bench.folder, part, replace(section, name=part.name, command=again, seconds=seconds))
            tell(f"{part.name}: done in {seconds:.0f} s")
    sections = [kept for part in study.parts if (kept := _kept(bench.folder, part)) is not None]
    record = Record(
        study.name,
        study.title,
        tuple(study.summarise(sections)),
        tuple(sections),
        command,
        {**bench.plan.settings(), "seed": bench.seed},
        {name: version(name) for name in _PACKAGES} | {"python": platform.python_version()},
        study.terms,
        sum(section.seconds for section in sections),
    )
    write_record(record, bench.folder / FILE)
    return record


def _claim_folder(study: Study, bench: Bench[Any], fresh: bool) -> None:
    """Mark the folder as that of this run, or refuse one of another."""
    folder = bench.folder
    make_folder(folder)
    wanted = {"study": study.name, **bench.plan.settings(), "seed": bench.seed, "torch": version("torch")}
    file = folder / PLAN
    ours = file.is_file()
    if not ours and any(folder.iterdir()):
        raise InputError(f"{folder} holds something else than a run of onebasin: choose another --output")
    if ours and fresh:
        for below in (PARTS, "networks"):
            shutil.rmtree(folder / below, ignore_errors=True)
        (folder / FILE).unlink(missing_ok=True)  # of the run that is forgotten
    if not ours or fresh:
        publish(file, lambda opened: opened.write(json.dumps(wanted, indent=1).encode()), replace=True)
        return
    try:
        found = dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise StorageError(f"{file} is damaged: give --fresh to begin again, or choose another --output") from error
    other = sorted(name for name in {*wanted, *found} if wanted.get(name) != found.get(name))
    if other:
        told = ", ".join(f"{name} {found.get(name)} instead of {wanted.get(name)}" for name in other[:3])
        raise InputError(
            f"{folder} holds a run with other settings ({told}): choose another --output, or give --fresh to begin anew"
        )


def _file(folder: Path, part: Part) -> Path:
    return folder / PARTS / f"{part.name}.json"


def _keep(folder: Path, part: Part, section: Section) -> None:
    """Write a finished section; it appears whole or not at all."""
    file = _file(folder, part)
    make_folder(file.parent)
    text = json.dumps(encode(section), allow_nan=False)
    digest = hashlib.sha256(text.encode()).hexdigest()
    publish(file, lambda opened: opened.write(f"{digest}\n{text}\n".encode()), replace=True)


def _kept(folder: Path, part: Part) -> Section | None:
    """A section that was finished before; None where it was not, or where its file is damaged."""
    return read_part(_file(folder, part))


def read_part(file: Path) -> Section | None:
    """A finished section; None where there is none, or where the file is damaged or of another version."""
    try:
        digest, text = file.read_text(encoding="utf-8").split("\n", 1)
    except (OSError, ValueError):
        return None
    text = text.rstrip("\n")
    if hashlib.sha256(text.encode()).hexdigest() != digest:
        return None
    try:
        section: Section = decode(json.loads(text), Section, file.stem)
    except (StorageError, InputError):
        return None
    return section
