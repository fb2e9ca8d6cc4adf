"""Hashes of what seeded calls return: recorded before a refactoring, compared after it.

    python -m benchmarks.bits --save before.json      # on the old tree
    python -m benchmarks.bits --compare before.json   # on the new one; exits with 1 where a hash differs

Every sampler, `align`, `balance`, `canonicalise`, `fit`, `refine`, `predict`, `evaluate`, `discrepancy` and `diversity`
run once on a small perceptron on the embedded digits; tensors are hashed bit for bit, numbers of results by their repr.
"""

import argparse
import dataclasses
import hashlib
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import onebasin as ob
from onebasin.data import digits, split

METHODS = (
    ob.HMC(draws=4, warmup=4, leapfrog=3, epochs=3),
    ob.SGHMC(draws=4, epochs=3),
    ob.MCLMC(draws=4, epochs=3),
    ob.Ensemble(epochs=5),
    ob.VI(draws=4, epochs=3),
    ob.SWAG(draws=4, epochs=5),
    ob.Laplace(draws=4, epochs=3),
)


def hashed(value: Any) -> str:
    """A short hash of tensors, mappings, sequences, dataclasses and plain values; floats by all their digits."""
    digest = hashlib.blake2b(digest_size=8)

    def feed(item: Any) -> None:
        if isinstance(item, Tensor):
            digest.update(repr((tuple(item.shape), str(item.dtype))).encode())
            digest.update(item.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() if item.numel() else b"")
        elif isinstance(item, Mapping):
            for key in sorted(item, key=str):
                digest.update(str(key).encode())
                feed(item[key])
        elif isinstance(item, list | tuple):
            for part in item:
                feed(part)
        elif dataclasses.is_dataclass(item) and not isinstance(item, type):
            feed([getattr(item, field.name) for field in dataclasses.fields(item)])
        elif isinstance(item, float | int | str | bool | None):
            digest.update(repr(item).encode())

    feed(value)
    return digest.hexdigest()


def tensors(population: ob.Population) -> dict[str, Tensor]:
    return {name: population.tensor(name) for name in population.names}


def measured() -> dict[str, str]:
    (x, y), (x_test, y_test) = split(*digits(), test=0.5, seed=0)
    x, y, x_test, y_test = x[:200], y[:200], x_test[:100], y_test[:100]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 10))
    out: dict[str, str] = {}
    populations = {}
    for method in METHODS:
        populations[method.name] = ob.sample(model, (x, y), method, chains=4, seed=3, prior=0.3, compile=False)
        out[f"sample {method.name}"] = hashed(tensors(populations[method.name]))
    symmetry = ob.discover(model, x[:2])
    out["discover"] = hashed(sorted((s.name, s.size, s.freedoms) for s in symmetry.spaces))
    ensemble = populations["ensemble"]
    aligned = ob.align(ensemble, symmetry).population
    out["align"] = hashed(tensors(aligned))
    out["align to one"] = hashed(tensors(ob.align(ensemble, symmetry, reference=ensemble.member(0)).population))
    out["balance"] = hashed(tensors(ob.balance(ensemble, symmetry).population))
    out["canonicalise"] = hashed(tensors(ob.canonicalise(ensemble, symmetry, scale="balanced", order="max").population))
    for family, rank in (("diagonal", None), ("low-rank", 2)):
        posterior = ob.fit(aligned, family, rank=rank)
        out[f"fit {family}"] = hashed(tensors(posterior.draw(3, torch.Generator().manual_seed(0))))
    posterior = ob.fit(aligned)
    out["predict"] = hashed(ob.predict(model, aligned, x_test, average=True))
    out["refine"] = hashed(tensors(refined(model, posterior, aligned, x).draw(3, torch.Generator().manual_seed(0))))
    out["evaluate"] = hashed(str(ob.evaluate(model, aligned, (x_test, y_test))))
    out["discrepancy"] = hashed(
        str(
            ob.discrepancy(
                populations["hmc"],
                populations["ensemble"],
                symmetry=symmetry,
                layers=False,
                permutations=19,
                n_resamples=19,
            )
        )
    )
    out["diversity"] = hashed(numbers(str(ob.diversity(model, aligned, x_test))))
    return out


def numbers(text: str) -> list[str]:
    """The numbers of a text, without the words and the layout around them."""
    return re.findall(r"-?\d[\d.,e+-]*%?", text)


def refined(model: nn.Module, posterior: ob.Posterior, population: ob.Population, x: Tensor) -> ob.Posterior:
    return ob.refine(model, posterior, population, x, steps=20, draws=8)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", type=Path, help="write the hashes to this file")
    parser.add_argument("--compare", type=Path, help="compare with the hashes in this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    hashes = measured()
    if arguments.save:
        arguments.save.write_text(json.dumps(hashes, indent=1) + "\n", encoding="utf-8")
    before = json.loads(arguments.compare.read_text(encoding="utf-8")) if arguments.compare else hashes
    differing = [name for name in sorted({*hashes, *before}) if hashes.get(name) != before.get(name)]
    for name, value in hashes.items():
        print(f"{name:<20} {value} {'DIFFERS' if name in differing else ''}".rstrip())
    print(f"{len(hashes) - len(differing)} equal, {len(differing)} different")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
