"""Import: any source becomes the same population, in bounded memory, also when it is interrupted."""

from __future__ import annotations

import hashlib
import io
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from onebasin.cli.main import main
from onebasin.errors import InputError, SpecError, StorageError, UnsafeFileError
from onebasin.population import open as opening
from onebasin.population.archive import in_order, write_archives
from onebasin.population.import_networks import UNFINISHED, import_networks
from onebasin.population.population import Population
from onebasin.population.shard import read_manifest, shard_paths
from onebasin.population.writer import PopulationWriter
from onebasin.state import State
from onebasin.storage import tar_files


def network(number: int) -> State:
    return {"a.weight": torch.full((2, 3), float(number), dtype=torch.float16), "steps": torch.tensor(number)}


def pack(path: Path, numbers: Sequence[int]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz" if path.suffix == ".tgz" else "w") as made:
        for number in numbers:
            content = save(network(number))
            member = tarfile.TarInfo(f"nets/net-{number}.safetensors")
            member.size = len(content)
            made.addfile(member, io.BytesIO(content))
    return path


def loose(folder: Path, numbers: Sequence[int], name: str = "net-{}.safetensors") -> Path:
    for number in numbers:
        path = folder / name.format(number)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(network(number), path)
    return folder


def numbers_in(path: Path) -> list[int]:
    population = Population.open(path)
    steps = population.tensor("steps")
    assert torch.equal(population.tensor("a.weight"), steps.half()[:, None, None].expand(-1, 2, 3))
    return steps.tolist()


def layout(folder: Path) -> list[tuple[str, dict[str, object]]]:
    """Names and tensors of the shards; their heads differ, as the identity of a folder is drawn anew each time."""
    found = []
    for path in shard_paths(folder):
        content = Population.open(path).stacked()
        found.append((path.name, {name: value.tolist() for name, value in content.items()}))
    return found


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onebasin.population.writer._BUFFERED", 4)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_order_becomes_natural_order_within_the_buffer(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 30))
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    order = data.draw(st.permutations(range(count)))
    start, buffer = data.draw(st.integers(0, count)), data.draw(st.integers(0, 60))
    passes = 0

    def read() -> Iterator[tuple[str, bytes]]:
        nonlocal passes
        passes += 1
        yield from ((str(number), bytes(sizes[number])) for number in order)

    names = [str(number) for number in range(start, count)]
    found = list(in_order(read, names, buffer))
    assert found == [(name, bytes(sizes[int(name)])) for name in names]
    # What fits into the buffer from the next one on is never dropped, so that each pass gets at least that far.
    needed, rest = 0, sizes[start:]
    while rest:
        needed += 1
        fitting = max(1, sum(total <= buffer for total in accumulate(rest)))
        rest = rest[fitting:]
    assert passes <= needed
    if list(order) == sorted(order):
        assert passes == min(1, len(names))


def test_what_vanishes_between_two_passes_is_noticed() -> None:
    with pytest.raises(StorageError, match="'b' was there before and is gone"):
        list(in_order(lambda: iter([("a", b"1")]), ["a", "b"], 10))


@pytest.mark.parametrize("suffix", [".tgz", ".tar"])
@pytest.mark.parametrize("kind", ["sorted", "shuffled", "several", "files", "pattern", "population"])
def test_every_source_gives_the_same_population(tmp_path: Path, small_shards: None, kind: str, suffix: str) -> None:
    numbers = [*range(12), 100]
    mixed = [numbers[index] for index in torch.randperm(13, generator=torch.Generator().manual_seed(1)).tolist()]
    source: Path | str
    if kind == "sorted":
        source = pack(tmp_path / f"a{suffix}", numbers)
    elif kind == "shuffled":
        source = pack(tmp_path / f"a{suffix}", mixed)
    elif kind == "several":
        pack(tmp_path / "many" / f"x-10{suffix}", numbers[5:])
        source = pack(tmp_path / "many" / f"x-9{suffix}", numbers[:5]).parent
    elif kind == "files":
        source = loose(tmp_path / "files", mixed)
    elif kind == "pattern":
        source = f"{loose(tmp_path / 'runs', mixed, 'run{}/best.safetensors')}/*/best.safetensors"
    else:
        source = tmp_path / "population"
        Population.open(loose(tmp_path / "files", numbers)).save(source)
    assert import_networks(source, tmp_path / "out") == tmp_path / "out"
    assert numbers_in(tmp_path / "out") == numbers
    assert [len(Population.open(path)) for path in shard_paths(tmp_path / "out")] == [4, 4, 4, 1]
    assert not (tmp_path / f"out{UNFINISHED}").exists()


def test_archives_out_of_order_are_read_again_with_a_small_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, read = pack(tmp_path / "a.tgz", list(reversed(range(9)))), list[Path]()

    def counted(path: Path, **options: float) -> Iterator[tuple[str, bytes]]:
        read.append(path)
        return tar_files(path, **options)

    monkeypatch.setattr("onebasin.population.archive.tar_files", counted)
    held = 3 * len(save(network(0)))
    monkeypatch.setattr(
        "onebasin.population.archive.ordered_networks.__kwdefaults__", {"spec": None, "dtype": None, "buffer": held}
    )
    import_networks(path, tmp_path / "out")
    assert numbers_in(tmp_path / "out") == list(range(9))
    assert len(read) == 2 + 3  # the first network, the names, and passes with 4, 4 and 1 networks


class _Killed(BaseException):
    """Nobody catches this."""


@settings(max_examples=12, deadline=None)
@given(
    stops=st.lists(st.integers(1, 23), min_size=1, max_size=3),
    kind=st.sampled_from(["tgz", "files", "two", "population"]),
)
def test_an_interrupted_import_ends_as_an_undisturbed_one(
    tmp_path_factory: pytest.TempPathFactory, stops: list[int], kind: str
) -> None:
    folder, numbers = tmp_path_factory.mktemp("import"), list(range(23))
    if kind == "tgz":
        source = pack(folder / "a.tgz", list(reversed(numbers)))
    elif kind == "two":
        pack(folder / "two" / "a-2.tgz", numbers[10:])
        source = pack(folder / "two" / "a-1.tgz", numbers[:10]).parent
    else:
        source = loose(folder / "files", numbers)
    if kind == "population":
        source = Population.open(source).save(folder / "population")
    seen: list[int] = []

    def watch(stop: int) -> object:
        def progress(done: int, members: int, doing: str) -> None:
            if doing == "importing":
                seen.append(done)
                if done == stop:
                    raise _Killed

        return progress

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("onebasin.population.writer._BUFFERED", 4)
        import_networks(source, folder / "whole")
        for stop in stops:
            seen.clear()
            kept = sum(len(Population.open(path)) for path in shard_paths_of(folder / f"out{UNFINISHED}"))
            if stop <= kept:
                continue
            with pytest.raises(_Killed):
                import_networks(source, folder / "out", progress=watch(stop))  # type: ignore[arg-type]
            assert seen == list(range(kept + 1, stop + 1))
            assert not (folder / "out").exists()
        import_networks(source, folder / "out")
    assert layout(folder / "out") == layout(folder / "whole")


def shard_paths_of(folder: Path) -> list[Path]:
    return shard_paths(folder) if folder.exists() else []


def test_kill_9_loses_only_what_was_in_memory(tmp_path: Path, small_shards: None) -> None:
    source = pack(tmp_path / "a.tgz", range(30))
    code = (
        "import sys, time\n"
        "from onebasin.population import import_networks, writer\n"
        "writer._BUFFERED = 4\n"
        "import_networks(sys.argv[1], sys.argv[2], progress=lambda done, members, doing: time.sleep(0.05))\n"
    )
    command = [sys.executable, "-c", code, str(source), str(tmp_path / "out")]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        deadline = time.monotonic() + 60
        while len(shard_paths_of(tmp_path / f"out{UNFINISHED}")) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    unfinished = tmp_path / f"out{UNFINISHED}"
    kept = {path: path.stat().st_mtime_ns for path in shard_paths(unfinished)}
    assert 2 <= len(kept) < 8
    (unfinished / ".shard-00009-import.safetensors.partial-0123abcd").write_bytes(b"half")
    import_networks(source, tmp_path / "out")
    assert numbers_in(tmp_path / "out") == list(range(30))
    assert {tmp_path / "out" / path.name: written for path, written in kept.items()}.items() <= {
        path: path.stat().st_mtime_ns for path in shard_paths(tmp_path / "out")
    }.items()
    assert Population.open(tmp_path / "out").check() == []


def test_provenance_says_what_was_read(tmp_path: Path) -> None:
    folder = tmp_path / "many"
    paths = [pack(folder / "x-0-1.tgz", [0, 1]), pack(folder / "x-2-2.tgz", [2])]
    import_networks(folder, tmp_path / "out")
    found = read_manifest(tmp_path / "out").provenance
    assert found == {
        "source": str(folder),
        "networks": 3,
        "dtypes": ["float16", "int64"],
        "archives": [
            {"name": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "networks": count}
            for path, count in zip(paths, (2, 1), strict=True)
        ],
    }
    import_networks(f"{loose(tmp_path / 'runs', [1, 2], '{}/best.safetensors')}/*/best.safetensors", tmp_path / "two")
    found = read_manifest(tmp_path / "two").provenance
    assert found["files"] == ["1/best.safetensors", "2/best.safetensors"]


def test_again_does_nothing_and_another_source_is_refused(tmp_path: Path) -> None:
    source, out = pack(tmp_path / "a.tgz", [0, 1]), tmp_path / "out"
    import_networks(source, out)
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    import_networks(os.path.relpath(source), out)
    assert before == {path: path.stat().st_mtime_ns for path in out.iterdir()}
    pack(source, [0, 2])
    with pytest.raises(InputError, match="do not come from"):
        import_networks(source, out)
    with pytest.raises(InputError, match="holds something else"):
        import_networks(source, loose(tmp_path / "files", [0]))


def test_a_source_that_changed_does_not_go_on(tmp_path: Path, small_shards: None) -> None:
    source, out = loose(tmp_path / "files", range(9)), tmp_path / "out"

    def stop(done: int, members: int, doing: str) -> None:
        if doing == "importing" and done == 8:
            raise _Killed

    with pytest.raises(_Killed):
        import_networks(source, out, progress=stop)
    loose(source, [10])
    with pytest.raises(InputError, match=f"out{UNFINISHED} holds networks that do not come from"):
        import_networks(source, out)
    (source / "net-10.safetensors").unlink()
    shard_paths(tmp_path / f"out{UNFINISHED}")[0].unlink()
    with pytest.raises(StorageError):
        import_networks(source, out)
    assert not out.exists()


def test_two_imports_at_once_do_not_mix(tmp_path: Path, small_shards: None) -> None:
    source = pack(tmp_path / "a.tgz", range(9))
    numbers: list[int] = []

    def other(done: int, members: int, doing: str) -> None:
        if doing == "importing" and done == 2 and not numbers:
            numbers.append(done)
            import_networks(source, tmp_path / "out")  # overtakes, and finishes

    with pytest.raises(StorageError, match="another import"):
        import_networks(source, tmp_path / "out", progress=other)
    assert numbers_in(tmp_path / "out") == list(range(9))
    assert [len(Population.open(path)) for path in shard_paths(tmp_path / "out")] == [4, 4, 1]


def test_chains_and_densities_come_along(tmp_path: Path) -> None:
    states = [network(number) for number in range(5)]
    Population.from_states(states, chain=[0, 0, 1, 1, 1], log_density=[0.5, 1, 2, 3, 4]).save(tmp_path / "population")
    import_networks(tmp_path / "population", tmp_path / "out")
    found = Population.open(tmp_path / "out")
    assert found.chain is not None and found.chain.tolist() == [0, 0, 1, 1, 1]
    assert found.log_density is not None and found.log_density.tolist() == [0.5, 1, 2, 3, 4]


def test_a_spec_strips_a_prefix_and_refuses_others(tmp_path: Path) -> None:
    wrapped = {f"model.{name}": value for name, value in network(3).items()}
    folder = tmp_path / "files"
    folder.mkdir()
    save_file(wrapped, folder / "0.safetensors")
    wide = {"a.weight": torch.zeros(2, 3), "steps": torch.tensor(0)}  # of another precision, which may differ
    spec = Population.from_states([wide]).spec
    import_networks(folder, tmp_path / "out", spec=spec)
    assert numbers_in(tmp_path / "out") == [3]
    with pytest.raises(SpecError, match=r"0\.safetensors"):
        import_networks(folder, tmp_path / "other", spec=Population.from_states([{"b": torch.zeros(1)}]).spec)


@pytest.mark.parametrize("kind", ["files", "archive"])
def test_networks_that_differ_are_named(tmp_path: Path, kind: str) -> None:
    folder = loose(tmp_path / "files", [0, 1])
    save_file({"a.weight": torch.zeros(2, 4), "steps": torch.tensor(0)}, folder / "net-2.safetensors")
    source = folder
    if kind == "archive":
        source = tmp_path / "a.tgz"
        with tarfile.open(source, "w:gz") as made:
            for path in sorted(folder.iterdir()):
                made.add(path, path.name)
    with pytest.raises(SpecError, match=r"net-2\.safetensors"):
        import_networks(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["../0.safetensors", "/etc/0.safetensors", "0.pt", "x" * 2000 + ".safetensors"])
def test_what_opening_refuses_importing_refuses(tmp_path: Path, name: str) -> None:
    content = save(network(0))
    with tarfile.open(tmp_path / "a.tgz", "w:gz") as made:
        member = tarfile.TarInfo(name)
        member.size = len(content)
        made.addfile(member, io.BytesIO(content))
    for door in (Population.open, lambda path: import_networks(path, tmp_path / "out")):
        with pytest.raises(UnsafeFileError):
            door(tmp_path / "a.tgz")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tgz"]


def test_a_name_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"net-1\.safetensors' twice"):
        import_networks(pack(tmp_path / "a.tgz", [0, 1, 1]), tmp_path / "out")


