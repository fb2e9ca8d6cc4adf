"""Somebody else's random numbers, which only torch's global generator can give, made reproducible."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def global_seed(seed: int) -> Iterator[None]:
    """Seed torch's global generator inside the block and restore it afterwards.

    Constructors of layers and dropout take their numbers from there, and take no generator.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
