"""Records, tables, figures and pages of results, without torch."""

from onebasin.reporting.markdown import markdown
from onebasin.reporting.record import (
    FILE,
    VERDICTS,
    Axis,
    Cell,
    Claim,
    Column,
    Figure,
    Number,
    Panel,
    Record,
    Rule,
    Section,
    Series,
    Table,
    decode,
    encode,
    read_record,
    tally,
    write_record,
)
from onebasin.reporting.text import table, text_table
from onebasin.reporting.write import write_report

__all__ = [
    "FILE",
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
    "markdown",
    "read_record",
    "table",
    "tally",
    "text_table",
    "write_record",
    "write_report",
]
