"""A study: parts in order, each kept when it is done, so that an interrupted run goes on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import nn

import onebasin as ob

# ----------------------------------------------------------------------
# Where a study works: its settings, its seed, its folder, and networks that several parts share.


Show = Callable[[int, int, str], None]  # (done, of so many, what is being done)
Watch = Callable[[str], AbstractContextManager[Show]]  # a title -> a bar that is shown until the block ends
_Made = TypeVar("_Made")


@dataclass(frozen=True)
class Plan:
    """What a study runs; studies add their own fields, plain values all.

    Attributes:
        preset: "quick" or "full".
        data_dir: the folder with data sets that do not come with the package; None where none is needed.
    """

    preset: str = "quick"
    data_dir: str | None = None

    def settings(self) -> dict[str, Any]:
        """The fields that decide results: all but the place of the data. Sequences become text."""
        fields = {item.name: getattr(self, item.name) for item in dataclasses.fields(self) if item.name != "data_dir"}
        plain = (str, int, float, bool, type(None))
        return {name: value if isinstance(value, plain) else str(value) for name, value in fields.items()}


_Settings = TypeVar("_Settings", bound=Plan)


@dataclass(eq=False)
class Bench(Generic[_Settings]):
    """Handed to every part of a study.

    Attributes:
        plan: the settings.
        seed: of everything random.
        folder: of the run; networks are kept below it.
        show: moves the bar of the part that is running.
    """

    plan: _Settings
    seed: int
    folder: Path
    show: Show = lambda done, total, doing: None
    _made: dict[str, Any] = field(default_factory=dict)

    def once(self, name: str, make: Callable[[], _Made]) -> _Made:
        """What `make` gives, made once in this process: problems, symmetries, aligned populations."""
        if name not in self._made:
            self._made[name] = make()
        found: _Made = self._made[name]
        return found

    def networks(
        self,
        name: str,
        model: nn.Module,
        data: Any,
        method: ob.Method,
        options: Mapping[str, Any],
        *,
        seed: int | None = None,
    ) -> ob.Population:
        """`sample` into the folder of the run: an interrupted run goes on, and parts that ask again get the same.

        Args:
            name: of the population, as "hmc-0"; its folder and, without `seed`, its stream of random numbers.
            model: as for `sample`.
            data: as for `sample`.
            method: as for `sample`.
            options: keywords of `sample`.
            seed: where several populations shall share one.
        """

        def made() -> ob.Population:
            path = self.folder / "networks" / name
            drawn = self.number(name) if seed is None else seed
            return ob.sample(model, data, method, seed=drawn, path=path, progress=self.show, **options)

        return self.once(f"networks/{name}", made)

    def number(self, *name: str | int) -> int:
        """A seed for a purpose, where one is asked for: 31 bits, which every generator takes."""
        return ob.derived(self.seed, *name) >> 32

    def stream(self, *name: str | int) -> torch.Generator:
        """Random numbers for a purpose; the same whatever else was drawn."""
        return ob.generator(self.seed, *name)


# ----------------------------------------------------------------------
# A study: parts in order, each kept when it is done, so that an interrupted run goes on.


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
    run: Callable[[Bench[Any]], ob.reporting.Section]


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
    summarise: Callable[[Sequence[ob.reporting.Section]], Sequence[str]]
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
) -> ob.reporting.Record:
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
        raise ob.errors.InputError(
            f"{study.name} has the parts {', '.join(names)}, found {unknown[0]!r}: give one of these"
        )
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
    record = ob.reporting.Record(
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
    ob.reporting.write_record(record, bench.folder / ob.reporting.FILE)
    return record


def _claim_folder(study: Study, bench: Bench[Any], fresh: bool) -> None:
    """Mark the folder as that of this run, or refuse one of another."""
    folder = bench.folder
    ob.storage.make_folder(folder)
    wanted = {"study": study.name, **bench.plan.settings(), "seed": bench.seed, "torch": version("torch")}
    file = folder / PLAN
    ours = file.is_file()
    if not ours and any(folder.iterdir()):
        raise ob.errors.InputError(f"{folder} holds something else than a run of onebasin: choose another --output")
    if ours and fresh:
        for below in (PARTS, "networks"):
            shutil.rmtree(folder / below, ignore_errors=True)
        (folder / ob.reporting.FILE).unlink(missing_ok=True)  # of the run that is forgotten
    if not ours or fresh:
        ob.storage.publish(file, lambda opened: opened.write(json.dumps(wanted, indent=1).encode()), replace=True)
        return
    try:
        found = dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ob.errors.StorageError(
            f"{file} is damaged: give --fresh to begin again, or choose another --output"
        ) from error
    other = sorted(name for name in {*wanted, *found} if wanted.get(name) != found.get(name))
    if other:
        told = ", ".join(f"{name} {found.get(name)} instead of {wanted.get(name)}" for name in other[:3])
        raise ob.errors.InputError(
            f"{folder} holds a run with other settings ({told}): choose another --output, or give --fresh to begin anew"
        )


def _file(folder: Path, part: Part) -> Path:
    return folder / PARTS / f"{part.name}.json"


def _keep(folder: Path, part: Part, section: ob.reporting.Section) -> None:
    """Write a finished section; it appears whole or not at all."""
    file = _file(folder, part)
    ob.storage.make_folder(file.parent)
    text = json.dumps(ob.reporting.encode(section), allow_nan=False)
    digest = hashlib.sha256(text.encode()).hexdigest()
    ob.storage.publish(file, lambda opened: opened.write(f"{digest}\n{text}\n".encode()), replace=True)


def _kept(folder: Path, part: Part) -> ob.reporting.Section | None:
    """A section that was finished before; None where it was not, or where its file is damaged."""
    return read_part(_file(folder, part))


def read_part(file: Path) -> ob.reporting.Section | None:
    """A finished section; None where there is none, or where the file is damaged or of another version."""
    try:
        digest, text = file.read_text(encoding="utf-8").split("\n", 1)
    except (OSError, ValueError):
        return None
    text = text.rstrip("\n")
    if hashlib.sha256(text.encode()).hexdigest() != digest:
        return None
    try:
        section: ob.reporting.Section = ob.reporting.decode(json.loads(text), ob.reporting.Section, file.stem)
    except (ob.errors.StorageError, ob.errors.InputError):
        return None
    return section
