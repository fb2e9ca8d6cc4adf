"""What does a record look like? One HTML page that needs nothing else, figures as files, tables as Markdown.

Everything is built from records; nothing is computed here, and torch is not needed.
"""

from onebasin.report.markdown import markdown
from onebasin.report.writing import write_report

__all__ = ["markdown", "write_report"]
