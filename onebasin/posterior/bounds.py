"""How much memory a fit takes, at most: in this process, and for work on one shard."""

from __future__ import annotations

from onebasin.cluster import Needs
from onebasin.population import Population
from onebasin.population.writer import BLOCK_BYTES, member_bytes
from onebasin.posterior.coordinates import Coordinates
from onebasin.posterior.moments import rows_at_once
from onebasin.posterior.uncertain import vector_dtype

_WAITING = 4  # results of a shard in memory at once: where it is made, packed, and two that wait to be collected


def fit_bytes(population: Population, layout: Coordinates, groups: int, columns: int) -> Needs:
    """Upper estimates.

    Args:
        population: the networks.
        layout: of the weights that are fitted.
        groups: components.
        columns: L of the widest product (D, L) with all deviations; 0 if there is none.
    """
    moments = 16 * sum(tensor.size for tensor in population.spec.values()) * groups  # mean and squares, float64
    block = min(population.nbytes, max(BLOCK_BYTES, member_bytes(population.spec)))
    each, here = 4 * block + _WAITING * moments, 3 * moments  # a block is read, copied, and in part made float64
    if columns:
        row = vector_dtype(layout).itemsize * layout.size
        product = row * columns
        each = max(each, 3 * row * rows_at_once(layout, len(population)) + (1 + _WAITING) * product + 3 * row * groups)
        here += 4 * product + 24 * len(population) * columns
    return {"each": each, "here": here}
