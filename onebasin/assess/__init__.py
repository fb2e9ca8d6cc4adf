"""What a crowd of networks is worth: every number of one report, each with its interval."""

from onebasin.assess.evaluating import evaluate
from onebasin.assess.evaluation import Estimate, Evaluation

__all__ = ["Estimate", "Evaluation", "evaluate"]
