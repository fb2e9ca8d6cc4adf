"""How fast, how right and how good the samplers are: all tables of issue 4.

    python -m benchmarks.inference [throughput] [airfoil] [splits] [ensemble] [vi] [hmc]

Without names everything runs, one part after the other, in about 50 minutes on two cores. Seconds and ratios mean
something only on an idle machine.
"""

from __future__ import annotations

import sys

from benchmarks import mnist_inference, tabular, throughput, uci
from benchmarks.targets import Targets

SEEDS = 3  # of the airfoil runs, five minutes each


def main(names: list[str]) -> int:
    """Run the parts by name."""
    parts = {
        "throughput": throughput.table,
        "airfoil": lambda targets: uci.airfoil(targets, range(SEEDS)),
        "splits": lambda targets: uci.splits(targets, uci.SETS),
        **{name: lambda targets, name=name: mnist_inference.tables(targets, [name]) for name in mnist_inference.PARTS},
    }
    unknown = [name for name in names if name not in parts]
    if unknown:
        print(f"expected parts out of {', '.join(parts)}, found {unknown[0]}")
        return 2
    targets = Targets()
    for name in names or list(parts):
        if name in ("airfoil", "splits") and not tabular.present():
            print(tabular.ABSENT)
            continue
        parts[name](targets)
    return targets.close()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
