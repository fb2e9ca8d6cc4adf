"""Which examples? Data sets by name, by path or from a function, and their division into training and test."""

from onebasin.data.checksum import OFFICIAL
from onebasin.data.dataset import Dataset, Parts, Scaling
from onebasin.data.embedded import digits, photographs
from onebasin.data.loading import Reading, load, read_parts
from onebasin.data.splitting import split

__all__ = ["OFFICIAL", "Dataset", "Parts", "Reading", "Scaling", "digits", "load", "photographs", "read_parts", "split"]
