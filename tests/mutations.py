"""Do the tests notice? Break the samplers in one place at a time, and see which tests fail.

    python tests/mutations.py [part of a name]

Works on a temporary copy of package and tests. Prints a table, and exits with 1 if a mutation survives.
"""

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KILLS = 3  # failures after which a mutation is dead enough


@dataclass(frozen=True)
class Mutation:
    """One wrong line: `old`, which occurs once in a file of onebasin/inference, becomes `new`."""

    name: str
    file: str
    old: str
    new: str
    tests: str  # files that should notice, without tests/test_


NONE = Mutation("(nothing)", "hmc", "", "", "target hmc sgmcmc ensemble truth")
MUTATIONS = [
    Mutation(
        "sghmc noise off by sqrt(2)",
        "sgmcmc",
        "math.sqrt((1 - decay**2) * temperature)",
        "math.sqrt(2 * (1 - decay**2) * temperature)",
        "sgmcmc truth",
    ),
    Mutation("mini-batch without N / n", "target", "self.examples / rows.shape[-1]", "1.0", "target sgmcmc"),
    Mutation("prior with the wrong sign", "target", "+ prior.precision", "- prior.precision", "target truth"),
    Mutation("prior in every piece", "target", "Mode(False, total is None,", "Mode(False, True,", "target"),
    Mutation("kinetic energy without its half", "leapfrog", "return 0.5 * (momentum", "return (momentum", "hmc"),
    Mutation("a whole first kick", "leapfrog", "phase.momentum - 0.5 * size", "phase.momentum - size", "hmc"),
    Mutation("a whole last kick", "leapfrog", "else 0.5 * size", "else size", "hmc"),
    Mutation("everything accepted", "hmc", "< chance\n", "< 2 * sound\n", "hmc"),
    Mutation(
        "momentum without T",
        "hmc",
        "(self.temperature / state.inverse_mass).sqrt()",
        "state.inverse_mass.rsqrt()",
        "hmc",
    ),
    Mutation("acceptance without T", "hmc", "state.inverse_mass) / self.temperature", "state.inverse_mass)", "hmc"),
    Mutation(
        "momentum of the inverse mass",
        "hmc",
        "(self.temperature / state.inverse_mass)",
        "(self.temperature * state.inverse_mass)",
        "hmc",
    ),
    Mutation("rejected chains get the new gradient", "hmc", "torch.where(rows, after.found.gradient, state.gradient)",
             "after.found.gradient", "hmc"),
    Mutation("step size adapts the wrong way", "step_size", "_GAMMA * shortfall)", "_GAMMA * -shortfall)", "hmc"),
    Mutation("step size never fixed", "hmc", "if moment.warming else state.tuner.settled)",
             "if moment.step >= 0 else state.tuner.settled)", "hmc"),
    Mutation("mass is the spread", "mass", "spread.variance()", "1 / spread.variance()", "hmc"),
    Mutation("drift with the new momentum", "sgmcmc", "0.5 * size * (kicked + momentum)", "size * momentum", "sgmcmc"),
    Mutation("rate without N", "sgmcmc", "math.sqrt(rate / max(1, self.target.examples))", "math.sqrt(rate)", "sgmcmc"),
    Mutation("cycles without exploration", "sgmcmc", "if part >= self.exploration else 0.0", "if part >= 0 else 0.0",
             "sgmcmc"),
    Mutation("draws outside of the support", "sgmcmc", "torch.where(sound[:, None], state.position, state.safe)",
             "state.position", "sgmcmc"),
    Mutation("adam without its correction", "training", "(rate / (1 - _BETA1**count), math", "(rate, math", "ensemble"),
    Mutation("every epoch in the same order", "minibatch", 'key[1], key[2])', 'key[1], 0)', "target sgmcmc"),
    Mutation("all chains with the same numbers", "seeds", '"chain", chain, "block"', '"chain", 0, "block"', "truth"),
    Mutation("all blocks with the same numbers", "loop", '{block}")', '")', "truth"),
    Mutation("vi with the entropy of the wrong sign", "variational", "(precision * std.square() - 1)",
             "(precision * std.square() + 1)", "truth"),
    Mutation("laplace without its temperature", "laplace", "self.temperature, start.position.dtype",
             "1.0, start.position.dtype", "truth"),
]  # fmt: skip


def broken(mutation: Mutation, folder: Path) -> None:
    """Copy everything that is needed into the folder, with the wrong line."""
    shutil.copytree(ROOT / "onebasin", folder / "onebasin", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    (path,) = (folder / "onebasin" / "inference").rglob(f"{mutation.file}.py")
    text = path.read_text(encoding="utf-8")
    if mutation.old:
        if text.count(mutation.old) != 1:
            raise ValueError(
                f"expected {mutation.old!r} once in {mutation.file}.py, found it {text.count(mutation.old)} times"
            )
        path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")


def failures(mutation: Mutation) -> list[str]:
    """Names of the tests that fail, until `KILLS` cases have."""
    with tempfile.TemporaryDirectory(prefix="onebasin-mutation-") as name:
        folder = Path(name)
        broken(mutation, folder)
        files = [f"tests/test_{topic}.py" for topic in mutation.tests.split()]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--maxfail={KILLS}", *files]
        # Compiling takes longer than all other tests, and no mutation is there for it.
        done = subprocess.run([*command, "-k", "not compiled"], cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode not in (0, 1):
            raise RuntimeError(f"expected tests that pass or fail, found that they cannot run:\n{done.stdout[-3000:]}")
        lines = [line for line in done.stdout.splitlines() if line.startswith("FAILED ")]
    return sorted({line.split("::")[1].split(" - ")[0].split("[")[0] for line in lines})


def main(part: str = "") -> int:
    """Print which tests kill each mutation; returns how many of them survive."""
    survivors = 0
    for mutation in [NONE, *MUTATIONS]:
        if part not in mutation.name:
            continue
        found = failures(mutation)
        survivors += bool(found) if mutation is NONE else not found
        told = ", ".join(found) or ("passes" if mutation is NONE else "SURVIVES")
        sys.stdout.write(f"{mutation.name:40} {told}\n")
        sys.stdout.flush()
    return survivors


if __name__ == "__main__":
    sys.exit(bool(main(*sys.argv[1:])))
