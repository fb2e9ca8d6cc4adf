"""Data sets: embedded, in files, downloaded."""

from onebasin.data.checksum import OFFICIAL
from onebasin.data.dataset import Dataset, Parts, Scaling, split
from onebasin.data.load import Reading, digits, load, photographs, read_parts
from onebasin.data.npz import INPUTS, TARGETS, first_of
from onebasin.storage import read_arrays, stored_names

__all__ = [
    "INPUTS",
    "OFFICIAL",
    "TARGETS",
    "Dataset",
    "Parts",
    "Reading",
    "Scaling",
    "digits",
    "first_of",
    "load",
    "photographs",
    "read_arrays",
    "read_parts",
    "split",
    "stored_names",
]
