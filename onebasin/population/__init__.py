"""Many networks of one architecture, in memory or on disk."""

from onebasin.population.archive import networks_in, write_archives
from onebasin.population.crowd import Population
from onebasin.population.store import folder_problems
from onebasin.population.writer import PopulationWriter

__all__ = ["Population", "PopulationWriter", "folder_problems", "networks_in", "write_archives"]
