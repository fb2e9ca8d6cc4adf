"""Data sets: embedded, in files, downloaded."""

from onebasin.data.checksum import OFFICIAL
from onebasin.data.corruptions import CORRUPTIONS, SEVERITIES, corrupt, shifts
from onebasin.data.dataset import Dataset, Parts, Scaling, split
from onebasin.data.load import Reading, digits, load, photographs, read_parts
from onebasin.data.npz import INPUTS, TARGETS, first_of
from onebasin.storage import read_arrays, stored_names

__all__ = [
    "CORRUPTIONS",
    "INPUTS",
    "OFFICIAL",
    "SEVERITIES",
    "TARGETS",
    "Dataset",
    "Parts",
    "Reading",
    "Scaling",
    "corrupt",
    "digits",
    "first_of",
    "load",
    "photographs",
    "read_arrays",
    "read_parts",
    "shifts",
    "split",
    "stored_names",
]
