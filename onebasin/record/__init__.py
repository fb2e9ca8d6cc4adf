"""What did a study find? Tables, figures and claims as plain data: written once, shown as often as one likes.

Nothing here needs torch, so that a report can be built from a stored record anywhere, years later.
"""

from onebasin.record.claim import VERDICTS, Claim, tally
from onebasin.record.codec import decode, encode
from onebasin.record.figure import Axis, Figure, Panel, Rule, Series
from onebasin.record.record import Record, Section
from onebasin.record.store import read_record, write_record
from onebasin.record.table import Cell, Column, Number, Table

__all__ = [
    "VERDICTS",
    "Axis",
    "Cell",
    "Claim",
    "Column",
    "Figure",
    "Number",
    "Panel",
    "Record",
    "Rule",
    "Section",
    "Series",
    "Table",
    "decode",
    "encode",
    "read_record",
    "tally",
    "write_record",
]
