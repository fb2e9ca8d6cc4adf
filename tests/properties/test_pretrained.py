"""Real trained weights: after a random element of the whole group they decide exactly as before."""

from pathlib import Path

import pytest
import torch
from torch import nn

import onebasin as ob
from tests.models.pretrained import ani, cifar10_test, normalised, resnet20, tutorial_cnn


def decisions(model: nn.Module, state: dict[str, torch.Tensor], images: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        blocks = [torch.func.functional_call(model, state, (block,)).argmax(1) for block in images.split(250)]
    return torch.cat(blocks)


@pytest.mark.timeout(900)
def test_resnet20_keeps_its_published_error(shared_data: Path) -> None:
    model = resnet20()
    symmetry = ob.discover(model, torch.zeros(2, 3, 32, 32))
    assert symmetry.unexplained == ()
    pictures, labels = cifar10_test()
    images = normalised(pictures)
    before = decisions(model, model.state_dict(), images)
    assert round(float((before.numpy() != labels).mean()) * 100, 2) == 8.27
    after = decisions(model, symmetry.apply(symmetry.random(0), model.state_dict()), images)
    assert torch.equal(before, after)


def test_the_tutorial_network_decides_as_before(shared_data: Path) -> None:
    model = tutorial_cnn()
    symmetry = ob.discover(model, torch.zeros(2, 3, 32, 32))
    pictures, labels = cifar10_test()
    images = normalised(pictures, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    before = decisions(model, model.state_dict(), images)
    assert round(float((before.numpy() == labels).mean()) * 100, 2) == 59.07
    assert torch.equal(before, decisions(model, symmetry.apply(symmetry.random(0), model.state_dict()), images))


def test_eight_energy_models_as_one_population(shared_data: Path) -> None:
    """The ANI-1x ensemble: opened as it lies on disk, moved by one element per member, every energy kept."""
    model = ani()
    vectors = {name: torch.rand(3, 384, generator=torch.Generator().manual_seed(0)) for name in "HCNO"}
    population = ob.Population.open(shared_data / "checkpoints" / "ani-1x-ensemble", spec=model)
    assert len(population) == 8
    inputs = tuple(vectors.values())
    symmetry = ob.discover(model, inputs)
    moved = symmetry.apply(symmetry.random(0, members=8), population)
    for before, after in zip(population, moved, strict=True):
        one, other = (
            torch.func.functional_call(model, {n: t.double() for n, t in s.items()}, tuple(x.double() for x in inputs))
            for s in (before, after)
        )
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
        assert not torch.equal(before[population.names[0]], after[population.names[0]])
