"""Batch norm of a network that was not trained: its running statistics are those of nobody, so measure them.

The statistics that two networks gathered in training do not fit the network between them: its activations have less
variance (Jordan et al., 2023).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn

from onebasin.align.path.watch import NormCall, Watch
from onebasin.errors import InputError
from onebasin.predict import Inputs, Moments
from onebasin.predict.batches import batches
from onebasin.predict.forward import BATCH, Bound
from onebasin.state import State, shared_names


def recalibrate(model: nn.Module, state: Mapping[str, Tensor], inputs: Inputs, *, batch: int = BATCH) -> State:
    """Return the network with running means and variances measured on `inputs`; tensors that stay are shared.

    One pass in evaluation mode, in which every batch norm normalises a batch by the statistics that torch would store
    for it: its mean and its unbiased variance. So the layers behind see what they will see in evaluation mode with
    the new statistics. (In training mode they see a little else: there torch stores the unbiased variance too, but
    normalises by the biased one.) Statistics of batches are combined by the law of total variance, not averaged.

    If the data fit into one batch the result is exact: in evaluation mode the inputs of every batch norm then have
    its running mean and variance. With several batches that holds for those before any other batch norm; behind one,
    activations were normalised batch by batch.

    Args:
        model: the function; left exactly as it was.
        state: its weights.
        inputs: data as in `outputs`; some thousand examples are plenty.
        batch: largest number of examples that are normalised together.

    Raises:
        InputError: no batch norm with running statistics was used.
    """
    state, norms = refreshed(model, state, inputs, batch=batch)
    if not norms:
        raise InputError(
            f"expected a batch norm with running statistics in {type(model).__name__}, and none was used: "
            "there is nothing to recalibrate, repair works for networks without one"
        )
    return state


def refreshed(
    model: nn.Module, state: Mapping[str, Tensor], inputs: Inputs, *, batch: int = BATCH
) -> tuple[State, tuple[str, ...]]:
    """As `recalibrate`, with the names of the running means that were measured; there may be none."""
    bound = Bound(model, state)
    watch = Renormalise(bound.tensors)
    for _, call in batches(inputs, batch):
        with watch:
            bound.run(call)
    return replaced(model, state, watch.statistics()), tuple(mean for mean, _ in watch.moments)


def may_have_norms(model: nn.Module) -> bool:
    """Whether a model has buffers that could be running statistics; if not, it need not be run to find none."""
    return any(buffer.is_floating_point() for buffer in model.buffers())


class Renormalise(Watch):
    """Measures what goes into batch norms, and normalises each batch by its own statistics."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Know the tensors of a `Bound` model."""
        super().__init__(tensors)
        self.moments: dict[tuple[str, str], Moments] = {}

    def norm(self, call: NormCall) -> Tensor:
        """Measure and normalise; torch keeps the unbiased variance, and so do we."""
        here = Moments()
        here.add(call.input, 1)
        self.moments.setdefault((call.mean, call.variance), Moments()).add(call.input, 1)
        mean, variance = here.mean.to(call.input.dtype), here.variance().to(call.input.dtype)
        return F.batch_norm(call.input, mean, variance, call.weight, call.bias, eps=call.eps)

    def statistics(self) -> State:
        """Running mean and variance by state-dict name."""
        means = {mean: moments.mean for (mean, _), moments in self.moments.items()}
        return means | {variance: moments.variance() for (_, variance), moments in self.moments.items()}


def replaced(model: nn.Module, state: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> State:
    """The state with some tensors replaced, under all their names and in their dtypes."""
    first = shared_names(model)
    return {
        name: new[first[name]].to(value.dtype) if first[name] in new else value.detach()
        for name, value in state.items()
    }
