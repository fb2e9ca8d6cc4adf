"""The layout of the data set "Checkpoints": from archives in half precision to one basin."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from onebasin.cli.load import load
from onebasin.cli.main import main
from onebasin.errors import InputError
from onebasin.examples.published import (
    PUBLISHED,
    FilterResponseNorm,
    optunet,
    resnet8,
    resnet18,
    resnet20,
    resnet20_frn_silu,
)
from onebasin.functional.call import global_seed
from onebasin.population.archive import write_archives
from onebasin.population.population import Population
from onebasin.state import State
from onebasin.symmetry.discover import discover
from onebasin.symmetry.verify import verify


def some(build: Callable[[], nn.Module], count: int) -> Population:
    """Networks whose norms are not at their start, where much is equal."""
    with global_seed(0):
        models = [build() for _ in range(count)]
    generator = torch.Generator().manual_seed(1)
    for model in models:
        for name, value in model.state_dict().items():
            if "bn" in name or "shortcut.1" in name:
                change = torch.rand(value.shape, generator=generator) if value.is_floating_point() else 0
                value.add_(change)
    return Population.from_models(models)


def outputs(model: nn.Module, state: State, x: Tensor) -> Tensor:
    wide = {name: value.double() if value.is_floating_point() else value for name, value in state.items()}
    with torch.no_grad():
        found: Tensor = torch.func.functional_call(model.double().eval(), wide, (x.double(),))
    return found


def test_names_and_sizes_are_the_published_ones() -> None:
    names = set(resnet20_frn_silu().state_dict())
    assert {"conv1.weight", "bn1.gamma", "bn1.beta", "bn1.tau", "layer1.0.conv1.weight", "layer1.2.bn2.tau"} <= names
    assert {"layer2.0.shortcut.0.weight", "layer3.0.shortcut.1.gamma", "linear.weight", "linear.bias"} <= names
    assert len(names) == 3 * (1 + 18 + 2) + 19 + 2 + 2 and not any("layer4" in name for name in names)
    found = resnet18().state_dict()
    assert {"bn1.running_mean", "layer4.1.conv2.weight", "layer4.0.shortcut.1.num_batches_tracked"} <= set(found)
    half = sum(2 * value.numel() for value in found.values())
    assert half == pytest.approx(22.4e6, rel=0.01)  # bytes of each file, as published
    assert sum(value.numel() for value in optunet().parameters()) == 392
    assert PUBLISHED["cifar100-resnet18"].build().get_parameter("linear.bias").shape == (100,)


def test_filter_response_norm_is_its_formula() -> None:
    norm = FilterResponseNorm(2)
    with torch.no_grad():
        norm.gamma.copy_(torch.tensor([2.0, -1.0]).reshape(1, 2, 1, 1))
        norm.beta.fill_(0.5)
        norm.tau.copy_(torch.tensor([-1.0, 0.25]).reshape(1, 2, 1, 1))
    x = torch.tensor([[[[3.0, -4.0]], [[1.0, 1.0]]]])
    root = (12.5 + 1e-6) ** 0.5  # mean of 9 and 16
    expected = torch.tensor([[[[6 / root + 0.5, -1.0]], [[0.25, 0.25]]]])  # -8 / root + 0.5 and -1 + 0.5 are below tau
    assert torch.allclose(norm(x), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("build", "pixels", "spaces"),
    [
        (lambda: resnet18(width=4), (2, 3, 16, 16), 12),
        (lambda: resnet20_frn_silu(width=4), (2, 3, 16, 16), 12),
        (optunet, (2, 1, 28, 28), 2),
    ],
    ids=["resnet18", "resnet20", "optunet"],
)
def test_their_symmetries_are_found_and_proved(
    build: Callable[[], nn.Module], pixels: tuple[int, ...], spaces: int
) -> None:
    with global_seed(0):
        model = build().eval()
        x = torch.rand(pixels)
    found = discover(model, x)
    assert len(found.spaces) == spaces
    assert verify(model, found, x).passed
    touched = {leg.tensor for space in found.spaces for leg in space.legs}
    assert {name for name, value in model.named_parameters() if value.dim() > 1} <= touched


@pytest.mark.parametrize(
    ("blocks", "norm", "activation", "freedom"),
    [(1, "frn", "silu", "sign"), (1, "bn", "relu", "norm-scale"), (1, "none", "relu", "scale"), (3, "bn", "silu", "")],
)
def test_residual_networks_have_a_space_for_each_stream_and_each_inner_width(
    blocks: int, norm: str, activation: str, freedom: str
) -> None:
    """The widths of a stage: its stream, which all its blocks share, and the width inside each of them."""
    with global_seed(0):
        build = {1: resnet8, 3: resnet20}[blocks]
        model = build(2, classes=3, norm=norm, activation=activation).eval()
        x = torch.rand(2, 3, 16, 16)
    found = discover(model, x)
    assert sorted(space.size for space in found.spaces) == sorted([2, 4, 8] * (blocks + 1))
    assert all(space.permutable and freedom in ("", *space.freedoms) for space in found.spaces)
    assert verify(model, found, x).passed


def test_unknown_norms_and_activations_get_a_sentence() -> None:
    with pytest.raises(InputError, match="expected a norm out of frn, bn, none, found 'batch': give norm='frn'"):
        resnet8(norm="batch")
    with pytest.raises(InputError, match="give activation='silu'"):
        resnet20(activation="tanh")


def test_every_published_folder_has_a_factory_for_the_command_line() -> None:
    for published in PUBLISHED.values():
        loaded = load(f"onebasin.examples:{published.build.__name__}")
        assert isinstance(loaded.model, nn.Module)


@pytest.mark.parametrize("name", ["cifar10-resnet20-frn-silu", "mnist-optunet"])
def test_from_archives_to_one_basin(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    published = PUBLISHED[name]
    write_archives(some(published.build, 3), ".", name, per_archive=2)
    assert main(["import", f"models/{name}", "-o", "pop"]) == 0
    hint = capsys.readouterr().out.splitlines()[-1].split(": ", 1)[1].split()
    assert hint[:2] == ["onebasin", "align"]
    assert main(hint[1:]) == 0, capsys.readouterr().err
    before, after = Population.open("pop"), Population.open("aligned")
    assert before.spec == after.spec
    assert {value.dtype for value in before.spec.values()} == {published_dtype(before)}
    with global_seed(0):
        model, x = published.build(), torch.rand(published.inputs)
    noise = torch.Generator().manual_seed(0)
    moved = 0
    for number in range(3):
        own, new = before.member(number), after.member(number)
        moved += any(not torch.equal(own[key], new[key]) for key in own)
        expected = outputs(model, own, x)
        # What the same relative rounding of each weight does to the function, at most twice: before and after moving.
        rounded = {key: value.double() * (1 + 2**-11 * torch.randn(value.shape, generator=noise, dtype=torch.float64))
                   for key, value in own.items()}  # fmt: skip
        tolerance = 4 * (outputs(model, rounded, x) - expected).abs().max()
        assert (outputs(model, new, x) - expected).abs().max() <= tolerance
        assert tolerance < 0.05 * expected.std()
    assert moved >= 2


def published_dtype(population: Population) -> torch.dtype:
    assert population.provenance["dtypes"] == ["float16"]
    return torch.float16
