"""How a sampler fared, in a few numbers per chain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from onebasin.inference.convergence import unfinished, unfinished_sentence
from onebasin.metrics import ebfmi

_LOST = 0.5  # a chain that diverges in more than this share of its steps gets nowhere either
_STUCK = 0.01  # a chain that accepts less than this has stopped moving


def summary(info: Mapping[str, Tensor]) -> dict[str, Any]:
    """JSON-able numbers from Info (chains, steps) after warm-up.

    Every entry becomes its mean per chain. For HMC also `exp_energy_change`, the mean of exp(-dH), which is 1 for a
    correct sampler, `ebfmi`, and the chains that are stuck. For trainings `still_falling`, the chains whose loss had
    not settled (`onebasin.inference.convergence`), and `notes`, sentences for people.
    """
    found: dict[str, Any] = {
        name: [float(row) for row in value.nanmean(dim=1)]
        for name, value in info.items()
        if name not in ("energy", "energy_change", "divergent")
    }
    if "divergent" in info:
        found["divergences"] = [int(row) for row in info["divergent"].nansum(dim=1)]
        lost = (info["divergent"].nanmean(dim=1) > _LOST).tolist()
        found["stuck"] = [chain for chain, bad in enumerate(lost) if bad]
    if "energy_change" in info:
        change = info["energy_change"]
        sound = torch.where(torch.isfinite(change), torch.exp(-change), torch.where(change.isnan(), change, 0.0))
        found["exp_energy_change"] = [float(row) for row in sound.nanmean(dim=1)]
        slow = [chain for chain, rate in enumerate(found["accepted"]) if rate < _STUCK]
        found["stuck"] = sorted({*found["stuck"], *slow})
    if "energy" in info and info["energy"].shape[1] >= 4:
        found["ebfmi"] = [float(row) for row in ebfmi(info["energy"])]
    if "loss_fall" in info:
        fall = found["loss_fall"]
        found["still_falling"] = chains = unfinished(fall, found["loss_noise"])
        found["notes"] = [unfinished_sentence(chains, fall)] if chains else []
    return found
