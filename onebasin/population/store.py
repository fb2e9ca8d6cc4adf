"""A population as a folder: `population.json` and immutable shards, which several writers may add at once.

The manifest holds what never changes (format, spec, provenance). Shards are found by listing the folder, so that
appending rewrites nothing and a reader sees every finished shard while writers are still at work.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onebasin.errors import InputError, SpecError, StorageError
from onebasin.population.durable import TEMPORARY, leftovers, publish
from onebasin.population.shard import Shard, read_shard, shard_key, shard_problems
from onebasin.state import Spec, check_spec, spec_from_json, spec_to_json

MANIFEST = "population.json"
FORMAT = "onebasin-population"
VERSION = 1


@dataclass(frozen=True)
class Manifest:
    """What all members share."""

    spec: Spec
    provenance: Mapping[str, Any]


def read_manifest(folder: Path) -> Manifest:
    """Read `population.json`.

    Raises:
        StorageError: when it is absent, corrupt or of a newer version.
    """
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text())
        known, version = content["format"] == FORMAT, int(content["version"])
        if known and version > VERSION:
            raise StorageError(f"{path} has version {version}, expected at most {VERSION}: upgrade onebasin")
        manifest = Manifest(spec_from_json(json.dumps(content["spec"])), dict(content["provenance"]))
    except FileNotFoundError as error:
        raise StorageError(
            f"{folder} holds shards but no {MANIFEST}: call Population.writer(path, spec) there once to write "
            "it again, or open the shards one by one"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, SpecError) as error:
        known = False
        cause: Exception | None = error
    else:
        cause = None
    if not known:
        raise StorageError(
            f"expected {path} to be a {FORMAT} manifest, found something else: "
            "delete it and call Population.writer(path, spec) there to write it again"
        ) from cause
    return manifest


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `population.json`, or check that the one already there has the same spec."""
    try:
        provenance = json.loads(json.dumps(dict(manifest.provenance)))
    except (TypeError, ValueError) as error:
        raise InputError(
            f"provenance must be what JSON can hold (text, numbers, lists, dicts), found something else ({error}): "
            "convert it with str(...)"
        ) from error
    spec = json.loads(spec_to_json(manifest.spec))
    content = {"format": FORMAT, "version": VERSION, "spec": spec, "provenance": provenance}
    text = json.dumps(content, indent=1).encode()
    path = folder / MANIFEST
    try:
        if not path.exists():
            publish(path, lambda file: file.write(text))
            return
    except FileExistsError:
        pass  # another writer was a moment faster: its spec must be ours
    check_spec(
        manifest.spec,
        read_manifest(folder).spec,
        where=f"this writer, compared with the members in {folder},",
    )


def shard_paths(folder: Path) -> list[Path]:
    """List finished shards in the order of their members: by sequence, then by writer."""
    found = [(key, path) for path in folder.iterdir() if (key := shard_key(path)) and TEMPORARY not in path.name]
    return [path for _, path in sorted(found)]


def read_shards(folder: Path, spec: Spec) -> list[Shard]:
    """Read the headers of all finished shards and check them against the spec."""
    shards = [read_shard(path) for path in shard_paths(folder)]
    for shard in shards:
        check_spec(shard.spec, spec, where=f"shard {shard.source.path}")
    return shards


def folder_problems(folder: str | os.PathLike[str]) -> list[str]:
    """Check manifest, headers, checksums and leftovers of a population folder; return one sentence per problem."""
    folder = Path(folder)
    try:
        spec = read_manifest(folder).spec
    except StorageError as error:
        return [str(error), *_leftover_problems(folder)]
    problems = []
    for path in shard_paths(folder):
        try:
            shard = read_shard(path)
            check_spec(shard.spec, spec, where=f"shard {path}")
            problems += shard_problems(shard)
        except (StorageError, SpecError) as error:
            problems.append(str(error))
    return problems + _leftover_problems(folder)


def _leftover_problems(folder: Path) -> list[str]:
    return [
        f"{path} is unfinished: it belongs to a writer at work or to one that was killed; "
        "delete it when no writer is running"
        for path in leftovers(folder)
    ]
