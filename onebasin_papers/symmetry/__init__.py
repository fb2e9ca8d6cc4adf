"""Paper 2: symmetries of networks, and what approximate posteriors are worth once they are known."""

from __future__ import annotations

from onebasin_papers.study import Part, Study
from onebasin_papers.symmetry import checkpoints, collapse, marginals, mass, order, table, two_neurons
from onebasin_papers.symmetry.settings import TERMS, SymmetrySettings, preset_settings, summarise

__all__ = ["STUDY", "SymmetrySettings", "preset_settings"]

STUDY = Study(
    "symmetry",
    "Posteriors of neural networks and their symmetries",
    (
        Part("two-neurons", two_neurons.TITLE, two_neurons.part),
        Part("marginals", marginals.TITLE, marginals.part),
        Part("table", table.TITLE, table.part),
        Part("collapse", collapse.TITLE, collapse.part),
        Part("mass", mass.TITLE, mass.part),
        Part("order", order.TITLE, order.part),
        Part("checkpoints", checkpoints.TITLE, checkpoints.part),
    ),
    summarise,
    TERMS,
)
