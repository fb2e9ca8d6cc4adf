"""Does any damaged file do more than be refused?

    python -m benchmarks.fuzz [--files 10000] [--seed 0] [--doors shard,tgz] [--replay DOOR:NUMBER]

Small valid files of every kind that onebasin reads are damaged at random, and each is read and used as a user would.
Only an `OnebasinError` may come out, within seconds and without a memory of more than a gigabyte. Each door works in a
process of its own; a mutant is known by its door, its number and the seed, and `--replay` shows what one does.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import FrameType

from benchmarks.fuzz_doors import Door, warm_up
from benchmarks.fuzz_list import DOORS
from benchmarks.fuzz_mutations import mutate
from onebasin.errors import OnebasinError
from onebasin.reporting.text import table as laid_out

SECONDS = 10.0  # for one file
MEMORY = 1 << 30  # bytes beyond what the imports take


@dataclasses.dataclass
class Tally:
    """What became of the mutants of one door."""

    door: str
    files: int = 0
    accepted: int = 0
    refused: dict[str, int] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    worst: float = 0.0
    megabytes: float = 0.0
    findings: list[str] = dataclasses.field(default_factory=list)


class Hang(BaseException):
    """A file took too long; no `except Exception` may swallow it."""


def run(files: int, seed: int, doors: list[str] | None = None) -> list[Tally]:
    """Damage and use so many files, a child process for each door."""
    chosen = [door for door in DOORS if doors is None or door.name in doors]
    whole = sum(door.share for door in chosen)
    warm_up()
    return [_in_child(door, max(1, round(files * door.share / whole)), seed) for door in chosen]


def _in_child(door: Door, files: int, seed: int) -> Tally:
    """The tally of a door; a child that dies or never ends is a finding."""
    with tempfile.TemporaryDirectory(prefix="onebasin-fuzz-") as name:
        folder = Path(name)
        process = os.fork()
        if not process:
            code = 1
            try:
                child(door, files, seed, folder)
                code = 0
            except BaseException:
                (folder / "log").write_text(traceback.format_exc()[-600:])
            finally:
                os._exit(code)
        code = _waited(process, 60 + SECONDS + files / 2)
        report, place, log = folder / "tally.json", folder / "number", folder / "log"
        tally = Tally(**json.loads(report.read_text())) if report.exists() else Tally(door.name, files)
        if code:
            number, told = (path.read_text() if path.exists() else "?" for path in (place, log))
            tally.findings.append(f"{door.name}:{number}: the process ended with {code}: {told}")
        return tally


def _waited(process: int, seconds: float) -> int:
    """The exit code of a child, which is killed when its time is over."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found, status = os.waitpid(process, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(process, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def child(door: Door, files: int, seed: int, folder: Path) -> None:
    """All mutants of one door, in this process, under a limit of memory."""
    tally, name = Tally(door.name), door.name
    place = folder / "work"
    valid = _prepared(door, place)
    _limit_memory()
    signal.signal(signal.SIGALRM, _alarm)
    before = _resident()
    for number in range(files):
        (folder / "number").write_text(str(number))
        began = time.perf_counter()
        found = _one(door, place, mutant(door, valid, seed, number))
        took = time.perf_counter() - began
        tally.files, tally.seconds, tally.worst = tally.files + 1, tally.seconds + took, max(tally.worst, took)
        if found == "":
            tally.accepted += 1
        elif found.startswith("!"):
            tally.findings.append(f"{name}:{number}: {found[1:]}")
        else:
            tally.refused[found] = tally.refused.get(found, 0) + 1
    tally.megabytes = max(0.0, _resident() - before)
    (folder / "tally.json").write_text(json.dumps(dataclasses.asdict(tally)))


def _prepared(door: Door, place: Path) -> bytes:
    """A folder with the valid example, which must be of use; the bytes of its victim."""
    place.mkdir()
    door.build(place)
    content = (place / door.victim).read_bytes()
    found = _one(door, place, content)
    assert found == "", f"{door.name} refuses its own valid example: {found}"
    return content


