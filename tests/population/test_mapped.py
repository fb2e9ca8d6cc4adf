"""What is read from disk: plain safetensors, mapped, never changed, easy to send."""

import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from onebasin.population.population import Population


def networks(members=10, **facts):
    tensors = {"w": torch.arange(members * 6.0).view(members, 3, 2), "n": torch.arange(members)}
    return Population.from_stacked(tensors, **facts)


def test_shards_are_plain_safetensors(tmp_path):
    networks(chain=range(10)).save(tmp_path / "p")
    (shard,) = (tmp_path / "p").glob("*.safetensors")
    content = load_file(shard)
    assert torch.equal(content["w"], networks().tensor("w"))
    assert content["onebasin.chain"].tolist() == list(range(10))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p"]


def test_a_slice_reads_only_its_own_pages(tmp_path):
    """Two members out of a shard of 64 MB must not bring all of it into our memory."""
    members, width = 64, 1 << 18
    Population.from_stacked({"w": torch.ones(members, width)}).save(tmp_path / "p")
    before = resident()
    part = Population.open(tmp_path / "p")[2:4].stacked()["w"]
    assert float(part.sum()) == 2 * width
    assert resident() - before < 16 << 20


def resident():
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("resident memory is read from /proc")
    (line,) = (line for line in status.read_text().splitlines() if line.startswith("RssFile"))
    return int(line.split()[1]) << 10


def test_changing_what_was_read_does_not_change_the_file(tmp_path):
    networks().save(tmp_path / "p")
    Population.open(tmp_path / "p").stacked()["w"].zero_()
    assert torch.equal(Population.open(tmp_path / "p").tensor("w"), networks().tensor("w"))


def test_a_population_on_disk_can_be_sent_to_another_process(tmp_path):
    networks().save(tmp_path / "p")
    population = Population.open(tmp_path / "p")[2:5]
    content = pickle.dumps(population)
    assert len(content) < 5000
    again = pickle.loads(content)
    assert again.tensor("n").tolist() == [2, 3, 4]
    assert torch.equal(again.tensor("w"), population.tensor("w"))
