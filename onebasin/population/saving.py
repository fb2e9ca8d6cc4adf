"""Save a whole population, all or nothing."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from onebasin.population.durable import make_folder, need_space, whole_folder
from onebasin.population.shard import block_spec, check_names, write_shard
from onebasin.population.writer import Crowd, PopulationWriter, block_at, member_bytes
from onebasin.state import State


def save_folder(path: Path, blocks: Iterator[tuple[int, State]], crowd: Crowd) -> None:
    """Write blocks with the facts of `crowd` into a new population folder; each block becomes a shard."""
    with whole_folder(path) as folder:
        first = next(blocks, None)
        spec = crowd.spec if first is None else block_spec(first[1])
        need_space(folder, len(crowd) * member_bytes(spec))
        with PopulationWriter(folder, spec, provenance=crowd.provenance, name="0") as writer:
            for start, tensors in chain([] if first is None else [first], blocks):
                writer.write(block_at(start, tensors, crowd))


def save_file(path: Path, tensors: State, crowd: Crowd) -> None:
    """Write all members into one safetensors file; a file of this name is replaced when the new one is whole."""
    check_names(crowd.spec)
    make_folder(path.parent)
    need_space(path.parent, len(crowd) * member_bytes(crowd.spec))
    write_shard(path, block_at(0, tensors, crowd), replace=True)
