"""Experiments of two papers and the demo, written with `import onebasin as ob` alone.

A study is a list of parts. Each is run once, kept on disk, and gives one section of a record.
"""

from onebasin_papers.study import Part, Settings, Study, Workspace, run_study

__all__ = ["Part", "Settings", "Study", "Workspace", "run_study"]
