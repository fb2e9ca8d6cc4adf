"""A study: parts in order, each kept when it is done, so that an interrupted run goes on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import nn

import onebasin as ob
from onebasin_papers.own import own_summary, own_title, without_published
from onebasin_papers.problems import Own

report = ob.reporting

Progress = Callable[[int, int, str], None]  # (done, of so many, what is being done)
Watch = Callable[[str], AbstractContextManager[Progress]]  # a title -> a bar that is shown until the block ends
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Settings:
    """What a study runs; studies add their own fields, plain values all.

    Attributes:
        preset: "quick" or "full".
        data_dir: the folder with data sets that do not come with the package; None where none is needed.
    """

    preset: str = "quick"
    data_dir: str | None = None

    def to_record(self) -> dict[str, Any]:
        """The fields that decide results: all but the place of the data. Sequences become text."""
        fields = {item.name: getattr(self, item.name) for item in dataclasses.fields(self) if item.name != "data_dir"}
        plain = (str, int, float, bool, type(None))
        return {name: value if isinstance(value, plain) else str(value) for name, value in fields.items()}


_Settings = TypeVar("_Settings", bound=Settings)


@dataclass(eq=False)
class Workspace(Generic[_Settings]):
    """Handed to every part of a study.

    Attributes:
        settings: sizes and budgets.
        seed: from which all random numbers derive.
        folder: of the run; networks are kept below it.
        progress: moves the bar of the part that is running.
        own: what the user brings in place of the paper's, and beside it.
    """

    settings: _Settings
    seed: int
    folder: Path
    progress: Progress = lambda done, total, doing: None
    own: Own = field(default_factory=Own)
    _cache: dict[str, Any] = field(default_factory=dict)

    def to_record(self) -> dict[str, Any]:
        """Everything that decides results."""
        return {**self.settings.to_record(), **self.own.words, "seed": self.seed}

    def cached(self, name: str, make: Callable[[], _Value]) -> _Value:
        """What `make` gives, made once in this process: problems, symmetries, aligned populations."""
        if name not in self._cache:
            self._cache[name] = make()
        value: _Value = self._cache[name]
        return value

    def sample(
        self, name: str, model: nn.Module, data: Any, method: ob.Method, *, seed: int | None = None, **options: Any
    ) -> ob.Population:
        """`ob.sample` into the folder of the run: an interrupted run goes on, and parts that ask again get the same.

        Args:
            name: of the population, as "hmc-0"; its folder and, without `seed`, its stream of random numbers.
            model: as for `ob.sample`.
            data: as for `ob.sample`.
            method: as for `ob.sample`.
            seed: where several populations shall share one.
            **options: keywords of `ob.sample`.
        """

        def draw() -> ob.Population:
            path = self.folder / "networks" / name
            chosen = self.seed_for(name) if seed is None else seed
            return ob.sample(model, data, method, seed=chosen, path=path, progress=self.progress, **options)

        return self.cached(f"networks/{name}", draw)

    def sample_own(
        self, title: str, name: str, draws: int, trained: Callable[[], ob.Population], **options: Any
    ) -> ob.Population:
        """Draw networks by one of the user's methods, as many per chain as the methods of the paper draw.

        Args:
            title: of the method in `own.methods`.
            name: of the population.
            draws: networks of each chain, where the method has an option of that name.
            trained: gives networks that a method without `epochs`, which trains none itself, begins at.
            **options: `model`, `data` and keywords of `ob.sample`.

        Raises:
            ModelError: the user's code fails.
        """
        method: Any = self.own.methods[title]
        if "draws" in getattr(method, "__dataclass_fields__", {}):
            method = dataclasses.replace(method, draws=draws)
        start: Any = "fresh" if hasattr(method, "epochs") else trained()
        try:
            return self.sample(f"own-{file_name(title)}-{name}", method=method, start=start, **options)
        except ob.errors.OnebasinError:
            raise
        except Exception as error:
            raise ob.errors.ModelError(
                f"the method {title} raised {type(error).__name__}: {error}; try it alone with onebasin sample --debug"
            ) from error

    def seed_for(self, *name: str | int) -> int:
        """A seed for a purpose, where one is asked for: 31 bits, which every generator takes."""
        return ob.derived(self.seed, *name) >> 32

    def generator(self, *name: str | int) -> torch.Generator:
        """Random numbers for a purpose; the same whatever else was drawn."""
        return ob.generator(self.seed, *name)


def file_name(title: str) -> str:
    """A title as the name of a folder.

    >>> file_name("Walk (slow)")
    'walk-slow'
    """
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


_PACKAGES = ("onebasin", "torch", "numpy", "scipy", "scikit-learn")
LEFT_OUT = "Left out:"  # how the text of a part begins that a user's problem does not allow
PARTS = "parts"  # folder of the parts that are done
SETTINGS_FILE = "plan.json"  # marks the folder of a run, and says of which


@dataclass(frozen=True)
class Part:
    """One question of a study.

    Attributes:
        name: a word, lower case with hyphens: the section's name, and what `--only` takes.
        title: the question, as the section's title.
        run: computes the answer. The section that it returns needs no command and no seconds.
        keys: the settings that it reads, for people who change them.
        obstacle: why it cannot be run on a user's problem; "" where it can.
    """

    name: str
    title: str
    run: Callable[[Workspace[Any]], report.Section]
    keys: tuple[str, ...] = ()
    obstacle: Callable[[Workspace[Any]], str] = lambda workspace: ""


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
    summarise: Callable[[Sequence[report.Section]], Sequence[str]]
    terms: dict[str, str]


def run_study(
    study: Study,
    workspace: Workspace[Any],
    command: str,
    *,
    only: Sequence[str] = (),
    fresh: bool = False,
    tell: Callable[[str], None] = lambda text: None,
    watch: Watch | None = None,
) -> report.Record:
    """Run the parts that are not done yet, and write the record of all that are.

    Args:
        study: the questions.
        workspace: the settings and the folder. A folder of another run is refused.
        command: what makes the whole record again.
        only: names of parts; empty for all.
        fresh: forget what the folder holds.
        tell: receives one line per part.
        watch: shows a bar while a part is running.

    Returns:
        The record, also in record.json of the folder. With `only` it holds those parts and what was done before.

    Raises:
        InputError: `only` names no part, or the folder holds another run.
    """
    names = [part.name for part in study.parts]
    if unknown := sorted(set(only) - set(names)):
        raise ob.errors.InputError(
            f"{study.name} has the parts {', '.join(names)}, found {unknown[0]!r}: give one of these"
        )
    _claim_folder(study, workspace, fresh)
    for part in study.parts:
        if (not only or part.name in only) and read_part(_part_file(workspace.folder, part)) is None:
            tell(f"{part.name}: {part.title}")
            began = time.perf_counter()
            with watch(part.name) if watch else nullcontext(workspace.progress) as workspace.progress:
                section = answer(part, workspace)
            seconds = time.perf_counter() - began
            again = f"{command} --only {part.name}"
            _save_part(workspace.folder, part, replace(section, name=part.name, command=again, seconds=seconds))
            tell(f"{part.name}: done in {seconds:.0f} s")
    finished = (read_part(_part_file(workspace.folder, part)) for part in study.parts)
    sections = [section for section in finished if section is not None]
    record = report.Record(
        study.name,
        own_title(study.title, workspace.own),
        (
            *own_summary(workspace.own),
            *study.summarise([one for one in sections if not one.text[0].startswith(LEFT_OUT)]),
        ),
        tuple(sections),
        command,
        workspace.to_record(),
        {name: version(name) for name in _PACKAGES} | {"python": platform.python_version()},
        study.terms,
        sum(section.seconds for section in sections),
    )
    report.write_record(record, workspace.folder / report.FILE)
    return record


def answer(part: Part, workspace: Workspace[Any]) -> report.Section:
    """The section of a part; on a user's problem without published numbers, or with the reason why there is none."""
    if workspace.own.problem is None:
        return part.run(workspace)
    if reason := part.obstacle(workspace):
        return report.Section(part.name, part.title, (f"{LEFT_OUT} {reason}.",))
    return without_published(part.run(workspace))


