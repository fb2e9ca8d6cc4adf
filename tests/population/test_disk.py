"""Disks that are full, read-only or odd: nothing that was written is lost."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from onebasin.errors import DiskError
from onebasin.population.population import Population
from onebasin.state import TensorSpec
from onebasin.storage import atomic as durable

ROOT = Path(__file__).resolve().parents[2]
SPEC = {"w": TensorSpec((2, 3), torch.float32), "n": TensorSpec((), torch.int64)}


def state(value):
    return {"w": torch.full((2, 3), float(value)), "n": torch.tensor(value)}


def values(path):
    return Population.open(path).tensor("n").tolist()


def write(path, members, **options):
    with Population.writer(path, SPEC, **options) as writer:
        for value in members:
            writer.append(state(value), chain=value % 2, log_density=-float(value))


def shards(path):
    return sorted(path.glob("shard-*.safetensors"))


def run_python(code, *arguments, **options):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, **options)


def test_space_is_checked_before_writing(tmp_path, monkeypatch):
    write(tmp_path / "p", range(2))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    writer = Population.writer(tmp_path / "p", SPEC)
    writer.append(state(2))
    with pytest.raises(DiskError, match=r"needs 17 MB and 0 MB are free: free some space"):
        writer.flush()
    with pytest.raises(DiskError, match="free some space"):
        Population.open(tmp_path / "p").save(tmp_path / "q")
    monkeypatch.undo()
    writer.flush()  # nothing was lost: the same members are written when there is room
    assert values(tmp_path / "p") == [0, 1, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["p"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_refusals_of_the_disk_are_translated(tmp_path, monkeypatch, number):
    write(tmp_path / "p", range(2))
    before = sorted((tmp_path / "p").iterdir())

    def refuse(handle):
        raise OSError(number, os.strerror(number))

    writer = Population.writer(tmp_path / "p", SPEC)
    writer.append(state(2))
    monkeypatch.setattr(durable.os, "fsync", refuse)
    with pytest.raises(DiskError, match=r"cannot write .*shard-00001.*choose another place"):
        writer.flush()
    with pytest.raises(DiskError, match="choose another place"):
        Population.open(tmp_path / "p").save(tmp_path / "q")
    monkeypatch.undo()
    assert sorted((tmp_path / "p").iterdir()) == before
    assert [path.name for path in tmp_path.iterdir()] == ["p"]
    assert values(tmp_path / "p") == [0, 1]


def test_a_full_disk_loses_nothing_and_can_be_retried(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    with Population.writer(tmp_path / "p", SPEC, shard_members=2) as writer:
        writer.append(state(0))
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
        for value in (1, 2):  # member 1 fills the block and waits in memory; member 2 is refused
            with pytest.raises(DiskError):
                writer.append(state(value))
        monkeypatch.undo()
        writer.append(state(2))
    assert values(tmp_path / "p") == [0, 1, 2]


def test_a_really_full_disk(tmp_path):
    """A limit on file size is the one real refusal that every user can provoke."""
    code = (
        "import resource, signal, sys, torch\n"
        "from onebasin.errors import DiskError\n"
        "from onebasin.population import Population\n"
        "Population.from_stacked({'w': torch.zeros(2, 9)}).save(sys.argv[1] + '/small')\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "try:\n    Population.from_stacked({'w': torch.zeros(9, 99_999)}).save(sys.argv[1] + '/large')\n"
        "except DiskError as error:\n    print(error)\n"
    )
    process = run_python(code, tmp_path, stdout=subprocess.PIPE, text=True)
    output, _ = process.communicate(timeout=60)
    assert "not allowed there: choose another place" in output
    assert [path.name for path in tmp_path.iterdir()] == ["small"]
    assert len(Population.open(tmp_path / "small")) == 2


MOUNTED = """
import subprocess, sys, torch
from pathlib import Path
from onebasin.errors import DiskError
from onebasin.population import Population
from onebasin.storage import atomic as durable
folder = Path(sys.argv[1])

def state(value):
    return {"w": torch.full((250_000,), float(value)), "n": torch.tensor(value)}

def refused(action):
    try:
        action()
    except DiskError as error:
        return str(error)
    raise AssertionError("not refused")

def values():
    population = Population.open(folder / "p")
    population.stacked()
    assert population.check() == [], population.check()
    return population.tensor("n").tolist()
