"""Runs inside the environment of `rebasin`: aligns pairs of ReLU MLPs by its PermutationCoordinateDescent.

    python drive_rebasin.py in.npz out.npz

in.npz holds `<pair>/a/<tensor>` and `<pair>/b/<tensor>` for tensors 0.weight, 0.bias, 2.weight, ... of an nn.Sequential
of Linear and ReLU; out.npz gets the permuted networks as `<pair>/<tensor>`. Prints, per pair, the seconds of
`rebasin()` and those of tracing the two networks before it.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import torch
from rebasin import PermutationCoordinateDescent
from torch import nn


def network(state: dict[str, np.ndarray]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for name, value in state.items():
        if name.endswith(".weight"):
            layers += [nn.Linear(value.shape[1], value.shape[0]), nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    model.load_state_dict({name: torch.from_numpy(value) for name, value in state.items()})
    return model.eval()


def aligned(a: nn.Sequential, b: nn.Sequential) -> tuple[float, float]:
    """Permute b in place; seconds of tracing and of the descent."""
    example = torch.zeros(1, next(b.parameters()).shape[1])
    started = time.perf_counter()
    descent = PermutationCoordinateDescent(a, b, example)
    traced = time.perf_counter()
    descent.rebasin()
    return traced - started, time.perf_counter() - traced


def main() -> None:
    source, target = sys.argv[1:3]
    pairs: dict[str, dict[str, dict[str, np.ndarray]]] = {}
    with np.load(source, allow_pickle=False) as stored:
        for key in stored.files:
            pair, side, name = key.split("/")
            pairs.setdefault(pair, {}).setdefault(side, {})[name] = stored[key]
    torch.manual_seed(0)  # the order of layers is drawn from the global generator
    tiny = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)) for _ in range(2)]
    aligned(*tiny)  # warm up
    times, made = [], {}
    for pair, sides in pairs.items():
        a, b = network(sides["a"]), network(sides["b"])
        tracing, seconds = aligned(a, b)
        times.append({"pair": pair, "tracing": tracing, "seconds": seconds})
        made.update({f"{pair}/{name}": value.detach().numpy() for name, value in b.state_dict().items()})
    np.savez(target, **made)
    print(json.dumps({"times": times, "threads": torch.get_num_threads()}))


if __name__ == "__main__":
    main()
