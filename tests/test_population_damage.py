"""Damaged, foreign and missing files: each is named, with a remedy."""

import random
import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onebasin.errors import SpecError, StorageError
from onebasin.population import Population, folder_problems
from onebasin.population.tensor_file import fold
from onebasin.state import TensorSpec

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
    (problem,) = folder_problems(tmp_path / "p")
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
    (problem,) = Population.open(tmp_path / "p").check()
    assert victim.name in problem
    assert "does not match its checksum" in problem
    assert "restore the file" in problem
    (alone,) = Population.open(victim).check()
    assert alone == problem


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
    assert "no population.json" in folder_problems(tmp_path / "p")[0]
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
