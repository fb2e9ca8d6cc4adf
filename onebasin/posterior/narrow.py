"""A module of the same class with fewer units, for ensembles of narrow networks (Laurent et al., 2023).

Packed-Ensembles train M networks of a share alpha of the width side by side, as one network whose layers have M groups.
Nothing is shared, so with the sum over members of their mean losses each member gets the gradient that it would get
alone: SGD and Adam then do for each what they would do for it alone, to rounding. (With the mean over members every
gradient is 1/M of that, which is an M times smaller rate for SGD, and an M times larger epsilon for Adam.) So a
Packed-Ensemble is a deep ensemble of narrow networks,

    ob.sample(ob.narrow(model, symmetry, alpha), data, ob.Ensemble(), chains=M),

apart from the order of the data, which the packed network shares among its members and an ensemble does not.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from onebasin.errors import InputError
from onebasin.functional import AnyInputs, global_seed, inputs_of
from onebasin.posterior.pruning import count
from onebasin.posterior.units import remove_units, resized
from onebasin.state import as_state
from onebasin.symmetry import Symmetry


def narrow(
    model: nn.Module,
    symmetry: Symmetry,
    share: float,
    groups: int = 1,
    *,
    inputs: AnyInputs = None,
    seed: int = 0,
    known: Collection[type[nn.Module]] = (),
) -> nn.Module:
    """A new module of the same class with a share of the units of every permutable space, and with new weights.

    What no unit owns (inputs, outputs, rigid axes) keeps its size. Weights are drawn anew, as a constructor would:
    every layer with `reset_parameters` resets itself, so that their spread fits the smaller number of inputs.
    Parameters of modules without it keep the values of the first units, and so do frozen parameters and their norms.

    >>> import onebasin as ob
    >>> model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> narrow(model, ob.discover(model, torch.zeros(1, 3)), 0.5)
    Sequential(
      (0): Linear(in_features=3, out_features=4, bias=True)
      (1): ReLU()
      (2): Linear(in_features=4, out_features=2, bias=True)
    )

    Args:
        model: the wide module; left as it was.
        symmetry: found by `discover` for it.
        share: alpha, above 0 and up to 1; of n units floor(alpha n) are left, at least one.
        groups: gamma of Packed-Ensembles: every convolution between two permutable spaces gets this many times its
            groups. Linear layers know no groups and stay whole, and so do convolutions of one channel per group.
        inputs: an example input, on which the narrow module is run once. It is needed where tensors do not tell all
            widths (grouped convolutions, norms without weights), and shows whether everything fits.
        seed: seed of the new weights.
        known: classes of your own that take every width from their tensors, as in `resized`.

    Raises:
        InputError: the share or the groups are impossible, or inputs are needed.
        SymmetryError: the symmetry is that of another model.
        ModelError: a layer does not follow its tensors, as in `resized`.
    """
    if not isinstance(share, int | float) or not 0 < share <= 1:
        raise InputError(f"expected a share of the units above 0 and up to 1, found {share!r}: give 0.5 for half")
    if not isinstance(groups, int) or groups < 1:
        raise InputError(f"expected a whole number of groups from 1 on, found {groups!r}: give groups=2")
    given = None if inputs is None else inputs_of(inputs, model)
    first = {space.name: list(range(max(1, count(share, space.size)))) for space in symmetry.spaces if space.permutable}
    small = resized(model, remove_units(as_state(model), symmetry, first).state, given, known)
    if groups > 1:
        _group(small, symmetry, groups, share)
        small = small if given is None else resized(small, as_state(small), given, known)
    _reset(small, seed)
    return small


def _group(small: nn.Module, symmetry: Symmetry, groups: int, share: float) -> None:
    """Give convolutions between two permutable spaces more groups."""
    free = {(leg.tensor, leg.axis) for space in symmetry.spaces if space.permutable for leg in space.legs}
    chosen = {
        path: layer
        for path, layer in small.named_modules()
        if isinstance(layer, _ConvNd)
        and {(f"{path}.weight" if path else "weight", axis) for axis in (0, 1)} <= free
        and not (layer.groups > 1 and layer.weight.shape[1] == 1)
    }
    if not chosen:
        raise InputError(
            f"expected convolutions between hidden channels to give groups={groups}, found none in "
            f"{type(small).__name__}: leave groups out"
        )
    for path, layer in chosen.items():
        wanted = groups * layer.groups
        if layer.in_channels % wanted or layer.out_channels % wanted:
            raise InputError(
                f"expected channels that {wanted} groups divide, found {layer.in_channels} and {layer.out_channels} in "
                f"{path!r} with share={share:g}: give another share, or another number of groups"
            )
        layer.groups = wanted
        weight = layer.weight.detach()[:, : layer.weight.shape[1] // groups].clone()
        layer.weight = nn.Parameter(weight, requires_grad=layer.weight.requires_grad)


def _reset(small: nn.Module, seed: int) -> None:
    """Draw the weights of all layers that can, but of none that is frozen."""
    with global_seed(seed), torch.no_grad():
        for layer in small.modules():
            frozen = {
                name: value.clone()
                for name, value in layer._parameters.items()
                if value is not None and not value.requires_grad
            }
            own = sum(value is not None for value in layer._parameters.values())
            reset = getattr(layer, "reset_parameters", None)
            if not callable(reset) or (own and len(frozen) == own):
                continue
            reset()
            for name, value in frozen.items():
                layer.get_parameter(name).copy_(value)
