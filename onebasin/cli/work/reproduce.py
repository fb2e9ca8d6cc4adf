"""The work of ``onebasin reproduce``."""

import shlex
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import click
from torch import Tensor, nn

from onebasin.cli import data as examples
from onebasin.cli.load import fingerprint, load_factory
from onebasin.cli.options import Sources
from onebasin.cli.progress import progress_bar
from onebasin.cli.words import OWN_EXAMPLES
from onebasin.cli.work.sample import chosen_method
from onebasin.data import Dataset
from onebasin.errors import InputError
from onebasin.functional import global_seed
from onebasin.reporting import Record, tally, write_report
from onebasin_papers.own import changed_settings, digest, meanings, own_problem, own_titles, shown
from onebasin_papers.problems import Own, OwnArchitecture
from onebasin_papers.study import Study, Workspace, run_study


def reproduce(
    *, paper: str, preset: str, seed: int, output: Path | None, only: tuple[str, ...], fresh: bool, listed: bool,
    settings: tuple[str, ...], sources: Sources, **brought: Any,
) -> None:  # fmt: skip
    """Run the parts of a study, or list its settings, and write the report."""
    module = import_module(f"onebasin_papers.{paper}")
    sizes = module.preset_settings(preset, None if sources.directory is None else str(sources.directory))
    if listed:
        click.echo(list_settings(module.STUDY, sizes))
        return
    parts = {part.name: part.keys for part in module.STUDY.parts}
    sizes, changed = changed_settings(sizes, parts, settings, module.LEAST)
    own = _own(module, sizes, changed, sources=sources, preset=preset, seed=seed, **brought)
    sizes = module.own_settings(sizes, own, changed)
    folder = output or Path(f"reproduce-{paper}-{'own' if own.words else preset}")
    given = {**brought, "set": settings, "standardise": sources.standardise}
    workspace = Workspace(sizes, seed, folder, own=own)
    record = run_with_progress(module.STUDY, workspace, _command(paper, preset, seed, given), only=only, fresh=fresh)
    click.echo(f"\n{verdicts(record)}\n")
    click.echo(str(write_report(record, folder)))


def _own(
    module: ModuleType, sizes: Any, changed: dict[str, str], *, sources: Sources, preset: str, seed: int,
    model: str | None, data: str | None, ood: str | None, limit: int | None, method: tuple[str, ...],
) -> Own:  # fmt: skip
    """What the options bring in place of the paper's, read and checked."""
    for name, value in (("--ood", ood), ("--limit", limit)):
        if value is not None and data is None:
            raise InputError(f"expected --data with {name}, found {name} {value} alone: give --data too")
    if ood is not None and module.STUDY.name == "compact":
        raise InputError("compact has no foreign inputs, found --ood: leave it out, or reproduce symmetry")
    if data is not None and model is None and preset == "full":
        raise InputError("expected --model with --data and --preset full, found none: give it, or the quick preset")
    titles = own_titles([(name, chosen_method(name, {})) for name in method], module.ROWS)
    words = {"set": ", ".join(f"{key} {value}" for key, value in changed.items())} if changed else {}
    if titles:
        named = zip(method, titles.values(), strict=True)
        words["method"] = ", ".join(fingerprint(text) if ":" in text else repr(one) for text, one in named)
    if model is None and data is None:
        return Own(methods=titles, words=words)
    architecture = partial(module.perceptron, sizes) if model is None else _architecture(model, sizes, changed)
    if data is None:
        theirs = module.preset_problem(sizes, seed)
        dataset = Dataset(theirs.name, theirs.train, theirs.test, int(theirs.train[1].max()) + 1)
        outside = theirs.outside if len(theirs.outside) else None
        own = own_problem(dataset, architecture, outside=outside, outside_name=theirs.outside_name)
    else:
        most = limit or (OWN_EXAMPLES if preset == "quick" else None)
        foreign = None if ood is None else _foreign(ood, sources)
        own = own_problem(
            examples.read_dataset(data, sources), architecture, outside=foreign, outside_name=ood or "", limit=most
        )
    assert own.problem is not None
    (inputs, targets), (held, classes) = own.problem.train, own.problem.test
    words["data"] = f"{data or own.problem.name} {digest(inputs, targets, held, classes, own.problem.outside)}"
    if model is not None:
        words["model"] = fingerprint(model)
    return replace(own, methods=titles, words=words)


def _foreign(text: str, sources: Sources) -> Tensor:
    """Foreign inputs."""
    inputs = examples.read(text, targets=False, sources=sources).inputs
    if not isinstance(inputs, Tensor):
        raise InputError(f"expected one tensor of foreign inputs in {text}, found several: give a file with one")
    return inputs


def _architecture(reference: str, sizes: Any, changed: Collection[str]) -> Callable[[int, int], OwnArchitecture]:
    """What the user's factory builds, whatever the data."""
    factory = load_factory(reference)
    if factory.width is None and {"units", "widths"} & {*changed}:
        raise InputError(
            f"expected a factory with an argument width to set units or widths, found {reference} without: give it "
            f"one, as in def {factory.name}(width=8)"
        )
    width = sizes.units if "units" in changed else factory.width

    def build(width: int | None) -> nn.Module:
        with global_seed(0):
            return (factory.build() if width is None else factory.build(width=width)).eval()

    return lambda features, classes: OwnArchitecture(factory.name, build, width)


def list_settings(study: Study, settings: Any) -> str:
    """All parts of a study, with their settings, the defaults of a preset, and what they mean."""
    meaning, formatter = meanings(settings), click.HelpFormatter(width=100)
    for part in study.parts:
        formatter.write(f"{part.name}: {part.title}\n")
        with formatter.indentation():
            formatter.write_dl(
                [(f"{part.name}.{key}={shown(getattr(settings, key))}", meaning[key]) for key in part.keys], col_max=34
            )
        formatter.write_paragraph()
    formatter.write_text(
        "Change them as in --set table.KEY=VALUE, lists with commas. A setting that stands under several parts is one: "
        "parts share their networks."
    )
    return formatter.getvalue().strip("\n")


def run_with_progress(
    study: Study, workspace: Workspace[Any], command: str, *, only: tuple[str, ...] = (), fresh: bool = False
) -> Record:
    """Run a study, with a line and a bar for each part on stderr."""
    try:
        return run_study(
            study,
            workspace,
            command,
            only=only,
            fresh=fresh,
            tell=lambda text: click.echo(text, err=True),
            watch=progress_bar,
        )
    except KeyboardInterrupt:
        click.echo(f"what was finished is kept in {workspace.folder}: the same command goes on", err=True)
        raise


def verdicts(record: Record) -> str:
    """One line for each claim, and one with their numbers."""
    lines = [f"{claim.verdict}: {claim.text} Found: {claim.found}." for claim in record.claims]
    return "\n".join([*lines, "", tally(record.claims)])


def _command(paper: str, preset: str, seed: int, given: Mapping[str, Any]) -> str:
    """What makes the record again."""
    words = ["onebasin", "reproduce", paper, "--preset", preset, "--seed", str(seed)]
    for name, value in given.items():
        if value is True:
            words.append(f"--{name}")
        elif value:
            words += [
                word for one in (value if isinstance(value, tuple) else (value,)) for word in (f"--{name}", str(one))
            ]
    return shlex.join(words)
