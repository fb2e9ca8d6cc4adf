"""Many networks of one architecture: in memory, on disk, in archives, on a hub."""

from onebasin.population.archive import is_archive, networks_in, write_archives
from onebasin.population.check import inspect_file, inspect_population
from onebasin.population.columns import constant_tensors, device_of, only, overlapping, read_columns
from onebasin.population.files import SUFFIXES
from onebasin.population.hub import is_there
from onebasin.population.import_networks import UNFINISHED, import_networks
from onebasin.population.population import (
    Population,
    caller_bytes,
    completed,
    mapped,
    members_between,
    missing_shards,
    parts,
    readers,
    shard_tensors,
)
from onebasin.population.rescue import NETWORKS, rescue, savable
from onebasin.population.shard import MANIFEST, Block, read_shard, shard_key, shard_name, shard_paths
from onebasin.population.writer import BLOCK_BYTES, PopulationWriter, block_members, member_bytes

__all__ = [
    "BLOCK_BYTES",
    "MANIFEST",
    "NETWORKS",
    "SUFFIXES",
    "UNFINISHED",
    "Block",
    "Population",
    "PopulationWriter",
    "block_members",
    "caller_bytes",
    "completed",
    "constant_tensors",
    "device_of",
    "import_networks",
    "inspect_file",
    "inspect_population",
    "is_archive",
    "is_there",
    "mapped",
    "member_bytes",
    "members_between",
    "missing_shards",
    "networks_in",
    "only",
    "overlapping",
    "parts",
    "read_columns",
    "read_shard",
    "readers",
    "rescue",
    "savable",
    "shard_key",
    "shard_name",
    "shard_paths",
    "shard_tensors",
    "write_archives",
]
