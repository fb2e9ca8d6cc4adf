"""Where do networks come from? Samplers and other approximations of the posterior, batched over chains."""

from onebasin.inference.likelihood import LearnedNoise
from onebasin.inference.sampling import sample

__all__ = ["LearnedNoise", "sample"]
