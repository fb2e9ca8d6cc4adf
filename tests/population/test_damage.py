"""Damaged, foreign and missing files: each is named, with a remedy."""

import json
import os
import random
import shutil
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onebasin import fit
from onebasin.errors import OnebasinError, SpecError, StorageError
from onebasin.population.check import inspect_file, inspect_population
from onebasin.population.population import Population
from onebasin.state import TensorSpec
from onebasin.storage import tensor_file
from onebasin.storage.integrity import fold, sentences
from onebasin.storage.tensor_file import read_header

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


def test_leftovers_are_ignored_and_reported(tmp_path):
    write(tmp_path / "p", range(2))
    (tmp_path / "p" / ".shard-00001-aa.safetensors.partial-12345678").write_bytes(b"half")
    population = Population.open(tmp_path / "p")
    assert len(population) == 2
    (problem,) = population.check()
    assert "partial-12345678 is unfinished" in problem
    assert "delete it" in problem


def damage(path, kind):
    content = path.read_bytes()
    if kind == "bit":
        content = content[:-20] + bytes([content[-20] ^ 1]) + content[-19:]
    path.write_bytes({"truncated": content[:-7], "empty": b"", "noise": b"\x07" * 300, "bit": content}[kind])


@pytest.mark.parametrize("kind", ["truncated", "empty", "noise"])
def test_a_damaged_shard_is_named_with_a_remedy(tmp_path, kind):
    write(tmp_path / "p", range(4), shard_members=2)
    victim = shards(tmp_path / "p")[1]
    before = Population.open(tmp_path / "p")
    damage(victim, kind)
    for path in (tmp_path / "p", victim):
        with pytest.raises(StorageError, match=rf"{victim.name}.*truncated or corrupt.*move it away"):
            Population.open(path)
    with pytest.raises(StorageError, match=rf"{victim.name} had .* bytes .* restore it"):
        before.stacked()
    (problem,) = sentences(inspect_population(tmp_path / "p"))
    assert victim.name in problem
    assert before.check() == [problem]
    victim.unlink()  # the remedy works
    assert values(tmp_path / "p") == [0, 1]
    with pytest.raises(StorageError, match="cannot be read now"):
        before.stacked()


def test_a_flipped_bit_is_found_by_check(tmp_path):
    write(tmp_path / "p", range(4), shard_members=2)
    victim = shards(tmp_path / "p")[0]
    damage(victim, "bit")
    (problem,) = sentences(inspect_population(tmp_path / "p"))
    assert victim.name in problem
    assert "does not match its checksum" in problem
    assert "restore the file" in problem
    (alone,) = sentences([inspect_file(victim)])
    assert alone == problem


def flip_weight(path, name="w"):
    """Change one bit of a weight, and nothing that is read when a population is opened."""
    content = bytearray(path.read_bytes())
    content[read_header(path).entries[name].offset] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "use",
    [
        lambda population: population.stacked(),
        lambda population: population.tensor("w"),
        lambda population: population.member(3),
        lambda population: list(population.blocks(1)),
        lambda population: population[[3, 0]].stacked(),
        lambda population: population.to(dtype=torch.float64),
        lambda population: population.read_columns("w", 0, 2, torch.empty(4, 2)),
        lambda population: fit(population, "diagonal"),
    ],
)
def test_a_flipped_bit_never_becomes_a_number(tmp_path, use):
    write(tmp_path / "p", range(4), shard_members=2)
    use(Population.open(tmp_path / "p"))
    victim = shards(tmp_path / "p")[1]
    flip_weight(victim)
    with pytest.raises(StorageError, match=rf"{victim.name}: tensor w does not match its checksum .*restore the file"):
        use(Population.open(tmp_path / "p"))


def test_only_what_is_read_is_compared(tmp_path):
    """A damaged shard does not keep us from the networks of the others, nor a damaged tensor from the others."""
    write(tmp_path / "p", range(4), shard_members=2)
    flip_weight(shards(tmp_path / "p")[1])
    population = Population.open(tmp_path / "p")
    assert population.member(1)["n"] == 1
    assert population.tensor("n").tolist() == [0, 1, 2, 3]


def test_a_tensor_is_compared_once_until_its_file_changes(tmp_path, monkeypatch):
    write(tmp_path / "p", range(2))
    (shard,) = shards(tmp_path / "p")
    compared = []
    honest = tensor_file.stored_checksum
    monkeypatch.setattr(tensor_file, "stored_checksum", lambda *where: compared.append(where) or honest(*where))
    for _ in range(3):
        Population.open(tmp_path / "p").stacked()
    assert len(compared) == len(read_header(shard).entries)
    content = shard.read_bytes()
    shard.unlink()
    shard.write_bytes(content)  # the same bytes in a new file: nobody has looked at them yet
    Population.open(tmp_path / "p").stacked()
    assert len(compared) == 2 * len(read_header(shard).entries)


def test_a_shard_of_another_population_is_refused(tmp_path):
    write(tmp_path / "p", range(2))
    with Population.writer(tmp_path / "q", {"v": torch.zeros(1)}) as writer:
        writer.append({"v": torch.zeros(1)})
    shutil.copy(shards(tmp_path / "q")[0], tmp_path / "p")
    with pytest.raises(SpecError, match=r"shard .*shard-00000.* is missing w, n and has unexpected v"):
        Population.open(tmp_path / "p")


def test_a_shard_that_is_none(tmp_path):
    from safetensors.torch import save_file

    write(tmp_path / "p", range(2))
    save_file({"w": torch.zeros(2, 2, 3)}, tmp_path / "p" / "shard-00009-aa.safetensors")
    with pytest.raises(StorageError, match=r"named like a shard.*move it away"):
        Population.open(tmp_path / "p")


