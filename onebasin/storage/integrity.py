"""The findings of an inspection: one per file, whole or damaged, with a sentence that says what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from onebasin.errors import OnebasinError
from onebasin.storage.atomic import leftovers

WHOLE, NOTE, DAMAGED = "whole", "note", "damaged"


@dataclass(frozen=True)
class Finding:
    """What the inspection of one file found.

    Attributes:
        path: the file, or the folder where something is missing.
        kind: what it is: "shard", "manifest", "network", "posterior", ...
        state: "whole"; "note" for what deserves a word though nothing is lost; or "damaged".
        sentence: what is wrong and what to do; empty if it is whole.
        members: networks in it, as far as it says; None for a damaged file that does not say it any more.
    """

    path: Path
    kind: str
    state: str = WHOLE
    sentence: str = ""
    members: int | None = 0

    def to_json(self) -> dict[str, object]:
        """The fields as JSON can hold them."""
        return {**vars(self), "path": str(self.path)}


@dataclass(frozen=True)
class Tally:
    """How many networks and files are whole or damaged.

    Attributes:
        networks: networks that are whole.
        lost: networks in damaged files, as far as these say it.
        files: damaged files with networks.
        unknown: damaged files that do not say how many networks they hold.
        damaged: all damaged files, with or without networks.
    """

    networks: int
    lost: int
    files: int
    unknown: int
    damaged: int


def tally(findings: Sequence[Finding]) -> Tally:
    """Count the networks and files of findings.

    >>> tally([Finding(Path("a"), "shard", members=3), Finding(Path("b"), "shard", DAMAGED, "It is cut off.", None)])
    Tally(networks=3, lost=0, files=1, unknown=1, damaged=1)
    """
    damaged = [one for one in findings if one.state == DAMAGED]
    holding = [one for one in damaged if one.members != 0]
    return Tally(
        networks=sum(one.members or 0 for one in findings if one.state == WHOLE),
        lost=sum(one.members or 0 for one in holding),
        files=len(holding),
        unknown=sum(one.members is None for one in holding),
        damaged=len(damaged),
    )


def finding_of(path: Path, kind: str, look: Callable[[], Finding]) -> Finding:
    """The finding that `look` returns; an error of it is damage, to an unknown number of networks."""
    try:
        return look()
    except (OnebasinError, OSError) as error:
        return Finding(path, kind, DAMAGED, " ".join(str(error).split()), None)


def unfinished(folder: Path, concerns: Callable[[Path], bool] = lambda path: True) -> Iterator[Finding]:
    """Temporary files and folders: of writers at work, or left by killed ones; never part of anything finished."""
    for path in leftovers(folder):
        if concerns(path):
            yield Finding(
                path,
                "leftover",
                NOTE,
                f"{path} is unfinished: it belongs to a writer at work or to one that was killed; "
                "delete it when no writer is running",
            )


def sentences(findings: Iterable[Finding]) -> list[str]:
    """The sentences of all findings that have one."""
    return [finding.sentence for finding in findings if finding.sentence]
