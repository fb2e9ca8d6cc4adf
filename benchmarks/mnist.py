"""MNIST and Fashion-MNIST from the IDX files beside the project, if they are there."""

from __future__ import annotations

import gzip
import struct
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

DATA = Path(__file__).resolve().parents[1].parent / "shared" / "data"
ABSENT = "skipped: ../shared/data is not beside the project, and this part needs its MNIST files"


@dataclass(frozen=True)
class Digits:
    """Images (n, 784) in [0, 1] and labels (n,)."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def read_idx(path: Path) -> Tensor:
    """An IDX file, gzipped: two zero bytes, the type, the number of axes, their big-endian lengths, then the bytes."""
    with gzip.open(path, "rb") as file:
        head, kind, axes = struct.unpack(">HBB", file.read(4))
        if head or kind != 0x08:
            raise ValueError(f"{path.name} is no IDX file of bytes: it begins with {head:04x} {kind:02x}")
        shape = struct.unpack(f">{axes}I", file.read(4 * axes))
        return torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).reshape(shape)


def load(name: str = "mnist", train: int = 60_000, test: int = 10_000) -> Digits | None:
    """The first images of each set; None where the files are not there."""
    folder = DATA / name
    if not folder.is_dir():
        return None
    parts = {}
    for part, count in (("train", train), ("t10k", test)):
        images = read_idx(folder / f"{part}-images-idx3-ubyte.gz")[:count]
        parts[part] = images.flatten(1).float() / 255, read_idx(folder / f"{part}-labels-idx1-ubyte.gz")[:count].long()
    return Digits(*parts["train"], *parts["t10k"])
