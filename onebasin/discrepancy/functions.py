"""How far two crowds are apart as functions: distances of their predictions, a few examples at a time."""

from __future__ import annotations

from torch import nn

from onebasin.calling import Inputs
from onebasin.cluster import Cluster, Serial
from onebasin.discrepancy.distances import Distances, tensor_distances
from onebasin.discrepancy.judge import Judge
from onebasin.discrepancy.report import Gap
from onebasin.errors import InputError
from onebasin.population import Population
from onebasin.predict.portions import answers, pieces
from onebasin.predict.predicting import Output, predict

HELD = 1 << 30  # bytes of predictions in memory: inputs are cut into pieces that give as many


def compare_functions(
    judge: Judge,
    model: nn.Module,
    a: Population,
    b: Population,
    inputs: Inputs,
    output: Output | None = None,
    *,
    cluster: Cluster | None = None,
) -> Gap:
    """Compare predictions as if they were weights.

    Args:
        judge: of the distances.
        model: the function.
        a: one crowd.
        b: the other.
        inputs: as the model takes them; distances add up over pieces of them.
        output: as in `predict`; by default probabilities where there are several outputs for an example, else values.
        cluster: who runs the networks; this process if None.

    Raises:
        InputError: the networks do not give numbers that could be close to each other.
    """
    answer = answers(model, a.member(0), inputs)
    if not answer.is_floating_point():
        raise InputError(
            f"expected networks that give floating-point numbers to compare their functions, found {answer.dtype}: "
            "wrap the model so that it returns its scores, not class numbers"
        )
    output = output or ("probabilities" if answer.dim() > 1 and answer.shape[1] > 1 else "values")
    total: Distances | None = None
    where = cluster or Serial()
    for piece in pieces(answer, len(a) + len(b), inputs, HELD):
        first, second = (
            Population.from_stacked({"predictions": predict(model, crowd, piece, output=output, cluster=where)})
            for crowd in (a, b)
        )
        ((_, found),) = tensor_distances(first, second, judge.metrics, where)
        total = found.added_to(total)
    assert total is not None  # there is at least one example
    return judge.gap(total)
