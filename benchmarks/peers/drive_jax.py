"""Runs inside the environment of `jax`: potentials and gradients of many ReLU MLPs, jit(vmap(value_and_grad(U))).

    python drive_jax.py in.npz out.npz --seconds 0.3

in.npz holds, for each cell, `<cell>/x` (n, in), `<cell>/y` (n,) of floats (Gaussian with learned variance, outputs are
mean and log standard deviation) or of class numbers, `<cell>/widths`, and `<cell>/position` (chains, D): weight and
bias of each layer, flattened one after another. Weights are given to JAX layer by layer, so that it need not cut or
join. out.npz gets the gradients `<cell>` (chains, D). Prints the milliseconds of one call per cell: the lower quartile
of this process's CPU time, one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from itertools import pairwise

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

import jax
import jax.numpy as jnp
import numpy as np

Layers = list[tuple[jax.Array, jax.Array]]


def potential(layers: Layers, x: jax.Array, y: jax.Array) -> jax.Array:
    h = x
    for number, (weight, bias) in enumerate(layers):
        h = (jax.nn.relu(h) if number else h) @ weight.T + bias
    if jnp.issubdtype(y.dtype, jnp.integer):
        likelihood = jnp.take_along_axis(jax.nn.log_softmax(h), y[:, None], 1).sum()
    else:
        likelihood = (-0.5 * ((y - h[:, 0]) * jnp.exp(-h[:, 1])) ** 2 - h[:, 1]).sum()
    return 0.5 * sum((weight**2).sum() + (bias**2).sum() for weight, bias in layers) - likelihood


def layers_of(position: np.ndarray, widths: list[int]) -> Layers:
    layers, start = [], 0
    for below, above in pairwise(widths):
        middle, end = start + above * below, start + above * below + above
        weight = jnp.asarray(position[:, start:middle].reshape(-1, above, below))
        layers.append((weight, jnp.asarray(position[:, middle:end])))
        start = end
    return layers


def milliseconds(job: Callable[[], object], seconds: float) -> float:
    for _ in range(3):
        jax.block_until_ready(job())
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 8:
        started = time.process_time()
        jax.block_until_ready(job())
        times.append(time.process_time() - started)
    return 1e3 * sorted(times)[len(times) // 4]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("--seconds", type=float, default=0.3)
    options = parser.parse_args()
    with np.load(options.source, allow_pickle=False) as stored:
        arrays = {key: stored[key] for key in stored.files}
    gradient = jax.jit(jax.vmap(jax.value_and_grad(potential), in_axes=(0, None, None)))
    times, made = {}, {}
    for cell in dict.fromkeys(key.rpartition("/")[0] for key in arrays):
        x, y = jnp.asarray(arrays[f"{cell}/x"]), arrays[f"{cell}/y"]
        goal = jnp.asarray(y.astype(np.int32) if y.dtype.kind == "i" else y)
        position = arrays[f"{cell}/position"]
        layers = layers_of(position, arrays[f"{cell}/widths"].tolist())
        times[cell] = milliseconds(lambda: gradient(layers, x, goal), options.seconds)  # noqa: B023 - called here
        slopes = gradient(layers, x, goal)[1]
        made[cell] = np.concatenate(
            [np.asarray(part).reshape(len(position), -1) for pair in slopes for part in pair], 1
        )
    np.savez(options.target, **{cell.replace("/", "|"): value for cell, value in made.items()})
    print(json.dumps({"milliseconds": times, "version": jax.__version__}))


if __name__ == "__main__":
    main()
