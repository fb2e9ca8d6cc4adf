"""Read everything that the folder `run` of a run holds, and say what is whole; its draws are a population's shards."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from onebasin.errors import StorageError
from onebasin.inference.runs.definition import read_definition
from onebasin.inference.runs.journal import RUN, info_path
from onebasin.population.findings import DAMAGED, NOTE, Finding, looked_at, unfinished
from onebasin.population.shard import shard_key
from onebasin.population.store import shard_paths
from onebasin.population.tensor_file import read_header, tensor_problems


def is_run(folder: Path) -> bool:
    """Whether a folder is, or was about to become, that of a run."""
    return any((folder / RUN / name).exists() for name in ("definition.json", "lock"))


def inspect_run(folder: Path) -> Iterator[Finding]:
    """Look at the definition, the checkpoints and the diagnostics of a run."""
    place = folder / RUN
    yield looked_at(place / "definition.json", "definition", partial(_definition, folder))
    for path in sorted(place.glob("*.safetensors")):
        kind = "checkpoint" if path.name.startswith("state-") else "diagnostics"
        yield looked_at(path, kind, partial(_tensors, path, kind))
    for shard in shard_paths(folder):
        sequence, unit = shard_key(shard) or (0, "")
        path = info_path(folder, unit, sequence)
        if not path.exists():
            said = (
                f"{path}, the diagnostics of {shard.name}, is missing: its draws are whole, their diagnostics are not"
            )
            yield Finding(path, "diagnostics", NOTE, said)
    yield from unfinished(place)


def _definition(folder: Path) -> Finding:
    path = folder / RUN / "definition.json"
    if read_definition(folder) is None:
        raise StorageError(f"{path} is missing, so this run cannot be resumed: put it back from a copy")
    return Finding(path, "definition")


def _tensors(path: Path, kind: str) -> Finding:
    problems = tensor_problems(read_header(path))
    if not problems:
        return Finding(path, kind)
    if kind == "checkpoint":
        return Finding(path, kind, DAMAGED, f"{problems[0]}; a resumed run then makes these draws again")
    return Finding(path, kind, DAMAGED, problems[0])