def _claim_folder(study: Study, workspace: Workspace[Any], fresh: bool) -> None:
    """Mark the folder as that of this run, or refuse one of another."""
    folder = workspace.folder
    ob.storage.make_folder(folder)
    wanted = {"study": study.name, **workspace.to_record(), "torch": version("torch")}
    file = folder / SETTINGS_FILE
    ours = file.is_file()
    if not ours and any(folder.iterdir()):
        raise ob.errors.InputError(f"{folder} holds something else than a run of onebasin: choose another --output")
    if ours and fresh:
        for below in (PARTS, "networks"):
            shutil.rmtree(folder / below, ignore_errors=True)
        (folder / report.FILE).unlink(missing_ok=True)  # of the run that is forgotten
    if not ours or fresh:
        ob.storage.write_json(file, wanted)
        return
    try:
        stored = ob.storage.read_json(file)
    except ob.errors.StorageError as error:
        raise ob.errors.StorageError(
            f"{file} is damaged: give --fresh to begin again, or choose another --output"
        ) from error
    other = sorted(name for name in {*wanted, *stored} if wanted.get(name) != stored.get(name))
    if other:
        differences = ", ".join(f"{name} {stored.get(name)} instead of {wanted.get(name)}" for name in other[:3])
        raise ob.errors.InputError(
            f"{folder} holds a run with other settings ({differences}): choose another --output, or give --fresh to "
            "begin anew"
        )