"""


def run_mounted(folder, code):
    """Run code where `folder` is a disk of 24 MB of its own, which nobody else sees and which ends with the process."""
    folder.mkdir()
    mount = f'mount -t tmpfs -o size=24m none "{folder}"'
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-m", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("this user may not mount a disk")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [unshare, "-m", "sh", "-c", f'{mount} && exec "$0" "$@"', sys.executable, "-c", MOUNTED + code, folder]
    done = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("margin", ["16 << 20", "-(1 << 40)"], ids=["noticed before", "noticed by the disk"])
def test_a_disk_that_is_full_and_then_freed(tmp_path, margin):
    run_mounted(
        tmp_path / "disk",
        f"""
durable._MARGIN = {margin}
ballast = folder / "ballast"
ballast.write_bytes(bytes(4 << 20))
writer = Population.writer(folder / "p", state(0), shard_members=1, name="a")
count = 0
while True:
    try:
        writer.append(state(count))
    except DiskError as error:
        said = str(error)
        break
    count += 1
assert "free some space" in said, said
assert 1 <= count < 24, count
assert values() == list(range(count))  # nothing that was written is damaged
said = refused(lambda: Population.open(folder / "p").save(folder / "q"))
assert "free some space" in said, said
assert sorted(path.name for path in folder.iterdir()) == ["ballast", "p"]
refused(lambda: writer.append(state(count + 1)))  # the one before it still waits
ballast.unlink()
writer.append(state(count + 1))
assert values() == list(range(count + 2))
""",
    )


def test_a_disk_that_becomes_read_only(tmp_path):
    run_mounted(
        tmp_path / "disk",
        """
def mounted(how):
    subprocess.run(["mount", "-o", f"remount,{how}", folder], check=True)

writer = Population.writer(folder / "p", state(0), shard_members=1, name="a")
writer.append(state(0))
mounted("ro")
said = refused(lambda: writer.append(state(1)))
assert "read-only: choose another place" in said, said
assert values() == [0]
for action in (
    lambda: Population.writer(folder / "new", state(0)),
    lambda: Population.open(folder / "p").save(folder / "q"),
    lambda: Population.open(folder / "p").save(folder / "q.safetensors"),
):
    said = refused(action)
    assert "read-only: choose another place" in said, said
mounted("rw")
writer.append(state(2))
assert values() == [0, 1, 2]
assert [path.name for path in folder.iterdir()] == ["p"]
""",
    )


def test_an_error_of_an_early_sync_is_not_lost(tmp_path, monkeypatch):
    calls = []

    def fail_once(handle):
        calls.append(handle)
        if len(calls) == 1:
            raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(durable.os, "fsync", fail_once)
    monkeypatch.setattr(durable, "_SYNC_SECONDS", 0)

    def slow(file):
        while not calls:
            file.write(b"x")

    with pytest.raises(DiskError, match="the disk is full"):
        durable.publish(tmp_path / "file", slow)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_may_not_be_written(tmp_path):
    folder = tmp_path / "locked"
    folder.mkdir()
    folder.chmod(0o500)
    if os.access(folder, os.W_OK):
        pytest.skip("this user may write everywhere")
    with pytest.raises(DiskError, match="permission is refused: choose another place"):
        Population.writer(folder / "p", SPEC)


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DiskError, match="choose another place"):
        Population.writer(tmp_path / "file", SPEC)
    with pytest.raises(DiskError, match="choose another place"):
        Population.writer(tmp_path / "file" / "p", SPEC)


def test_disks_without_hard_links(tmp_path, monkeypatch):
    def unsupported(source, target):
        raise OSError(errno.EOPNOTSUPP, "no links")

    monkeypatch.setattr(durable.os, "link", unsupported)
    write(tmp_path / "p", range(3), shard_members=1)
    assert values(tmp_path / "p") == [0, 1, 2]
    with pytest.raises(FileExistsError):
        durable.publish(shards(tmp_path / "p")[0], lambda file: None)


def test_a_failed_map_leaves_nothing(tmp_path):
    population = Population.from_states([state(k) for k in range(4)])

    def fail(block, start):
        if start == 2:
            raise ZeroDivisionError
        return block

    with pytest.raises(ZeroDivisionError):
        population.map(fail, path=tmp_path / "q", size=1)
    assert list(tmp_path.iterdir()) == []
