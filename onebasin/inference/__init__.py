"""Where do networks come from? Samplers and other approximations of the posterior, batched over chains."""

from onebasin.inference.approximating import approximate
from onebasin.inference.density.likelihood import LearnedNoise
from onebasin.inference.diagnosis import Diagnosis, diagnose
from onebasin.inference.sampling import sample

__all__ = ["Diagnosis", "LearnedNoise", "approximate", "diagnose", "sample"]
