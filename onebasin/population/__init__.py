"""Many networks of one architecture, in memory or on disk."""

from onebasin.population.crowd import Population
from onebasin.population.store import folder_problems
from onebasin.population.writer import PopulationWriter

__all__ = ["Population", "PopulationWriter", "folder_problems"]
