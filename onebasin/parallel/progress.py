"""The progress callback of long work: one signature for the whole library."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int, str], None]
"""Called with (work done, work in all, a sentence about it); gradients, networks or shards, as the sentence says."""
