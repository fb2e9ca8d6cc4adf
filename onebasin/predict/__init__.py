"""What networks compute: outputs, losses and statistics of a model with given weights."""

from onebasin.calling import Inputs
from onebasin.norms import Moments
from onebasin.predict.batches import examples_in
from onebasin.predict.crowd import predictions
from onebasin.predict.forward import outputs
from onebasin.predict.losses import Loss, Score, losses, score

__all__ = ["Inputs", "Loss", "Moments", "Score", "examples_in", "losses", "outputs", "predictions", "score"]
