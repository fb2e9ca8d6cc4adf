"""Does any fault lose a network, or change a result?

    python -m benchmarks.faults [--faults 200] [--seed 0] [--folder DIR] [--only KIND]

Commands sample, align and compact work on tiny networks, each in a process of its own, and are disturbed at random
moments: killed, interrupted, robbed of a worker, of their disk, of their input. After each fault `onebasin check` must
name the damage, and nothing else; then the same command is given again, as a user would (compact
with --force where a file of the same name is there), until it completes. Its result must equal that of an undisturbed
run, bit for bit. Kinds that need a disk of their own mount one, which only this program sees, and are left out where
the user may not do that. Ctrl-C ends the campaign early and prints what was found so far. Exit code 1 if anything was
lost or wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.fault_kinds import KINDS, MOUNTING, FaultError, Scene
from benchmarks.fault_stage import VERBS, Process, equal, result, set_stage
from onebasin.reporting.text import table

ATTEMPTS = 6
_ALONE = "ONEBASIN_FAULTS_ALONE"  # set in the process that has a file system of its own
_EARLY = ("torch._dynamo", "scipy.optimize", "onebasin.cli.sample", "onebasin.cli.align", "onebasin.cli.compact")


@dataclass
class Row:
    """What one fault came to."""

    kind: str
    verb: str
    hit: bool
    lost: int
    wrong: int
    attempts: int
    told: str = ""


def combinations(dice: random.Random, kinds: list[str]) -> Iterator[tuple[str, str]]:
    """Kinds and verbs without end: each pair once before any comes again."""
    pairs = [(kind, verb) for kind in kinds for verb in VERBS if (kind, verb) != ("kill -9 of a worker", "compact")]
    while True:
        yield from dice.sample(pairs, len(pairs))


def one_fault(kind: str, scene: Scene, goal: dict[str, Any]) -> Row:
    """Bring about a fault, look at what it left, repeat the command until it completes, and compare."""
    row = Row(kind, scene.verb.name, False, 0, 0, 0)
    try:
        KINDS[kind](scene)
        row.hit = scene.hit
        if scene.output.exists():
            code, named = scene.check(scene.output)
            if code:
                raise FaultError(f"what was written is damaged: {named}")
        _complete(scene)
        found = result(scene.verb, scene.place)
        members = [len(next(iter(one["tensors"].values()))) for one in (goal, found)]
        row.lost = max(0, members[0] - members[1])
        row.wrong = int(not equal(found, goal))
    except Exception as error:
        row.wrong, row.told = 1, f"{kind}, {scene.verb.name}, {scene.place.name}: {error or traceback.format_exc()}"
    row.attempts = scene.attempts
    return row


def _complete(scene: Scene) -> None:
    """Repeat the command until it says that it is done."""
    code, told = 0, ""
    while not scene.done and scene.attempts < ATTEMPTS:
        process = scene.start()
        code, told = scene.end(process), process.text()
    if not scene.done:
        raise FaultError(f"it did not complete in {ATTEMPTS} attempts ({code}): {told[-400:]}")


def undisturbed(folder: Path) -> tuple[dict[str, dict[str, Any]], dict[str, float]]:
    """The result of each verb, which two runs must agree on, and how long it takes at least."""
    goals: dict[str, dict[str, Any]] = {}
    seconds: dict[str, float] = {}
    for verb in VERBS.values():
        for number in range(2):
            place = folder / f"undisturbed-{verb.name}-{number}"
            shutil.copytree(folder / "stage", place)
            began = time.perf_counter()
            process = Process(list(verb.words), place, folder / "undisturbed.log")
            if process.wait():
                raise SystemExit(f"{verb.name} fails without any fault: {process.text()}")
            seconds[verb.name] = min(seconds.get(verb.name, float("inf")), time.perf_counter() - began)
            found = result(verb, place)
            if not equal(found, goals.setdefault(verb.name, found)):
                raise SystemExit(f"two undisturbed runs of {verb.name} differ")
    return goals, seconds


def campaign(faults: int, seed: int, folder: Path, kinds: list[str]) -> Iterator[Row]:
    """Bring about so many faults, one after the other."""
    set_stage(folder / "stage", seed)
    goals, seconds = undisturbed(folder)
    dice = random.Random(seed)
    pairs = combinations(dice, kinds)
    for number in range(faults):
        kind, name = next(pairs)
        place = folder / f"fault-{number}"
        moment = dice.random() * (1.0 if kind == "kill -9 of a worker" else seconds[name])
        with _prepared(place, kind):
            shutil.copytree(folder / "stage", place, dirs_exist_ok=True)
            scene = Scene(place, folder / "stage", VERBS[name], moment, random.Random(dice.random()))
            row = one_fault(kind, scene, goals[name])
        if not row.told and not row.wrong:
            shutil.rmtree(place, ignore_errors=True)
        yield row


@contextlib.contextmanager
def _prepared(place: Path, kind: str) -> Iterator[None]:
    """A folder for a fault; a disk of its own where the kind needs one."""
    place.mkdir()
    if kind in MOUNTING:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "none", place], check=True)
    try:
        yield
    finally:
        if kind in MOUNTING:
            subprocess.run(["umount", place], check=True)


def page(rows: list[Row], left_out: list[str], seconds: float) -> str:
    """The table by kind, and the totals."""
    head = ("kind", "faults", "hit", "lost", "wrong", "attempts")
    lines = [head]
    for kind in [*KINDS, "all"]:
        own = [row for row in rows if kind in (row.kind, "all")]
        if own:
            sums = (len(own), *(sum(int(getattr(row, name)) for row in own) for name in ("hit", "lost", "wrong")))
            lines.append((kind, *map(str, sums), f"{sum(row.attempts for row in own) / len(own):.2f}"))
    parts = [table(lines)]
    parts += [f"left out, because this user may not mount a disk: {', '.join(left_out)}"] if left_out else []
    parts += [row.told for row in rows if row.told]
    verbs = ", ".join(f"{verb} {sum(row.verb == verb for row in rows)}" for verb in VERBS)
    lost, wrong = sum(row.lost for row in rows), sum(row.wrong for row in rows)
    verdict = "met" if not lost and not wrong else "MISSED"
    parts.append(f"faults by verb: {verbs}; {seconds:.0f} s")
    parts.append(f"{len(rows)} faults: {lost} networks lost, {wrong} wrong results; target 0 and 0: {verdict}")
    return "\n\n".join(parts)


def may_mount() -> bool:
    """Whether this process has a file system view of its own, in which it may mount."""
    return os.environ.get(_ALONE) == "yes"


def _go_alone() -> None:
    """Start again where mounts are seen by nobody else, if this user may."""
    unshare = shutil.which("unshare")
    trial = [str(unshare), "-m", "mount", "-t", "tmpfs", "none", tempfile.gettempdir()]
    if _ALONE in os.environ or unshare is None:
        return
    allowed = not subprocess.run(trial, capture_output=True).returncode
    os.environ[_ALONE] = "yes" if allowed else "no"
    if allowed:
        os.execv(unshare, [unshare, "-m", sys.executable, "-m", "benchmarks.faults", *sys.argv[1:]])


def main() -> int:
    """Run the campaign."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where to work; what went wrong is kept there")
    parser.add_argument("--only", choices=list(KINDS), action="append", help="only this kind; repeat it for several")
    options = parser.parse_args()
    _go_alone()
    kinds = [kind for kind in options.only or KINDS if may_mount() or kind not in MOUNTING]
    torch.set_num_threads(1)  # threads do not survive a fork
    for module in _EARLY:
        __import__(module)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    began, rows = time.perf_counter(), []
    with tempfile.TemporaryDirectory(prefix="faults-") as temporary, contextlib.suppress(KeyboardInterrupt):
        folder = options.folder or Path(temporary)
        for row in campaign(options.faults, options.seed, folder.resolve(), kinds):
            rows.append(row)
            print(f"\r{len(rows)} of {options.faults}", end="\r", file=sys.stderr, flush=True)
    left_out = [kind for kind in options.only or KINDS if kind not in kinds]
    print(page(rows, left_out, time.perf_counter() - began))
    return int(any(row.lost or row.wrong for row in rows))


if __name__ == "__main__":
    sys.exit(main())