def test_large_archives_are_not_opened_but_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = pack(tmp_path / "many" / "a-1.tgz", range(100))
    pack(tmp_path / "many" / "a-2.tgz", range(100, 200))
    size = 100 * (12 + 8)  # bytes of the tensors in each
    assert one.stat().st_size < 2 * size
    for limit, fine in ((2 * size, True), (2 * size - 1, False)):
        monkeypatch.setattr(opening, "IN_MEMORY", limit)
        assert len(Population.open(one)) == 100
        if fine:
            assert len(Population.open(one.parent)) == 200
        else:
            with pytest.raises(InputError, match=r"onebasin import '.*a-2.tgz|onebasin import '.*many"):
                Population.open(one.parent)
    monkeypatch.setattr(opening, "IN_MEMORY", size - 1)
    with pytest.raises(InputError, match=f"onebasin import '{one}' -o FOLDER"):
        Population.open(one)
    import_networks(one.parent, tmp_path / "out")
    assert numbers_in(tmp_path / "out") == list(range(200))


def test_memory_does_not_grow_with_the_archive(tmp_path: Path) -> None:
    members, weights = 60, 2_500_000  # 5 MB each, 300 MB in all
    half = torch.zeros(weights, dtype=torch.float16)
    with tarfile.open(tmp_path / "a.tar", "w") as made:
        for number in range(members):
            content = save({"w": half + number})
            member = tarfile.TarInfo(f"{number}.safetensors")
            member.size = len(content)
            made.addfile(member, io.BytesIO(content))
    code = (
        "import resource, sys\n"
        "from onebasin.population import import_networks\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024\n"
        "before = peak()\n"
        "import_networks(sys.argv[1], sys.argv[2])\n"
        "print(peak() - before)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "a.tar"), str(tmp_path / "out")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=100)
    # A shard of 64 MB, and a network twice as bytes and as tensors.
    assert float(done.stdout) < 64 + 4 * 5 + 16
    found = Population.open(tmp_path / "out")
    assert [float(found.member(number)["w"][0]) for number in range(members)] == list(map(float, range(members)))


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_archives(Population.from_states([network(0), network(1)]), ".", "mnist-optunet")
    assert main(["import", "models/mnist-optunet", "-o", "out/"]) == 0
    out = capsys.readouterr().out
    assert "Population of 2 networks" in out
    assert "onebasin align out -o aligned/ --model onebasin.examples:optunet --input 2x1x28x28" in out
    assert numbers_in(Path("out")) == [0, 1]
    assert main(["import", "models/mnist-optunet", "-o", "out"]) == 0
    assert main(["import", "nothing/*.tgz", "-o", "other"]) == StorageError.exit_code
    assert main(["import", "models/mnist-optunet", "-o", "o", "--model", "onebasin.examples:optunet"]) == (
        SpecError.exit_code
    )
    assert not Path("o").exists()


def test_ctrl_c_says_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = pack(tmp_path / "a.tgz", range(9))
    append = PopulationWriter.append

    def interrupted(self: PopulationWriter, state: State, **facts: object) -> None:
        append(self, state, **facts)  # type: ignore[arg-type]
        if int(state["steps"]) == 6:
            raise KeyboardInterrupt

    monkeypatch.setattr("onebasin.population.writer._BUFFERED", 4)
    monkeypatch.setattr(PopulationWriter, "append", interrupted)
    assert main(["import", str(source), "-o", str(tmp_path / "out")]) == 130
    assert f"out{UNFINISHED} keeps what was reached; give the same command again" in capsys.readouterr().err
    monkeypatch.setattr(PopulationWriter, "append", append)
    assert main(["import", str(source), "-o", str(tmp_path / "out")]) == 0
    assert "going on with the import" in capsys.readouterr().err
    assert numbers_in(tmp_path / "out") == list(range(9))
