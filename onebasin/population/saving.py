"""Save a whole population, all or nothing, and check what lies on the disk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from onebasin.errors import StorageError
from onebasin.population.durable import leftovers, make_folder, need_space, whole_folder
from onebasin.population.read import SUFFIXES
from onebasin.population.shard import block_spec, check_names, is_shard, shard_of, shard_problems, write_shard
from onebasin.population.sources import FileSource, Source
from onebasin.population.store import MANIFEST, folder_problems
from onebasin.population.tensor_file import read_header
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


def source_problems(sources: Sequence[Source]) -> list[str]:
    """Check the files behind a population; return one sentence per problem."""
    paths = list(dict.fromkeys(source.path for source in sources if isinstance(source, FileSource)))
    folders = list(dict.fromkeys(path.parent for path in paths))
    whole = [folder for folder in folders if (folder / MANIFEST).exists()]
    problems = [sentence for folder in whole for sentence in folder_problems(folder)]
    for path in paths:
        if path.parent not in whole:
            problems += _file_problems(path)
    return problems + [
        f"{path} is unfinished: delete it when no writer is running"
        for folder in folders
        if folder not in whole
        for path in leftovers(folder)
        if path.suffix in SUFFIXES or ".safetensors" in path.name
    ]


def _file_problems(path: Path) -> list[str]:
    try:
        file = read_header(path)
        return shard_problems(shard_of(file)) if is_shard(file) else []
    except StorageError as error:
        return [str(error)]
