"""Which examples? Small data sets that need no download, and their division into training and test."""

from onebasin.data.embedded import digits, photographs
from onebasin.data.splitting import split

__all__ = ["digits", "photographs", "split"]