def _part_file(folder: Path, part: Part) -> Path:
    return folder / PARTS / f"{part.name}.json"


def _save_part(folder: Path, part: Part, section: report.Section) -> None:
    text = json.dumps(report.encode(section), allow_nan=False)
    digest = hashlib.sha256(text.encode()).hexdigest()
    ob.storage.write_text(_part_file(folder, part), f"{digest}\n{text}\n")


def read_part(file: Path) -> report.Section | None:
    """A finished section; None where there is none, or where the file is damaged or of another version."""
    try:
        digest, text = file.read_text(encoding="utf-8").split("\n", 1)
    except (OSError, ValueError):
        return None
    text = text.rstrip("\n")
    if hashlib.sha256(text.encode()).hexdigest() != digest:
        return None
    try:
        section: report.Section = report.decode(json.loads(text), report.Section, file.stem)
    except (ob.errors.StorageError, ob.errors.InputError):
        return None
    return section


def inspect_study(folder: Path) -> Iterator[ob.storage.Finding]:
    """What is whole of the settings, the finished parts and the record of a study; its networks are not read."""
    yield ob.storage.finding_of(folder / SETTINGS_FILE, "plan", partial(_settings_finding, folder / SETTINGS_FILE))
    for path in sorted((folder / PARTS).glob("*.json")):
        yield ob.storage.finding_of(path, "part", partial(_part, path))
    if (folder / report.FILE).exists():
        yield ob.storage.finding_of(folder / report.FILE, "record", partial(_record, folder / report.FILE))
    yield from ob.storage.unfinished(folder)
    if (folder / PARTS).is_dir():
        yield from ob.storage.unfinished(folder / PARTS)


def _settings_finding(path: Path) -> ob.storage.Finding:
    ob.storage.read_json(path)
    return ob.storage.Finding(path, "plan")


def _part(path: Path) -> ob.storage.Finding:
    if read_part(path) is None:
        raise ob.errors.StorageError(
            f"{path} is damaged or of another version: the command of the study makes this part again"
        )
    return ob.storage.Finding(path, "part")


def _record(path: Path) -> ob.storage.Finding:
    report.read_record(path)
    return ob.storage.Finding(path, "record")
