"""Training and test examples."""

from __future__ import annotations

import torch
from torch import Tensor

from onebasin.errors import InputError

Pair = tuple[Tensor, Tensor]


def split(inputs: Tensor, targets: Tensor, *, test: float = 0.25, seed: int = 0) -> tuple[Pair, Pair]:
    """Divide examples at random into training and test; class numbers keep their shares in both.

    >>> train, test = split(torch.arange(8.0), torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]), test=0.5)
    >>> train[1], test[1]
    (tensor([0, 0, 1, 1]), tensor([0, 0, 1, 1]))

    Args:
        inputs: (examples, ...).
        targets: (examples, ...). With one whole number per example, no class gets a test example more or less than its
            share.
        test: the share of test examples, in (0, 1); round(test * examples) are taken.
        seed: the same seed gives the same division.

    Returns:
        (training inputs, training targets), (test inputs, test targets); both in the order of the given examples.
    """
    examples = len(targets)
    count = round(test * examples) if 0 < test < 1 else 0
    if len(inputs) != examples or not 0 < count < examples:
        raise InputError(
            f"expected one target per input and a share that leaves examples on both sides, found {len(inputs)} "
            f"inputs, {examples} targets and test={test}: give others"
        )
    order = torch.randperm(examples, generator=torch.Generator().manual_seed(seed))
    if targets.dim() == 1 and not targets.is_floating_point():
        order = order[torch.argsort(targets.cpu()[order], stable=True)]
    reached = torch.arange(examples + 1) * count // examples  # test examples among the first so many: evenly spread
    chosen = torch.zeros(examples, dtype=torch.bool)
    chosen[order] = reached.diff() == 1
    rows = [mask.nonzero().flatten() for mask in (~chosen, chosen)]
    first, second = ((inputs[row.to(inputs.device)], targets[row.to(targets.device)]) for row in rows)
    return first, second
