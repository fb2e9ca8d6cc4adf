"""Stream networks out of files, archives or the hub into a population folder, with bounded memory.

Networks are written shard by shard into FOLDER.importing, which becomes FOLDER when all are there. An import that was
killed goes on after the last whole shard, and ends with what it would have ended with undisturbed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onebasin.errors import InputError, StorageError
from onebasin.parallel import Progress, progress_of
from onebasin.population.archive import contents_of, is_archive, networks_in, ordered_networks
from onebasin.population.files import is_pretrained, weight_files
from onebasin.population.member_storage import gather
from onebasin.population.names import strip_prefix
from onebasin.population.open import (
    NetworkFiles,
    Wanted,
    files_with_networks,
    find,
    open_members,
    relative_names,
)
from onebasin.population.population import Architecture, Population
from onebasin.population.shard import MANIFEST, read_manifest, shard_paths
from onebasin.population.writer import PopulationWriter, block_members, member_bytes
from onebasin.state import Spec, State, as_spec, check_spec, dtype_name, shared_names, spec_of
from onebasin.storage import (
    DAMAGED,
    WHOLE,
    Finding,
    check_same_run,
    digest,
    is_taken,
    leftovers,
    make_folder,
    need_space,
    rename_folder,
)

UNFINISHED = ".importing"
NETWORKS = ("shard", "network")  # kinds of findings that hold networks
_WRITER = "import"

Member = tuple[State, int | None, float | None]  # weights, chain, log density


@dataclass(frozen=True)
class Piece:
    """A file or folder of the source: how many networks it has, and for an archive their names in order."""

    path: Path
    count: int
    names: Sequence[str] | None = None


@dataclass(frozen=True)
class ImportPlan:
    """The files, the spec and the provenance of an import."""

    pieces: Sequence[Piece]
    wanted: Wanted
    provenance: Mapping[str, Any]

    @property
    def spec(self) -> Spec:
        """Of every network, as it is written."""
        return self.wanted.spec or {}

    @property
    def members(self) -> int:
        """Networks in all pieces."""
        return sum(piece.count for piece in self.pieces)


def import_networks(
    where: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    spec: Architecture | None = None,
    dtype: torch.dtype | None = None,
    progress: Progress | bool | None = None,
) -> Path:
    """Write the networks of a source into a new population folder; call it again after an interruption.

    Members are in natural order of their names. Archives are read twice if they are in this order, and more often if
    not: once more for each 256 MB that wait for their turn.

    Args:
        where: a folder, a file, an archive, a pattern, or a name on the hub.
        folder: the population.
        spec: refuse networks of other names or shapes than this spec, state or module; a shared prefix of names is
            stripped. Files may hold the tied weights of a module once.
        dtype: convert floating-point tensors to it; None keeps theirs, which must be one and the same.
        progress: True for a line on stderr with the time left, or a function that is called with networks done, all
            networks, and what is being done.

    Returns:
        The folder. If it is there already and holds this very import, nothing is done.

    Raises:
        InputError: the folder holds something else.
        StorageError, UnsafeFileError, SpecError: something in the source cannot be read or differs.
        DiskError: the disk is full.
    """
    target, show = Path(folder), progress_of(progress) or (lambda done, members, doing: None)
    if is_taken(target) and not (target / MANIFEST).exists():
        raise InputError(f"expected a new or empty folder, but {target} holds something else: choose another path")
    tied = shared_names(spec) if isinstance(spec, nn.Module) else {}
    wanted = Wanted(None if spec is None else as_spec(spec), dtype, tied)
    plan = _plan(find(Path(where)).fetch(), wanted, show)
    if (target / MANIFEST).exists():
        _check_same(target, plan)
        return target
    unfinished = target.with_name(target.name + UNFINISHED)
    make_folder(target.parent)
    writer = PopulationWriter(unfinished, plan.spec, provenance=plan.provenance, name=_WRITER)
    _check_same(unfinished, plan)
    _check_beginning(writer, plan)
    need_space(unfinished, (plan.members - writer.written) * member_bytes(plan.spec))
    try:
        _write(writer, plan, show)
        _finish(unfinished, target)
    except FileNotFoundError as error:
        raise StorageError(f"{error.filename or unfinished} is gone: another import may have finished it") from error
    return target


def _write(writer: PopulationWriter, plan: ImportPlan, show: Progress) -> None:
    # Not as a context, which would write a short shard when it is interrupted, where an undisturbed run has a full one.
    for done, (state, chain, log_density) in enumerate(_stream(plan, writer.written), start=writer.written + 1):
        writer.append(state, chain=chain, log_density=log_density)
        show(done, plan.members, "importing")
    writer.flush()


def _plan(files: NetworkFiles, given: Wanted, show: Progress) -> ImportPlan:
    """Look at every file once: how many networks, under which names, of which shapes."""
    paths = [member for path in files.paths for member in files_with_networks(path)]
    spec = given.converted(_first_spec(paths[0], given))
    wanted = replace(given, spec=spec)
    pieces, archives = list[Piece](), list[dict[str, Any]]()
    for number, path in enumerate(paths):
        show(number, len(paths), f"looking through {path.name}")
        if is_archive(path):
            names = contents_of(path).names
            pieces.append(Piece(path, len(names), names))
            archives.append({"name": path.name, "sha256": digest(path), "networks": len(names)})
        else:
            members = open_members(path, given if given.spec is None else wanted)
            check_spec(members.spec, spec, where=f"{path}, compared with {paths[0].name},")
            pieces.append(Piece(path, len(members)))
    plain = [path for path in paths if not is_archive(path)]
    provenance = {
        "source": files.name,
        **files.origin,
        "networks": sum(piece.count for piece in pieces),
        "dtypes": sorted({dtype_name(tensor.dtype) for tensor in spec.values()}),
        **({"archives": archives} if archives else {}),
        **({"files": relative_names(plain), "bytes": sum(_size(path) for path in plain)} if plain else {}),
    }
    return ImportPlan(pieces, wanted, provenance)


def _first_spec(path: Path, wanted: Wanted) -> Spec:
    """Shapes and dtypes of the first network, under the names that are wanted; dtypes may be others."""
    if not is_archive(path):
        return open_members(path, replace(wanted, dtype="stored")).spec
    stored = spec_of(next(networks_in(path))[1])
    spec = {name: stored[old] for name, old in strip_prefix(stored, wanted.spec).items()}
    if wanted.spec is not None:
        check_spec(spec, replace(wanted, dtype="stored").fitted(spec), where=str(path))
    return spec


def _size(path: Path) -> int:
    """Bytes of a file, or of the shards of a population."""
    paths = weight_files(path) if is_pretrained(path) else shard_paths(path) if path.is_dir() else [path]
    return sum(file.stat().st_size for file in paths)


def _check_same(folder: Path, plan: ImportPlan) -> None:
    """Refuse a folder whose networks come from elsewhere; the same source may be spelled in another way."""
    try:
        check_same_run(folder, read_manifest(folder).provenance, plan.provenance, may_change=("source",))
    except InputError as error:
        raise InputError(
            f"{folder} holds networks that do not come from {plan.provenance['source']} as it is now: choose another "
            "path, or delete the folder"
        ) from error


def _check_beginning(writer: PopulationWriter, plan: ImportPlan) -> None:
    """What an interrupted import left must be its first networks, without a gap."""
    if writer.written not in (writer.sequence * writer.shard_members, plan.members):
        raise StorageError(
            f"expected {writer.sequence} full shards of an import in {writer.path}, found {writer.written} networks: "
            "delete the folder and import again"
        )


def _stream(plan: ImportPlan, start: int) -> Iterator[Member]:
    """The members from number `start` on; pieces before it are not opened."""
    for piece in plan.pieces:
        if start < piece.count:
            yield from _members(piece, start, plan)
        start = max(0, start - piece.count)


def _members(piece: Piece, start: int, plan: ImportPlan) -> Iterator[Member]:
    spec = plan.spec
    if piece.names is not None:
        networks = ordered_networks(piece.path, piece.names[start:], spec=spec, dtype=plan.wanted.conversion)
        yield from ((state, None, None) for _, state in networks)
        return
    members = open_members(piece.path, plan.wanted)
    step = block_members(spec)
    for first in range(start, len(members), step):
        rows = torch.arange(first, min(first + step, len(members)))
        block = gather(members.sources, rows, spec)
        for position, row in enumerate(rows.tolist()):
            chain = None if members.chain is None else int(members.chain[row])
            density = None if members.log_density is None else float(members.log_density[row])
            yield {name: value[position] for name, value in block.items()}, chain, density


def _finish(unfinished: Path, target: Path) -> None:
    """Give the finished population its name, without what a killed process left."""
    for path in leftovers(unfinished):
        path.unlink(missing_ok=True)
    rename_folder(unfinished, target)


def whole_files(findings: Iterable[Finding]) -> list[Path]:
    """The files whose networks are whole, in order, out of an inspection of a population."""
    return [entry.path for entry in findings if entry.state == WHOLE and entry.kind in NETWORKS and entry.members]


def save_whole(folder: Path, findings: Sequence[Finding], target: Path) -> int:
    """Save the networks of the whole files of a damaged population, in their order, as a new one.

    Whole files only. A shard holds each tensor of all its members together, with one checksum: in a shard that was cut
    off every member lacks something, or has something that no checksum vouches for.

    Args:
        folder: the population that was inspected; it is not changed.
        findings: those of `inspect_population`.
        target: a new folder; its provenance names `folder` and the damaged files.

    Returns:
        How many networks were saved.

    Raises:
        StorageError: nothing is whole.
    """
    paths = whole_files(findings)
    if not paths:
        raise StorageError(f"nothing in {folder} is whole, so nothing can be saved: go back to a copy")
    members = Population.concatenate(Population.open(path) for path in paths)
    try:
        provenance = dict(read_manifest(folder).provenance)
    except StorageError:
        provenance = {}
    lost = [entry.path.name for entry in findings if entry.state == DAMAGED]
    replace(members, provenance={**provenance, "saved_from": str(folder), "without": lost}).save(target)
    return len(members)
