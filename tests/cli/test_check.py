"""`onebasin check`: whatever lies on the disk is read, named if it is not whole, and never changed."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from onebasin import Population, fit, load_posterior
from onebasin.errors import InputError, StorageError
from onebasin.inference.journal import info_path
from onebasin.population.archive import write_archives
from onebasin.population.shard import shard_name
from tests.judging import sample

SPEC = {"w": torch.zeros(2, 3), "n": torch.tensor(0)}


def state(value):
    return {"w": torch.full((2, 3), float(value)), "n": torch.tensor(value)}


def write(path, members, **options):
    with Population.writer(path, SPEC, **options) as writer:
        for value in members:
            writer.append(state(value), chain=value % 2, log_density=-float(value))


def flip(path, position=-20):
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def content_of(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def looked(run, path, *options):
    code, text, _ = run("check", path, "--json", *options)
    return code, json.loads(text)


def damaged(told):
    return {Path(one["path"]).name: one["sentence"] for one in told["findings"] if one["state"] == "damaged"}


def test_a_whole_population(run, tmp_path):
    write(tmp_path / "p", range(5), shard_members=2, name="a")
    code, text, _ = run("check", tmp_path / "p")
    assert code == 0
    assert "3 shards with 5 networks" in text
    assert text.endswith("5 networks whole; nothing is damaged\n")
    code, told = looked(run, tmp_path / "p")
    assert (code, told["whole"], told["networks"], told["damaged"]) == (0, True, 5, 0)
    assert len(told["findings"]) == 4


@pytest.mark.parametrize(
    ("harm", "says", "lost"),
    [
        (flip, "does not match its checksum", 2),
        (lambda path: path.write_bytes(path.read_bytes()[:-7]), "truncated or corrupt", 2),
        (lambda path: path.write_bytes(b""), r"0 bytes\) is truncated", None),
        (lambda path: path.write_bytes(b"\x07" * 300), "truncated or corrupt", None),
        (lambda path: path.unlink(), "is missing, though later ones are there", None),
    ],
)
def test_every_damage_is_named_and_the_rest_can_be_saved(run, tmp_path, harm, says, lost):
    write(tmp_path / "p", range(6), shard_members=2, name="a", provenance={"seed": 1})
    victim = tmp_path / "p" / shard_name(1, "a")
    harm(victim)
    before = content_of(tmp_path / "p")
    code, told = looked(run, tmp_path / "p", "--save", tmp_path / "saved")
    assert code == StorageError.exit_code
    assert (told["networks"], told["lost"], told["files"]) == (4, lost or 0, 1)
    assert told["unknown"] == (lost is None)
    ((name, sentence),) = damaged(told).items()
    assert name == victim.name
    assert re.search(says, sentence)
    assert content_of(tmp_path / "p") == before
    saved = Population.open(tmp_path / "saved")
    assert saved.tensor("n").tolist() == [0, 1, 4, 5]
    assert saved.chain.tolist() == [0, 1, 0, 1]
    assert saved.log_density.tolist() == [0, -1, -4, -5]
    assert saved.provenance["seed"] == 1
    assert saved.provenance["without"] == [victim.name]
    assert run("check", tmp_path / "saved")[0] == 0


def test_a_flipped_bit_anywhere_in_a_shard_is_seen(run, tmp_path):
    """Header and weights: every byte counts, but for the spaces that fill the header up and the name of its seal."""
    write(tmp_path / "p", range(2), name="a")
    shard = tmp_path / "p" / shard_name(0, "a")
    whole = shard.read_bytes()
    header = whole[: 8 + int.from_bytes(whole[:8], "little")]
    idle = {*range(len(header.rstrip()), len(header)), *range(at := header.index(b'"seal"') + 1, at + 4)}
    unseen = set()
    for position in range(len(whole)):
        content = bytearray(whole)
        content[position] ^= 1 << position % 8
        shard.write_bytes(content)
        if run("check", tmp_path / "p")[0] != StorageError.exit_code:
            unseen.add(position)
    assert unseen <= idle


def test_a_copy_and_a_stranger_are_named_and_refused(run, tmp_path):
    write(tmp_path / "p", range(4), shard_members=2, name="a")
    write(tmp_path / "q", range(10, 14), shard_members=2, name="a")
    first, second = (tmp_path / "p" / shard_name(number, "a") for number in (0, 1))
    copy = tmp_path / "p" / shard_name(0, "b")
    shutil.copy(first, copy)
    assert "which is here too, so it is a copy" in damaged(looked(run, tmp_path / "p")[1])[copy.name]
    with pytest.raises(StorageError, match=r"is a copy or stands for another file.*move this one away"):
        Population.open(tmp_path / "p")
    copy.unlink()
    shutil.copy(tmp_path / "q" / second.name, second)  # the same spec, the same name, other networks
    assert "another population" in damaged(looked(run, tmp_path / "p")[1])[second.name]
    with pytest.raises(StorageError, match="was written into another population: put back"):
        Population.open(tmp_path / "p")
    second.unlink()
    stranger = Population.open(tmp_path / "q" / second.name)
    with Population.writer(tmp_path / "p", SPEC, name="b") as writer:  # the remedy works
        writer.extend(stranger)
    assert sorted(Population.open(tmp_path / "p").tensor("n").tolist()) == [0, 1, 12, 13]
    assert run("check", tmp_path / "p")[0] == 0


def test_a_lost_manifest_can_be_written_again_for_the_same_shards(run, tmp_path):
    write(tmp_path / "p", range(4), shard_members=2, name="a")
    (tmp_path / "p" / "population.json").unlink()
    code, told = looked(run, tmp_path / "p", "--save", tmp_path / "saved")
    assert (code, told["networks"], told["lost"], told["files"]) == (5, 4, 0, 0)
    assert "no population.json" in damaged(told)["population.json"]
    assert Population.open(tmp_path / "saved").tensor("n").tolist() == [0, 1, 2, 3]
    write(tmp_path / "p", [4], name="a")
    assert Population.open(tmp_path / "p").tensor("n").tolist() == [0, 1, 2, 3, 4]
    assert run("check", tmp_path / "p")[0] == 0


def test_leftovers_are_no_damage(run, tmp_path):
    write(tmp_path / "p", range(2), name="a")
    (tmp_path / "p" / ".shard-00001-a.safetensors.partial-12345678").write_bytes(b"half")
    (tmp_path / ".p.partial-12345678").mkdir()
    (tmp_path / ".other.partial-12345678").mkdir()
    code, text, _ = run("check", tmp_path / "p")
    assert code == 0
    assert text.count("is unfinished") == 2
    assert ".other" not in text
    assert "2 networks whole; nothing is damaged" in text


@pytest.fixture
def drawn(tmp_path):
    x = torch.linspace(-1, 1, 20)[:, None]
    options = {"chains": 2, "noise": 0.1, "draws": 6, "warmup": 4, "leapfrog": 3, "epochs": 1, "chunk": 1, "seed": 3}

    def make(**more):
        return sample(nn.Linear(1, 1), (x, 2 * x), "hmc", path=tmp_path / "run", **{**options, **more})

    make()
    return make


def test_a_run_is_looked_at_with_its_checkpoints(run, tmp_path, drawn):
    folder = tmp_path / "run"
    code, told = looked(run, folder)
    assert (code, told["networks"]) == (0, 12)
    assert {"definition", "checkpoint", "diagnostics", "shard", "manifest"} == {one["kind"] for one in told["findings"]}
    state = folder / "run" / "state-u000001.safetensors"
    whole = state.read_bytes()
    flip(state, -3)
    code, told = looked(run, folder)
    assert code == 5
    assert "the run makes these draws again when it goes on" in damaged(told)[state.name]
    with pytest.raises(StorageError, match="does not match its checksum"):
        drawn(draws=7)
    state.write_bytes(whole)
    definition = folder / "run" / "definition.json"
    definition.write_text("{")
    assert "is damaged" in damaged(looked(run, folder)[1])[definition.name]


def test_a_checkpoint_whose_counters_changed_is_refused(tmp_path, drawn):
    """A wrong number of draws in the header would silently give other draws."""
    state = tmp_path / "run" / "run" / "state-u000001.safetensors"
    content = state.read_bytes()
    assert b'"draw":"6"' in content
    state.write_bytes(content.replace(b'"draw":"6"', b'"draw":"4"'))
    with pytest.raises(StorageError, match=r"header of .* does not match its checksum"):
        drawn(draws=7)


@pytest.mark.parametrize("lost", ["shard", "checkpoint"])
def test_lost_draws_of_a_run_are_made_again(run, tmp_path, drawn, lost):
    folder = tmp_path / "run"
    before = {name: value.clone() for name, value in Population.open(folder).stacked().items()}
    shard = folder / shard_name(0, "u000001")
    if lost == "shard":
        flip(shard)
        code, text, _ = run("check", folder)
        assert code == 5
        assert "can be made again bit for bit: move each damaged shard away" in text
        shard.rename(tmp_path / "away")
    else:
        (folder / "run" / "state-u000001.safetensors").unlink()
    drawn()
    after = Population.open(folder).stacked()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert run("check", folder)[0] == 0


def test_a_gap_in_a_run_is_explained(tmp_path, drawn):
    folder = tmp_path / "run"
    drawn(draws=8)  # a second shard for each chain
    first, second = (folder / shard_name(number, "u000000") for number in (0, 1))
    whole = {name: value.clone() for name, value in Population.open(folder).stacked().items()}
    first.rename(tmp_path / "away")
    with pytest.raises(
        StorageError, match=rf"{first.name} is missing .* move {second.name} away too and call sample again"
    ):
        drawn(draws=8)
    second.rename(tmp_path / "away too")
    stale = info_path(folder, "u000000", 1)
    assert stale.exists()
    again = drawn(draws=8)
    one, other = (population[population.chain.argsort(stable=True)] for population in (again, Population.open(folder)))
    assert len(again) == 16
    order = torch.tensor([0] * 6 + [1] * 6 + [0] * 2 + [1] * 2).argsort(stable=True)
    assert all(torch.equal(whole[name][order], one.tensor(name)) for name in whole)
    assert torch.equal(one.tensor("weight"), other.tensor("weight"))
    assert len(again.provenance["diagnostics"]["accepted"]) == 2  # of draws that are there, not of lost ones


def test_posteriors_and_journals(run, tmp_path):
    population = Population.from_stacked({"w": torch.randn(8, 5, generator=torch.Generator().manual_seed(0))})
    path = fit(population, "diagonal").save(tmp_path / "q.safetensors")
    assert looked(run, path)[0] == 0
    flip(path, -2)
    assert "does not match its checksum" in damaged(looked(run, path)[1])[path.name]
    with pytest.raises(StorageError, match="does not match its checksum"):
        load_posterior(path)


def test_files_of_others(run, tmp_path):
    folder = tmp_path / "nets"
    folder.mkdir()
    save_file(state(0), folder / "a.safetensors")
    torch.save(state(1), folder / "b.pt")
    write_archives(Population.from_stacked({"w": torch.zeros(3, 2)}), tmp_path / "packed", "x-y")
    code, told = looked(run, folder)
    assert (code, told["networks"]) == (0, 2)
    code, told = looked(run, tmp_path)  # a folder of several things
    assert (code, told["networks"]) == (0, 5)
    content = (folder / "b.pt").read_bytes()
    place = content.index(torch.full((6,), 1.0).numpy().tobytes())
    flip(folder / "b.pt", place)
    assert "does not match its checksum" in damaged(looked(run, folder)[1])["b.pt"]
    (folder / "c.pt").write_bytes(content[:-30])
    (folder / "d.safetensors").write_bytes(b"")
    code, told = looked(run, folder, "--save", tmp_path / "saved")
    assert (code, set(damaged(told))) == (5, {"b.pt", "c.pt", "d.safetensors"})
    assert Population.open(tmp_path / "saved").tensor("n").tolist() == [0]


def test_what_cannot_be_checked_or_saved_is_explained(run, tmp_path):
    assert run("check", tmp_path / "absent") == (5, "", f"error: {tmp_path}/absent does not exist: check the path\n")
    (tmp_path / "empty").mkdir()
    assert "holds nothing that onebasin writes" in run("check", tmp_path / "empty")[2]
    (tmp_path / "notes.txt").touch()
    assert "nothing that onebasin writes" in run("check", tmp_path / "notes.txt")[2]
    write(tmp_path / "p", range(2), name="a")
    write(tmp_path / "q", range(2), name="a")
    code, _, said = run("check", tmp_path, "--save", tmp_path / "new")
    assert code == InputError.exit_code
    assert "the folder of one population" in said
    assert "lies inside" in run("check", tmp_path / "p", "--save", tmp_path / "p" / "new")[2]
    flip(tmp_path / "p" / shard_name(0, "a"))
    assert "nothing can be saved" in run("check", tmp_path / "p")[1]
    assert run("check", tmp_path / "p", "--save", tmp_path / "new")[0] == StorageError.exit_code
    assert "exists and is not empty" in run("check", tmp_path / "q", "--save", tmp_path / "p")[2]
