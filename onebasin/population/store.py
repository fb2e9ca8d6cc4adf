"""A population as a folder: `population.json` and immutable shards, which several writers may add at once.

The manifest holds what never changes (format, spec, provenance, identity). Shards are found by listing the folder, so
that appending rewrites nothing and a reader sees every finished shard while writers are still at work. The manifest
names no file, so it can lead nowhere; each shard carries the identity, so that one from elsewhere is noticed.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onebasin.errors import InputError, SpecError, StorageError
from onebasin.population.durable import TEMPORARY, publish
from onebasin.population.shard import Shard, read_shard, shard_key, shard_name
from onebasin.state import Spec, check_spec, spec_from_json, spec_to_json

MANIFEST = "population.json"
FORMAT = "onebasin-population"
_LARGEST = 64 << 20  # bytes of a manifest
VERSION = 1

_NOT_A_MANIFEST = (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, SpecError)


@dataclass(frozen=True)
class Manifest:
    """What all members share.

    Attributes:
        spec: of one member.
        provenance: where they come from.
        identity: drawn when the folder is made; empty for one that was made before there were identities.
    """

    spec: Spec
    provenance: Mapping[str, Any]
    identity: str = ""


def read_manifest(folder: Path) -> Manifest:
    """Read `population.json`.

    Raises:
        StorageError: when it is absent, corrupt or of a newer version.
    """
    path = folder / MANIFEST
    if path.exists() and (not path.is_file() or path.stat().st_size > _LARGEST):
        raise StorageError(f"expected a small file, but {path} is a device, a folder or endless: move it away")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        known, version = content["format"] == FORMAT, int(content["version"])
        if known and version > VERSION:
            raise StorageError(f"{path} has version {version}, expected at most {VERSION}: upgrade onebasin")
        spec, provenance = spec_from_json(json.dumps(content["spec"])), dict(content["provenance"])
        manifest = Manifest(spec, provenance, str(content.get("identity", "")))
    except FileNotFoundError as error:
        raise StorageError(
            f"{folder} holds shards but no {MANIFEST}: call Population.writer(path, spec) there once to write "
            "it again, or open the shards one by one"
        ) from error
    except _NOT_A_MANIFEST as error:
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


def write_manifest(folder: Path, manifest: Manifest) -> Manifest:
    """Write `population.json`, or check that the one already there has the same spec; return the one that is there."""
    try:
        provenance = json.loads(json.dumps(dict(manifest.provenance)))
    except (TypeError, ValueError) as error:
        raise InputError(
            f"provenance must be what JSON can hold (text, numbers, lists, dicts), found something else ({error}): "
            "convert it with str(...)"
        ) from error
    path = folder / MANIFEST
    try:
        if not path.exists():
            made = replace(manifest, identity=_identity(folder))
            spec = json.loads(spec_to_json(made.spec))
            content = {"format": FORMAT, "version": VERSION, "spec": spec, "provenance": provenance}
            text = json.dumps({**content, "identity": made.identity}, indent=1).encode()
            publish(path, lambda file: file.write(text))
            return made
    except FileExistsError:
        pass  # another writer was a moment faster: its spec must be ours
    found = read_manifest(folder)
    check_spec(manifest.spec, found.spec, where=f"this writer, compared with the members in {folder},")
    return found


def _identity(folder: Path) -> str:
    """A new identity, or that of the shards whose manifest was lost; none where these disagree."""
    found = {read_shard(path).origin.population for path in shard_paths(folder)}
    return secrets.token_hex(8) if not found else found.pop() if len(found) == 1 else ""


def shard_paths(folder: Path) -> list[Path]:
    """List finished shards in the order of their members: by sequence, then by writer."""
    found = [(key, path) for path in folder.iterdir() if (key := shard_key(path)) and TEMPORARY not in path.name]
    return [path for _, path in sorted(found)]


def read_shards(folder: Path, manifest: Manifest) -> list[Shard]:
    """Read the headers of all finished shards, and refuse those that do not belong here.

    Raises:
        SpecError: a shard holds other tensors.
        StorageError: a shard is damaged, or was written under another name or for another population.
    """
    shards = [read_shard(path) for path in shard_paths(folder)]
    for shard in shards:
        check_belongs(shard, manifest)
    return shards


def check_belongs(shard: Shard, manifest: Manifest) -> None:
    """Refuse a shard that came from elsewhere: its networks would be taken for those of this population."""
    path, origin = shard.source.path, shard.origin
    check_spec(shard.spec, manifest.spec, where=f"shard {path}")
    remedy = (
        "put back the file that was here, or move this one away; Population.writer(folder, spec).extend("
        "Population.open(file)) adds its networks in earnest"
    )
    if (origin.sequence, origin.writer) != shard_key(path):
        name = shard_name(origin.sequence, origin.writer)
        here = ", which is here too" if (path.parent / name).exists() else ""
        raise StorageError(f"{path} was written as {name}{here}, so it is a copy or stands for another file: {remedy}")
    if manifest.identity and origin.population and origin.population != manifest.identity:
        raise StorageError(f"{path} was written into another population: {remedy}")
