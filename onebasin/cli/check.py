"""``onebasin check``: is everything whole that lies under a path, what is not, and what can be saved?"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from onebasin.cli.looking import look
from onebasin.cli.options import debug, progress_bar
from onebasin.errors import InputError, StorageError
from onebasin.population import NETWORKS, rescue, savable
from onebasin.storage import DAMAGED, NOTE, WHOLE, Finding, Tally, real_path, tally


@click.command()
@click.argument("path", metavar="PATH", type=click.Path(path_type=Path))
@click.option(
    "--save",
    "goal",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Write the networks that are whole into this new population folder.",
)
@click.option("--json", "as_json", is_flag=True, help="Print everything that was looked at as JSON, and nothing else.")
@debug
def check(*, path: Path, goal: Path | None, as_json: bool) -> int:
    """Read everything under PATH, compare it with its checksums, and say what is whole.

    PATH is whatever onebasin writes: a population, the folder of sample, the journal of an interrupted align, a
    posterior, the folder of a study; or files of networks that somebody else made, which have no checksums of ours, so
    that only their form is judged. Nothing under PATH is changed.

    The exit code is 0 if everything is whole, and 5 if something is damaged. What a writer left unfinished when it was
    killed is named, and is no damage: it was never part of the networks.

    \b
      onebasin check chain/
      onebasin check chain/ --save rescued/
      onebasin check chain/ --json
    """  # noqa: D301 - click reads the backspace: keep these lines apart
    found: list[Finding] = []
    entries = sum(1 for _ in path.iterdir()) if path.is_dir() else 1
    with progress_bar(f"checking {path}") as show:
        for finding in look(path):
            found.append(finding)
            show(len(found), max(entries, len(found)), finding.path.name)
    if not any(finding.state != NOTE or finding.kind != "leftover" for finding in found):
        raise StorageError(f"{path} holds nothing that onebasin writes or reads: check the path")
    saved = _saved(path, found, goal) if goal is not None else ""
    counts = tally(found)
    if as_json:
        told = {"path": str(path), "whole": not counts.damaged, **vars(counts)}
        click.echo(json.dumps({**told, "findings": [one.to_json() for one in found]}, indent=1))
    else:
        click.echo("\n".join([*_lines(found), "", _summary(path, found, counts), saved]).rstrip())
    return StorageError.exit_code if counts.damaged else 0


def _saved(path: Path, found: Sequence[Finding], goal: Path) -> str:
    if not path.is_dir() or len({one.path.parent for one in found if one.kind in NETWORKS}) > 1:
        raise InputError(f"--save wants the folder of one population, and {path} is not: give the folder of each")
    if real_path(goal).is_relative_to(real_path(path)):
        raise InputError(f"{goal} lies inside {path}, which is to stay as it is: choose another --save")
    return f"{goal}: the {_counted(rescue(path, found, goal), 'network')} that are whole"


def _lines(found: Sequence[Finding]) -> Iterator[str]:
    """One line for all whole files of a kind in a folder, and one for each that is not."""
    groups: dict[tuple[Path, str], list[Finding]] = {}
    for one in found:
        if one.state == WHOLE:
            groups.setdefault((one.path.parent, one.kind), []).append(one)
    for (folder, kind), inside in groups.items():
        name, what = (inside[0].path, kind) if len(inside) == 1 else (folder, _counted(len(inside), kind))
        members = sum(one.members or 0 for one in inside)
        holding = f" with {_counted(members, 'network')}" if members and kind != "network" else ""
        yield f"{WHOLE:8} {what}{holding}: {name}"
    for state in (NOTE, DAMAGED):
        yield from (f"{state:8} {one.kind}: {one.sentence}" for one in found if one.state == state)


def _summary(path: Path, found: Sequence[Finding], counts: Tally) -> str:
    networks = f"{_counted(counts.networks, 'network')} whole"
    if not counts.damaged:
        return f"{networks}; nothing is damaged" if counts.networks else "nothing is damaged"
    if not counts.files:
        return f"{networks}, none lost; see above for what is damaged"
    lost = _counted(counts.lost, "network")
    if counts.unknown:
        lost = f"{lost} and an unknown number more" if counts.lost else "an unknown number"
    told = f"{networks}, {lost} lost with {_counted(counts.files, 'file')}"
    if not savable(found):
        return f"{told}; nothing can be saved from here"
    return f"{told}; what can be saved: onebasin check {path} --save DIR writes the whole ones into a new population"


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 or what == 'diagnostics' else 's'}"
