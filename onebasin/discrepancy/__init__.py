"""How far are two crowds of networks apart, with and without their symmetries?"""

from onebasin.discrepancy.distances import Distances, pair_distances, tensor_distances
from onebasin.discrepancy.forms import FORMS
from onebasin.discrepancy.measure import discrepancy
from onebasin.discrepancy.report import Compared, Discrepancy, Gap
from onebasin.discrepancy.runs import same_run_share

__all__ = [
    "FORMS",
    "Compared",
    "Discrepancy",
    "Distances",
    "Gap",
    "discrepancy",
    "pair_distances",
    "same_run_share",
    "tensor_distances",
]
