"""Populations for `benchmarks.scale`: independent networks, made in no time, in memory or streamed to the disk."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from torch import nn

from benchmarks.train import CACHE, mlp
from onebasin import Population, State
from onebasin.examples.published import optunet, resnet20_frn_silu
from onebasin.inference.start import fresh

SMALL = (64, 64, 64, 10)
WIDE = (784, 128, 10)
BLOCK = 256  # networks drawn at a time


def independent(model: nn.Module, members: int, seed: int = 0) -> Population:
    """Networks as torch initialises them, each from its own seed."""
    return Population.from_states([fresh(model, seed, member) for member in range(members)])


def noisy(model: nn.Module, members: int, generator: torch.Generator) -> State:
    """Random weights of the size of the model's own, stacked: as dear to align, and made in no time."""
    sizes = {name: max(0.05, float(value.float().std(correction=0))) for name, value in fresh(model, 0, 0).items()}
    return {
        name: sizes[name] * torch.randn(members, *value.shape, generator=generator)
        for name, value in model.state_dict().items()
    }


def on_disk(name: str, model: nn.Module, members: int) -> Path:
    """A population folder of noisy networks below `.cache/`; one that is there already is taken."""
    folder = CACHE / f"scale-{name}-{members}"
    if not (folder / "population.json").exists() or len(Population.open(folder)) != members:
        shutil.rmtree(folder, ignore_errors=True)
        generator = torch.Generator().manual_seed(0)
        first = Population.from_stacked(noisy(model, 1, torch.Generator().manual_seed(1)))
        with Population.writer(folder, first.spec) as writer:
            for start in range(0, members, BLOCK):
                writer.extend(Population.from_stacked(noisy(model, min(BLOCK, members - start), generator)))
    return folder


def resnet20s(members: int) -> Path:
    """Independent ResNet-20s with filter response norm, 0.27 million weights each, on disk."""
    folder = CACHE / f"scale-resnet20-{members}"
    if not (folder / "population.json").exists() or len(Population.open(folder)) != members:
        shutil.rmtree(folder, ignore_errors=True)
        model = resnet20_frn_silu()
        with Population.writer(folder, model) as writer:
            for member in range(members):
                writer.append(fresh(model, 0, member))
    return folder


def optunets(members: int) -> Population:
    """Independent OptuNets, 392 weights each, in memory."""
    return independent(optunet(), members)


def perceptrons(members: int, widths: tuple[int, ...] = SMALL, seed: int = 0) -> Population:
    """Independent multilayer perceptrons in memory."""
    return independent(mlp(widths), members, seed)
