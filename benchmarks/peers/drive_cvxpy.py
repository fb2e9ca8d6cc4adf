"""Runs inside the environment of `cvxpy`: the least mass that rescaling the units of a ReLU MLP can reach.

    python drive_cvxpy.py in.npz out.npz [--biases]

With x = 2 log scale of the hidden units the mass is convex:

    mass(x) = sum over layers and weights (j -> i) of w_ij^2 exp(x_i - x_j),    x = 0 for inputs and outputs.

Layers that touch only one hidden space are summed beforehand, so that the solver sees the smallest problem. in.npz
holds `<network>/<tensor>`; out.npz gets the optimal x of each hidden layer. Prints optimum and seconds per network,
`seconds` being all of `Problem.solve` and `solver` what its solver reports for itself.
"""

from __future__ import annotations

import argparse
import json
import time

import cvxpy as cp
import numpy as np


def posed(state: dict[str, np.ndarray], biases: bool) -> tuple[cp.Problem, list[cp.Variable]]:
    weights = [value.astype(np.float64) ** 2 for name, value in state.items() if name.endswith("weight")]
    shifts = [value.astype(np.float64) ** 2 for name, value in state.items() if name.endswith("bias")]
    hidden = [cp.Variable(len(weight)) for weight in weights[:-1]]
    terms = []
    for number, weight in enumerate(weights):
        writes = hidden[number] if number < len(hidden) else None
        reads = hidden[number - 1] if number else None
        if writes is not None and reads is not None:
            ones = np.ones((1, weight.shape[1])), np.ones((len(weight), 1))
            columns = cp.reshape(writes, (len(weight), 1), order="C") @ ones[0]
            rows = ones[1] @ cp.reshape(reads, (1, weight.shape[1]), order="C")
            terms.append(cp.sum(cp.multiply(weight, cp.exp(columns - rows))))
        elif writes is not None:
            terms.append(weight.sum(1) @ cp.exp(writes))
        elif reads is not None:
            terms.append(weight.sum(0) @ cp.exp(-reads))
        if biases:
            terms.append(shifts[number] @ cp.exp(writes) if writes is not None else shifts[number].sum())
    return cp.Problem(cp.Minimize(sum(terms))), hidden


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("--biases", action="store_true")
    options = parser.parse_args()
    networks: dict[str, dict[str, np.ndarray]] = {}
    with np.load(options.source, allow_pickle=False) as stored:
        for key in stored.files:
            network, name = key.split("/")
            networks.setdefault(network, {})[name] = stored[key]
    tiny = {"0.weight": np.ones((3, 2)), "0.bias": np.ones(3), "2.weight": np.ones((2, 3)), "2.bias": np.ones(2)}
    posed(tiny, True)[0].solve()  # warm up
    told, made = [], {}
    for network, state in networks.items():
        started = time.perf_counter()
        problem, hidden = posed(state, options.biases)
        optimum = problem.solve()
        seconds = time.perf_counter() - started
        stats = problem.solver_stats
        told.append({
            "network": network, "optimum": float(optimum), "status": problem.status, "seconds": seconds,
            "solver": stats.solve_time, "name": stats.solver_name,
        })  # fmt: skip
        made.update({f"{network}/{number}": space.value for number, space in enumerate(hidden)})
    np.savez(options.target, **made)
    print(json.dumps({"networks": told, "version": cp.__version__}))


if __name__ == "__main__":
    main()
