"""Write what is whole of a damaged population into a new one.

Whole files only. A shard holds each tensor of all its members together, with one checksum: in a shard that was cut off
every member lacks something, or has something that nobody can vouch for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from onebasin.errors import StorageError
from onebasin.population.population import Population
from onebasin.population.shard import read_manifest
from onebasin.storage import DAMAGED, WHOLE, Finding

NETWORKS = ("shard", "network")  # kinds of findings that can be saved


def savable(findings: Iterable[Finding]) -> list[Path]:
    """The files whose networks are whole, in order."""
    return [found.path for found in findings if found.state == WHOLE and found.kind in NETWORKS and found.members]


def rescue(folder: Path, findings: Iterable[Finding], goal: Path) -> int:
    """Save the networks of whole files, in their order, and say in the provenance where they come from.

    Args:
        folder: what was inspected; it is not changed.
        findings: of that inspection.
        goal: a new folder.

    Returns:
        How many networks were saved.

    Raises:
        StorageError: nothing is whole.
    """
    found = list(findings)
    paths = savable(found)
    if not paths:
        raise StorageError(f"nothing in {folder} is whole, so nothing can be saved: go back to a copy")
    whole = Population.concatenate(Population.open(path) for path in paths)
    try:
        before = dict(read_manifest(folder).provenance)
    except StorageError:
        before = {}
    lost = [one.path.name for one in found if one.state == DAMAGED]
    replace(whole, provenance={**before, "saved_from": str(folder), "without": lost}).save(goal)
    return len(whole)
