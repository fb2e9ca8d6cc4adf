"""What can go wrong, and how to bring it about on purpose."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.fault_stage import LONGEST, Process, Verb, with_workers, workers_of
from onebasin.errors import DiskError, InputError
from onebasin.population.shard import shard_key, shard_paths

REFUSED = (3, 4, 5, 7, 10)  # exit codes of our own errors


class FaultError(Exception):
    """Something that must never happen did."""


@dataclass
class Scene:
    """One fault: a copy of the stage, a command, and a moment.

    Attributes:
        place: the copy.
        stage: what it was copied from.
        verb: the command.
        moment: seconds after its start.
        dice: of everything random.
        hit: whether the command was really disturbed.
        done: whether it said that it was done.
        attempts: how often the command was started.
    """

    place: Path
    stage: Path
    verb: Verb
    moment: float
    dice: random.Random
    hit: bool = False
    done: bool = False
    attempts: int = 0
    logs: list[Path] = field(default_factory=list)

    @property
    def output(self) -> Path:
        """What the command writes."""
        return self.place / self.verb.output

    def words(self) -> list[str]:
        """The command as a user would give it now."""
        return [*self.verb.words, *(self.verb.again if self.attempts else ())]

    def log(self) -> Path:
        """A new file for what a process prints, outside of the place."""
        self.logs.append(self.place.with_name(f"{self.place.name}-{len(self.logs)}.log"))
        return self.logs[-1]

    def start(self, prepare: Callable[[], None] | None = None) -> Process:
        """Start the command."""
        words = self.words()
        self.attempts += 1
        return Process(words, self.place, self.log(), prepare)

    def end(self, process: Process) -> int:
        """Wait for the command."""
        code = process.wait()
        self.done |= not code
        return code

    def check(self, path: Path) -> tuple[int, dict[str, str]]:
        """What `onebasin check` says: exit code, and the damaged files with a sentence each."""
        process = Process(["check", str(path), "--json"], self.place, self.log())
        code = process.wait()
        if code not in (0, 5):
            raise FaultError(f"check gave {code}: {process.text()}")
        found = json.loads(process.text())["findings"] if process.text().startswith("{") else []
        return code, {Path(one["path"]).name: one["sentence"] for one in found if one["state"] == "damaged"}


def killed(scene: Scene) -> None:
    """Kill -9 of the process."""
    process = scene.start()
    time.sleep(scene.moment)
    process.signal(signal.SIGKILL)
    scene.hit = scene.end(process) == -signal.SIGKILL


def interrupted(scene: Scene) -> None:
    """Ctrl-C."""
    process = scene.start()
    time.sleep(scene.moment)
    process.signal(signal.SIGINT)
    scene.hit = scene.end(process) == 130


def worker_killed(scene: Scene) -> None:
    """Kill -9 of one of two workers."""
    scene.attempts += 1
    process = with_workers(list(scene.verb.words), scene.place, scene.log())
    try:
        end = time.monotonic() + LONGEST
        while not (found := workers_of(process.pid)) and process.poll() is None and time.monotonic() < end:
            time.sleep(0.005)
        time.sleep(scene.moment)
        found = workers_of(process.pid)
        if found and process.poll() is None:
            os.kill(scene.dice.choice(found), signal.SIGKILL)
            scene.hit = True
        scene.done = not process.wait(LONGEST)
    finally:
        process.kill()
        process.wait()


def disk_full(scene: Scene) -> None:
    """A disk that somebody else fills while the command is at work, and frees later."""
    process = scene.start()
    time.sleep(scene.moment)
    ballast = scene.place / "ballast"
    left = scene.dice.choice([0, 0, 8 << 20])  # nothing, or less than we want to leave to others
    free = shutil.disk_usage(scene.place).free
    with ballast.open("wb") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, max(1, free - left))
        except OSError:
            os.ftruncate(file.fileno(), 0)
    scene.hit = scene.end(process) == DiskError.exit_code
    ballast.unlink()


def read_only(scene: Scene) -> None:
    """A disk that becomes read-only while the command is at work, and is repaired later."""
    process = scene.start()
    time.sleep(scene.moment)
    for _ in range(200):  # refused while a file is open for writing
        if not subprocess.run(["mount", "-o", "remount,ro", scene.place], capture_output=True).returncode:
            break
        time.sleep(0.005)
    scene.hit = scene.end(process) == DiskError.exit_code
    subprocess.run(["mount", "-o", "remount,rw", scene.place], check=True, capture_output=True)


def truncate(path: Path, scene: Scene) -> None:
    """Cut a file off."""
    os.truncate(path, scene.dice.randrange(1, path.stat().st_size))


def flip(path: Path, scene: Scene) -> None:
    """Change one bit of the weights."""
    content = bytearray(path.read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    content[scene.dice.randrange(header, len(content))] ^= 1 << scene.dice.randrange(8)
    path.write_bytes(content)


def empty(path: Path, scene: Scene) -> None:
    """Leave nothing of a file but its name."""
    os.truncate(path, 0)


def replace(path: Path, scene: Scene) -> None:
    """Put a shard of other networks in its place: the same spec, the same name."""
    other = scene.stage / ("other-chain" if scene.verb.name == "sample" else "other")
    same = other / path.name
    shutil.copy(same if same.exists() else shard_paths(other)[0], path)


def damaged(harm: Callable[[Path, Scene], None]) -> Callable[[Scene], None]:
    """Damage to a shard that the command reads: it must refuse and name it, and go on when the file is back."""

    def fault(scene: Scene) -> None:
        if scene.verb.name == "sample":
            _damaged_draws(scene, harm)
            return
        victim = scene.dice.choice(shard_paths(scene.place / "input"))
        whole = victim.read_bytes()
        harm(victim, scene)
        process = scene.start()
        code = scene.end(process)
        if code not in REFUSED or victim.name not in process.text():
            raise FaultError(f"{victim.name} was not refused by name ({code}): {process.text()[-300:]}")
        scene.hit = True
        _must_name(scene, scene.place / "input", victim)
        victim.unlink()
        victim.write_bytes(whole)

    return fault


def _must_name(scene: Scene, folder: Path, victim: Path) -> None:
    code, named = scene.check(folder)
    if code != 5 or set(named) != {victim.name}:
        raise FaultError(f"check gave {code} and named {named}, expected {victim.name}")


def _damaged_draws(scene: Scene, harm: Callable[[Path, Scene], None]) -> None:
    """For `sample`: a shard of a killed run is damaged before it is resumed, and the remedy of `check` is followed."""
    killed(scene)
    found = shard_paths(scene.output) if scene.output.exists() else []
    if not scene.hit or not found:
        scene.hit = False
        return
    victim = scene.dice.choice(found)
    harm(victim, scene)
    _must_name(scene, scene.output, victim)
    sequence, writer = shard_key(victim) or (0, "")
    for path in found:
        number, name = shard_key(path) or (0, "")
        if name == writer and number >= sequence:
            path.unlink()


def second_process(scene: Scene) -> None:
    """The same command twice at once."""
    first = scene.start()
    time.sleep(min(scene.moment, 0.2))
    second = Process(scene.words(), scene.place, scene.log())
    codes = [scene.end(first), scene.end(second)]
    if any(code not in (0, *REFUSED) for code in codes):
        raise FaultError(f"two at once gave {codes}: {[path.read_text()[-300:] for path in scene.logs]}")
    scene.hit = any(codes)


def clock_jumps(scene: Scene) -> None:
    """A clock that jumps by years at every look, and input files from the future and the past."""
    for path in shard_paths(scene.place / "input"):
        moment = scene.dice.uniform(0, 4e9)
        os.utime(path, (moment, moment))

    def prepare() -> None:
        true = time.time
        time.time = lambda: true() + scene.dice.uniform(-1e9, 1e9)
        time.time_ns = lambda: int(time.time() * 1e9)

    if scene.end(scene.start(prepare)):
        raise FaultError(f"a jumping clock stopped it: {scene.logs[-1].read_text()[-300:]}")
    scene.hit = True


def stale(scene: Scene) -> None:
    """What another run left in the place of the output: refused, and named, until the user takes it away."""
    left = scene.output
    if scene.verb.name == "sample":
        shutil.copytree(scene.stage / "other-chain", left)
    elif scene.verb.name == "align":
        left = scene.place / "aligned.journal"
        shutil.copy(scene.stage / "stale.journal", left)
    else:
        shutil.copy(next((scene.stage / "other").glob("*.safetensors")), left)
    before = left.read_bytes() if left.is_file() else b""
    process = scene.start()
    code = scene.end(process)
    if code != InputError.exit_code or left.name not in process.text():
        raise FaultError(f"{left.name} was not refused by name ({code}): {process.text()[-300:]}")
    if left.is_file() and left.read_bytes() != before:
        raise FaultError(f"{left.name} was changed")
    scene.hit = True
    shutil.rmtree(left) if left.is_dir() else left.unlink()


KINDS: dict[str, Callable[[Scene], None]] = {
    "kill -9": killed,
    "kill -9 of a worker": worker_killed,
    "Ctrl-C": interrupted,
    "full disk": disk_full,
    "read-only disk": read_only,
    "truncated shard": damaged(truncate),
    "flipped bit": damaged(flip),
    "empty shard": damaged(empty),
    "foreign shard": damaged(replace),
    "second process": second_process,
    "clock jumps": clock_jumps,
    "stale output": stale,
}
MOUNTING = ("full disk", "read-only disk")  # kinds that need a disk of their own
