"""What a crowd of networks is worth: tensors in, tensors out."""

from onebasin.metrics.effective import ess, mcse
from onebasin.metrics.mixing import ebfmi, rhat
from onebasin.metrics.temperature import configurational_temperature, kinetic_temperature

__all__ = ["configurational_temperature", "ebfmi", "ess", "kinetic_temperature", "mcse", "rhat"]
