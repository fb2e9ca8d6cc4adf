"""Many networks of one architecture, in memory or on disk."""

from onebasin.population.archive import networks_in
from onebasin.population.archive_write import write_archives
from onebasin.population.constant import constant_tensors
from onebasin.population.crowd import Population
from onebasin.population.importing import import_networks
from onebasin.population.inspection import inspect_population
from onebasin.population.writer import PopulationWriter

__all__ = [
    "Population",
    "PopulationWriter",
    "constant_tensors",
    "import_networks",
    "inspect_population",
    "networks_in",
    "write_archives",
]
