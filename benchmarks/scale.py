"""Thousands of networks on one machine: time, memory, workers, exponents.

    python -m benchmarks.scale [--only PART ...] [--quick] [--workers 2]

Parts: optunet (8,192 networks through the whole pipeline), resnet20 (1,000 from disk, by one worker and by several),
ray (against joblib), members and width (what cost grows with), memory (20 GB handled with 2 GB), paper (what a cluster
would need). Every part runs in a process of its own, and times are those on the clock: let nothing else run.
Memory is the peak of the anonymous memory of the process and all its workers, torch included; see `benchmarks.memory`.
In the part `memory` a control group also limits everything, mapped pages included, to 2 GB where the machine lets us
make one.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import scale_populations as populations
from benchmarks.scale_measures import LIMIT, release
from benchmarks.targets import Targets, head
from benchmarks.train import CACHE

ROOT = Path(__file__).resolve().parents[1]


def run(part: str, *arguments: int) -> dict[str, Any] | None:
    """Do a part in a process of its own; None if it did not end well."""
    command = [sys.executable, "-m", "benchmarks.scale_measures", part, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        text, _ = process.communicate()
    release(process.pid)
    if process.returncode:
        print(f"  it ended with code {process.returncode}")
        return None
    found: dict[str, Any] = json.loads(text.strip().splitlines()[-1])
    return found


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """Slope of log y over log x, by least squares."""
    logs = torch.tensor([list(map(math.log, x)), list(map(math.log, y))], dtype=torch.float64)
    centred = logs - logs.mean(1, keepdim=True)
    return float((centred[0] * centred[1]).sum() / centred[0].square().sum())


def show_optunet(targets: Targets, workers: int, quick: bool) -> None:
    members = 512 if quick else 8192
    head(f"{members:,} OptuNets, 392 weights each", f"independent networks in memory, {workers} workers")
    found = run("optunet", members, workers)
    seconds = math.inf if found is None else sum(found["steps"].values())
    if found is not None:
        for name, own in found["steps"].items():
            print(f"  {name:<36}{own:8.1f} s")
        print(f"  in all {seconds:.0f} s, {found['sweeps']} sweeps, peak memory {found['bytes'] / 1e9:.2f} GB")
    targets.judge("all of it in at most 5 minutes", f"{seconds / 60:.1f} minutes", seconds <= 300)


def show_resnet20(targets: Targets, workers: int, quick: bool) -> None:
    members = 24 if quick else 1000
    head(f"{members:,} ResNet-20s, 0.27 million weights each", "consensus, from disk to disk, one thread per worker")
    found = {count: run("resnet20", members, count) for count in (workers, 1)}
    times = {count: math.nan if own is None else own["steps"]["align"] for count, own in found.items()}
    for count, own in found.items():
        if own is not None:
            reached = f"mean <w_i, w_j> {own['before']:.3f} -> {own['after']:.3f} in {own['sweeps']} sweeps"
            print(f"  workers {count}: {times[count]:.0f} s, {own['bytes'] / 1e9:.2f} GB, {reached}")
    most = max(math.inf if own is None else own["bytes"] for own in found.values())
    targets.judge("at most 20 minutes", f"{times[workers] / 60:.1f} minutes", times[workers] <= 1200)
    targets.judge("less than 2 GB in all", f"{most / 1e9:.2f} GB", most < 2e9)
    ratio = times[1] / times[workers]
    targets.judge(f"{workers} workers at least {0.85 * workers:.1f} x one", f"{ratio:.2f} x", ratio >= 0.85 * workers)


def show_ray(targets: Targets, workers: int, quick: bool) -> None:
    members = 320 if quick else 3200
    head(
        "Ray on this machine against joblib", f"{members:,} networks aligned to the first, {workers} workers, best of 3"
    )
    found = run("ray", members, workers)
    if found is None:
        targets.judge("runs", "it did not", False)
        return
    best = {name: min(times) for name, times in found["times"].items()}
    for name, own in best.items():
        print(f"  {name:<8}{own:8.2f} s for {found['shards']} shards; {found['start'][name]:.1f} s to start")
    ratio = best["ray"] / best["joblib"]
    targets.judge(f"at most 1.3 x the time at {found['shards']} shards", f"{ratio:.2f} x", ratio <= 1.3)
    targets.judge("identical results", "identical" if found["same"] else "different", found["same"])


def show_members(targets: Targets, workers: int, quick: bool) -> None:
    sizes = (20, 60, 200) if quick else (100, 300, 1000, 3000)
    head(
        "Cost against the number of networks",
        f"{'-'.join(map(str, populations.SMALL))}, in memory, {workers} workers, s",
    )
    found = run("members", workers, *sizes)
    if found is None:
        targets.judge("runs", "it did not", False)
        return
    rows, names = found["rows"], ("align", "balance", "canonicalise", "fit")
    print(f"  {'networks':>9}" + "".join(f"{name:>14}" for name in names) + f"{'sweeps':>9}")
    for row in rows:
        print(f"  {row['members']:>9,}" + "".join(f"{row[name]:>14.3f}" for name in names) + f"{row['sweeps']:>9}")
    slopes = {name: exponent([row["members"] for row in rows], [row[name] for row in rows]) for name in names}
    print(f"  {'exponent':>9}" + "".join(f"{slopes[name]:>14.2f}" for name in names))
    for name in names:
        targets.judge(f"exponent of {name} in N at most 1.1", f"{slopes[name]:.2f}", slopes[name] <= 1.1)


def show_width(targets: Targets, workers: int, quick: bool) -> None:
    widths = (32, 64, 128) if quick else (64, 128, 256, 512, 1024, 2048)
    head("Cost against width", "consensus of 4 networks 64-w-w-10, one thread")
    found = run("width", *widths)
    if found is None:
        targets.judge("runs", "it did not", False)
        return
    print(f"  {'width':>7}{'align, s':>12}{'sweeps':>9}{'s per sweep and network':>26}")
    for row in found["rows"]:
        each = row["align"] / row["sweeps"] / 4
        print(f"  {row['width']:>7,}{row['align']:>12.2f}{row['sweeps']:>9}{each:>26.4f}")
    upper = found["rows"][len(found["rows"]) // 2 :]
    for text, rows in (("all", found["rows"]), (f"from {upper[0]['width']} on", upper)):
        slope = exponent([row["width"] for row in rows], [row["align"] / row["sweeps"] for row in rows])
        print(f"  exponent of the time per sweep, {text}: {slope:.2f}")


def show_memory(targets: Targets, workers: int, quick: bool) -> None:
    members = 2000 if quick else 49_000
    head(
        f"{members:,} networks {'-'.join(map(str, populations.WIDE))} with 2 GB",
        f"from disk to disk, {workers} workers asked for",
    )
    found = run("memory", members, workers)
    if found is None:
        targets.judge("runs with 2 GB", "it did not", False)
        return
    for name, own in found["steps"].items():
        print(f"  {name:<24}{own:8.1f} s")
    limit = "a control group held all processes to 2 GB" if found["confined"] else "no control group could be made"
    print(f"  {found['gigabytes']:.1f} GB of weights, peak of anonymous memory {found['bytes'] / 1e9:.2f} GB; {limit}")
    targets.judge("less than 2 GB", f"{found['bytes'] / 1e9:.2f} GB", found["bytes"] < LIMIT)
    targets.judge("every network there, every checksum right", str(found["whole"]), found["whole"])


def show_paper(targets: Targets, workers: int, quick: bool) -> None:
    """What 10,000 ResNet-18s would need on 20 machines, on paper."""
    head("On paper: 10,000 ResNet-18s (230 GB in half precision), 20 machines", "from a match measured here")
    found = run("resnet18", 2 if quick else 4)
    if found is None:
        targets.judge("runs", "it did not", False)
        return
    members, sweeps, network = 10_000, 3, 11.2e6 * 8  # bytes of a sum in float64
    busy, chunks = 32, members / 512
    hours = members * sweeps * found["each"] / busy / 3600
    sent = sweeps * chunks * (busy + 20) * network  # a change from every shard, and the sum to every machine
    print(f"  {found['each']:.1f} s per network and sweep on one thread, {found['sweeps']} sweeps for a few networks")
    print(f"  {sweeps} sweeps of {members:,}: {members * sweeps * found['each'] / 3600:.0f} hours of one thread")
    print(f"  a chunk of 512 networks is cut into {busy} shards, so {busy} threads are busy: {hours:.1f} hours")
    print(f"  to and from the caller: {sent / 1e9:,.0f} GB, {sent / 1.25e9 / 60:.0f} minutes at 10 Gbit/s")
    print(f"  every machine reads 230 / 20 GB in each of {sweeps + 4} passes")
    print(f"  the caller holds 3 sums, {3 * network / 1e9:.1f} GB, and an element for each network")


SHOWN = {
    "optunet": show_optunet,
    "resnet20": show_resnet20,
    "ray": show_ray,
    "members": show_members,
    "width": show_width,
    "memory": show_memory,
    "paper": show_paper,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=SHOWN, default=list(SHOWN), metavar="PART", help="parts to run")
    parser.add_argument("--quick", action="store_true", help="small populations: does it run?")
    parser.add_argument("--workers", type=int, default=2, help="processes (2)")
    options = parser.parse_args()
    CACHE.mkdir(exist_ok=True)
    targets = Targets()
    for part in options.only:
        SHOWN[part](targets, options.workers, options.quick)
    return targets.close()


if __name__ == "__main__":
    sys.exit(main())
