"""Images per second and core in training: a ResNet-8 with filter response norm and SiLU, trained as the papers do.

One step is what `sample` does for one chain: take the rows of a mini-batch, crop and flip them, gradient, SGD with
Nesterov momentum. Ways: float32 without and with compilation, bfloat16 (`precision="bf16"`) without and with. The time
is the CPU time of the process on one core, the lower quartile of some steps; rounds go through all ways in turn and the
best counts, so ratios hold on a machine that others use too, and images per second are lower bounds.

    python -m benchmarks.training [--widths 8 16] [--batch 128] [--rounds 3] [--seconds 1.0]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence

import torch

import onebasin as ob
from benchmarks.targets import Targets, head
from benchmarks.throughput import milliseconds, one_core
from onebasin.inference import MiniBatch, Streams
from onebasin.inference.kernel import Draws, StepIndex
from onebasin.inference.target import target_of
from onebasin.inference.training import Training

WAYS = ("float32", "float32 compiled", "bf16", "bf16 compiled")
PIXELS, IMAGES = 32, 4096
FASTER = 1.1  # bf16 compiled against float32 compiled
SMALL = 0.05  # share of a step that crops and flips may take
CLOSE = 0.2  # relative difference of the gradients: the kinks of the norm turn a rounding of 2^-9 into its root


def kernel_of(width: int, batch: int, way: str) -> tuple[Training, Draws]:
    """The kernel of a training, and the network at which it starts."""
    with ob.global_seed(0):
        model = ob.examples.resnet8(width)
    x = torch.randn(IMAGES, 3, PIXELS, PIXELS, generator=torch.Generator().manual_seed(0))
    y = torch.randint(0, 10, (IMAGES,), generator=torch.Generator().manual_seed(1))
    target = target_of(model, (x, y), prior=None, compile=way.endswith("compiled"))
    method = ob.Ensemble(
        batch=batch,
        optimizer="sgd",
        lr=0.05,
        nesterov=True,
        weight_decay=5e-4,
        lr_schedule="milestones",
        milestones=(25, 50),
        augment=("crop", "flip"),
        precision="bf16" if way.startswith("bf16") else "full",
    )
    kernel = method.training(target).kernel
    assert isinstance(kernel, Training)
    position = target.layout.join(dict(model.named_parameters())).detach()[None]
    return kernel, Draws(position, target.buffers_for(1), torch.zeros(1, dtype=torch.float64))


def job_of(kernel: Training, start: Draws) -> Callable[[], object]:
    """A function that makes the first step again and again."""
    streams = Streams(0, [0], "benchmark")
    state = kernel.init(start, streams)
    return lambda: kernel.step(state, StepIndex(0, 1000), streams)


def table(targets: Targets, widths: Sequence[int], batch: int, rounds: int, seconds: float) -> None:
    """Print images per second by width and way, and judge them."""
    head("Training a ResNet-8 on one core", f"images per second of CPU time, batch {batch}, {PIXELS} x {PIXELS} pixels")
    for width in widths:
        best, compiling = dict.fromkeys(WAYS, torch.inf), {}
        jobs, gradients = {}, {}
        for way in WAYS:
            kernel, start = kernel_of(width, batch, way)
            begun = time.perf_counter()
            jobs[way] = job_of(kernel, start)
            jobs[way]()
            compiling[way] = time.perf_counter() - begun
            rows = kernel.minibatches.rows(0, Streams(0, [0], "benchmark"))
            options = {"training": True, "bf16": kernel.bf16}
            gradients[way] = kernel.target(start.position, start.buffers, rows, **options).gradient[0]
        augmenting, right = torch.inf, True
        for _ in range(rounds):
            for way, job in jobs.items():
                best[way] = min(best[way], milliseconds(job, seconds))
            augmenting = min(augmenting, milliseconds(changing(batch), 0.2 * seconds))
        print(f"\nwidth {width}")
        print(f"{'':<20}{'images/s':>10}{'x float32':>11}{'first call':>13}{'gradient off by':>17}")
        for way, time_ in best.items():
            full = gradients["float32"]
            off = float((gradients[way] - full).norm() / full.norm())
            speed, gain = 1e3 * batch / time_, best["float32"] / time_
            print(f"{way:<20}{speed:>10,.0f}{gain:>11.2f}{compiling[way]:>11.1f} s{off:>17.1e}")
            right &= off <= CLOSE
        targets.judge(f"gradients within {CLOSE:.0%} of float32, width {width}", "all" if right else "not all", right)
        ratio, share = best["float32 compiled"] / best["bf16 compiled"], augmenting / best["bf16 compiled"]
        targets.judge(f"bf16 {FASTER} x float32, compiled, width {width}", f"{ratio:.2f} x", ratio >= FASTER)
        targets.judge(f"crops and flips below {SMALL:.0%} of a step, width {width}", f"{share:.1%}", share < SMALL)


def changing(batch: int) -> Callable[[], object]:
    """A function that crops and flips a mini-batch."""
    images, classes = torch.randn(1, batch, 3, PIXELS, PIXELS), torch.zeros(1, batch, dtype=torch.int64)

    def change() -> object:
        own, made = [ob.generator(0, "augment", 0, 0)], MiniBatch([images], classes)
        for transform in (ob.RandomCrop(), ob.RandomFlip()):
            made = transform.apply(made, own)
        return made

    return change


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=(8, 16))
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0)
    options = parser.parse_args()
    targets = Targets()
    with one_core():
        table(targets, options.widths, options.batch, options.rounds, options.seconds)
    return targets.close()


if __name__ == "__main__":
    sys.exit(main())