def test_a_lost_manifest_can_be_written_again(tmp_path):
    write(tmp_path / "p", range(3))
    (tmp_path / "p" / "population.json").unlink()
    with pytest.raises(StorageError, match=r"no population\.json: call Population\.writer"):
        Population.open(tmp_path / "p")
    assert "no population.json" in sentences(inspect_population(tmp_path / "p"))[0]
    with Population.writer(tmp_path / "p", SPEC):
        pass
    assert values(tmp_path / "p") == [0, 1, 2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "delete it and call"),
        ("{}", "delete it and call"),
        ('{"format": "x", "version": 1, "spec": {}, "provenance": {}}', "delete it and call"),
        ('{"format": "onebasin-population", "version": 99, "spec": 0, "provenance": {}}', "upgrade onebasin"),
    ],
)
def test_a_bad_manifest_is_explained(tmp_path, text, message):
    write(tmp_path / "p", range(3))
    (tmp_path / "p" / "population.json").write_text(text)
    with pytest.raises(StorageError, match=message):
        Population.open(tmp_path / "p")


JUNK = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.sampled_from(["../..", "/etc/passwd", "a/b", "", "w"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["shape", "dtype", "w", "../x"]), inner)
    ),
    max_leaves=6,
)
WHOLE_MANIFEST = {
    "format": "onebasin-population",
    "version": 1,
    "spec": {"w": {"shape": [2, 3], "dtype": "float32"}, "n": {"shape": [], "dtype": "int64"}},
    "provenance": {},
    "identity": "",
}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(key=st.sampled_from([*WHOLE_MANIFEST, "shards", "path", "files"]), junk=JUNK)
def test_an_edited_manifest_leads_nowhere(tmp_path, key, junk):
    """Whatever stands in it, either the shards beside it are read or our own error is raised; no other file is."""
    folder = tmp_path / "p"
    if not folder.exists():
        write(folder, range(3))
    (folder / "population.json").write_text(json.dumps({**WHOLE_MANIFEST, key: junk}))
    opened = []
    audit.append(lambda event, arguments: opened.append(str(arguments[0])) if event == "open" else None)
    try:
        population = Population.open(folder)
        assert population.tensor("n").tolist() == [0, 1, 2]
        assert {source.path.parent for source in population._sources} == {folder}
    except OnebasinError:
        pass
    finally:
        audit.clear()
    assert all(Path(path).parent == folder for path in opened), opened


audit = []
sys.addaudithook(lambda event, arguments: [listen(event, arguments) for listen in audit] and None)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"version": 1e999}', "\x00", '{"format": ' + "9" * 5000 + "}"])
def test_a_hostile_manifest_is_refused_in_our_own_words(tmp_path, text):
    write(tmp_path / "p", range(3))
    (tmp_path / "p" / "population.json").write_text(text)
    with pytest.raises(StorageError, match=r"delete it and call|move it away"):
        Population.open(tmp_path / "p")
    (tmp_path / "p" / "population.json").unlink()
    (tmp_path / "p" / "population.json").mkdir()
    with pytest.raises(StorageError, match=r"delete it and call|move it away"):
        Population.open(tmp_path / "p")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_in_the_place_of_a_shard_is_not_waited_for(tmp_path):
    write(tmp_path / "p", range(3))
    os.mkfifo(tmp_path / "p" / "shard-00007-aa.safetensors")
    with pytest.raises(StorageError, match="is a folder or a device: move it away"):
        Population.open(tmp_path / "p")


def test_a_newer_shard_is_explained(tmp_path):
    write(tmp_path / "p", range(1))
    (shard,) = shards(tmp_path / "p")
    shard.write_bytes(shard.read_bytes().replace(b'"version":"1"', b'"version":"7"'))
    with pytest.raises(StorageError, match="shard version 7, expected 1: upgrade"):
        Population.open(tmp_path / "p")


def test_nothing_to_open(tmp_path):
    with pytest.raises(StorageError, match="does not exist: check the path"):
        Population.open(tmp_path / "absent")
    with pytest.raises(StorageError, match=r"expected population\.json or files .* found none: check the path"):
        Population.open(tmp_path)
    (tmp_path / ".population.json.partial-00000000").touch()
    with pytest.raises(StorageError, match=r"found an unfinished .* run again"):
        Population.open(tmp_path)
    (tmp_path / "net.txt").touch()
    with pytest.raises(StorageError, match="rename the file"):
        Population.open(tmp_path / "net.txt")


def test_a_writer_that_has_only_begun_is_an_empty_population(tmp_path):
    Population.writer(tmp_path / "p", SPEC)
    assert len(Population.open(tmp_path / "p")) == 0


@given(size=st.integers(0, 3 * 8 * 1021 + 5), where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_the_checksum_sees_every_single_bit(size, where, bit):
    content = bytearray(random.Random(size).randbytes(size))
    before = fold(memoryview(content), 0)
    if size:
        content[int(where * size)] ^= 1 << bit
        assert fold(memoryview(content), 0) != before


def test_the_checksum_sees_pages_that_swap_places():
    content = bytearray(random.Random(0).randbytes(1 << 20))
    before = fold(memoryview(content), 0)
    for page in (4096, 8192, 65536):
        swapped = bytearray(content)
        swapped[:page], swapped[5 * page : 6 * page] = content[5 * page : 6 * page], content[:page]
        assert fold(memoryview(swapped), 0) != before
