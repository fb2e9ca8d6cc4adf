"""What do the papers claim, and does it hold? Assembly only: every number is computed in another room.

A study is a list of parts. Each is run once, kept on disk, and gives one section of a record.
"""

from onebasin_papers.study import Bench, Part, Plan, Study, run_study

__all__ = ["Bench", "Part", "Plan", "Study", "run_study"]
