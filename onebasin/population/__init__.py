"""Many networks of one architecture: in memory, on disk, in archives, on a hub."""

from onebasin.population.archive import is_archive, networks_in, write_archives
from onebasin.population.check import inspect_file, inspect_population
from onebasin.population.files import CONFIG, INDEX, SUFFIXES, is_pretrained, weight_files
from onebasin.population.import_networks import NETWORKS, UNFINISHED, import_networks, save_whole, whole_files
from onebasin.population.map import complete_shards, map_blocks, missing_shards, shard_tensors
from onebasin.population.open import Precision, is_draws, is_there
from onebasin.population.population import Population, check_population
from onebasin.population.shard import MANIFEST, Block, read_shard, shard_key, shard_name, shard_paths
from onebasin.population.show import chain_series
from onebasin.population.writer import BLOCK_BYTES, PopulationWriter, block_members, member_bytes

__all__ = [
    "BLOCK_BYTES",
    "CONFIG",
    "INDEX",
    "MANIFEST",
    "NETWORKS",
    "SUFFIXES",
    "UNFINISHED",
    "Block",
    "Population",
    "PopulationWriter",
    "Precision",
    "block_members",
    "chain_series",
    "check_population",
    "complete_shards",
    "import_networks",
    "inspect_file",
    "inspect_population",
    "is_archive",
    "is_draws",
    "is_pretrained",
    "is_there",
    "map_blocks",
    "member_bytes",
    "missing_shards",
    "networks_in",
    "read_shard",
    "save_whole",
    "shard_key",
    "shard_name",
    "shard_paths",
    "shard_tensors",
    "weight_files",
    "whole_files",
    "write_archives",
]
