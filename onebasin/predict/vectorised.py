"""Many networks through one vectorised call where torch can do that, and one by one where it cannot."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping

from torch import Tensor
from torch.func import vmap

from onebasin.calling import Call

Pass = Callable[[Mapping[str, Tensor], Call], Tensor]  # (stacked members, arguments) -> (members, batch, ...)


class Vectorised:
    """A way to run members together and one to run them alone; once the first was refused, the second is used.

    Attributes:
        together: all members of a block in one call.
        alone: each by itself, right for every model.
    """

    def __init__(self, together: Pass, alone: Pass) -> None:
        """Begin with hope."""
        self.together, self.alone = together, alone
        self._refused = False

    def __call__(self, block: Mapping[str, Tensor], call: Call) -> Tensor:
        """Outputs of the members (members, batch, ...)."""
        if not self._refused:
            try:
                return self.together(block, call)
            except Exception:  # vmap refuses in many ways; if the fault is the model's, the plain call below says so
                self._refused = True
        return self.alone(block, call)


def mapped(one: Pass, stacked: Mapping[str, Tensor], call: Call) -> Tensor:
    """A function of one member, applied to all of them through `torch.func.vmap`."""
    with warnings.catch_warnings():
        # An operation without a batching rule is looped over by torch, which then warns that this is slow.
        warnings.filterwarnings("ignore", message="There is a performance drop", category=UserWarning)
        result: Tensor = vmap(one, in_dims=(0, None))(dict(stacked), call)
    return result