def mutant(door: Door, valid: bytes, seed: int, number: int) -> bytes:
    """The bytes of one mutant, always the same ones."""
    chance = random.Random(f"{seed}/{door.name}/{number}")
    made = mutate(valid, chance, [valid, b"\0" * 100, b"PK\3\4" * 9])
    return door.seal(made) if chance.random() < 0.8 else made


def _one(door: Door, place: Path, content: bytes) -> str:
    """ "" where the file was of use, the class of our error, or "!" and what else happened."""
    (place / door.victim).parent.mkdir(parents=True, exist_ok=True)
    (place / door.victim).write_bytes(content)
    (place / "out").mkdir()
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        door.use(place)
        return ""
    except OnebasinError as error:
        return type(error).__name__
    except Hang:
        return f"!took more than {SECONDS:g} s at {_where()}"
    except BaseException as error:
        return f"!{type(error).__name__}: {str(error)[:150]} at {_where()}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        shutil.rmtree(place / "out", ignore_errors=True)


def _where() -> str:
    """The innermost line of onebasin."""
    error = sys.exception()
    frames = traceback.extract_tb(error.__traceback__) if error else []
    own = [frame for frame in frames if "/onebasin/" in frame.filename] or frames
    return " < ".join(f"{frame.filename.rpartition('/onebasin/')[2]}:{frame.lineno}" for frame in own[:-4:-1])


def _alarm(number: int, frame: FrameType | None) -> None:
    raise Hang


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _resident() -> float:
    """The largest memory so far, MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def table(tallies: list[Tally]) -> str:
    """A row per door."""
    rows: list[tuple[str, ...]] = [("reader", "files", "refused", "accepted", "worst s", "peak MB", "findings")]
    for tally in tallies:
        refused = sum(tally.refused.values())
        shown = (
            tally.files,
            refused,
            tally.accepted,
            f"{tally.worst:.2f}",
            f"{tally.megabytes:.0f}",
            len(tally.findings),
        )
        rows.append((tally.door, *map(str, shown)))
    total = [
        sum(t.files for t in tallies),
        sum(sum(t.refused.values()) for t in tallies),
        sum(t.accepted for t in tallies),
    ]
    worst, most = max(t.worst for t in tallies), max(t.megabytes for t in tallies)
    rows.append(("all", *map(str, total), f"{worst:.2f}", f"{most:.0f}", str(sum(len(t.findings) for t in tallies))))
    classes = collections.Counter[str]()
    for tally in tallies:
        classes.update(tally.refused)
    return (
        laid_out(rows) + "\n\nrefused with " + ", ".join(f"{name} {count:,}" for name, count in classes.most_common())
    )


def replay(text: str, seed: int) -> None:
    """Show what one mutant does."""
    name, _, number = text.partition(":")
    door = next(door for door in DOORS if door.name == name)
    with tempfile.TemporaryDirectory(prefix="onebasin-fuzz-") as folder:
        place = Path(folder) / "work"
        content = mutant(door, _prepared(door, place), seed, int(number))
        (place / door.victim).write_bytes(content)
        (place / "out").mkdir()
        print(f"{len(content):,} bytes: {content[:2000]!r}")
        _limit_memory()
        door.use(place)
        print("accepted")


def main() -> int:
    """Print the table; 1 where something was found."""
    parser = argparse.ArgumentParser(description="Damaged files against every reader.")
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--doors", type=lambda text: text.split(","))
    parser.add_argument("--replay", metavar="DOOR:NUMBER")
    chosen = parser.parse_args()
    if chosen.replay:
        replay(chosen.replay, chosen.seed)
        return 0
    tallies = run(chosen.files, chosen.seed, chosen.doors)
    print(table(tallies))
    for finding in (finding for tally in tallies for finding in tally.findings):
        print(f"FOUND {finding}")
    return int(any(tally.findings for tally in tallies))


if __name__ == "__main__":
    sys.exit(main())
