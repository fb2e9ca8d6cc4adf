"""Discovery over the battery: what is found against what was worked out by hand, the error of the proof, the cost.

One row per model. The export is what torch.export itself takes (tracing, without its own decomposition step); analysis
and proof (at the example and at others made out of it) are ours. Target: analysis + proof <= 1.5 x export + 1 s; the
last line counts decomposition as ours, too.

    python -m benchmarks.discovery [--only NAME ...] [--repeats N]
"""

import argparse
import itertools
import statistics
import sys
import time
import warnings
from collections import Counter

import torch

import onebasin as ob
from onebasin.functional.call import call_arguments, evaluation_mode
from onebasin.symmetry.discover import analyse
from onebasin.symmetry.trace import trace
from onebasin.symmetry.vary_inputs import variants
from onebasin.symmetry.verify import proven
from tests.models import BATTERY, GAPS, Case, missing

KINDS = ("scale", "sign", "norm-scale", "norm-sign")
FACTOR, EXTRA = 1.5, 1.0


def export_seconds(model: torch.nn.Module, inputs: object) -> float:
    """Time of torch.export alone, on the same model and input."""
    arguments, options = call_arguments(inputs)
    started = time.perf_counter()
    with evaluation_mode(model), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.export(model, arguments, options, strict=False)
    return time.perf_counter() - started


def measure(case: Case, repeats: int) -> dict[str, object]:
    """Best times of a few repeats (the machine is shared), and whether everything expected was found."""
    model, inputs = case.build(), case.inputs()
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    times: list[tuple[float, float, float, float]] = []
    for _ in range(repeats):
        export = export_seconds(model, inputs)
        marks = [time.perf_counter()]
        graph = trace(model, inputs)
        marks.append(time.perf_counter())
        draft = analyse(graph, shapes)
        marks.append(time.perf_counter())
        symmetry = proven(model, draft, inputs)
        for other in variants(model, inputs).others:
            symmetry = proven(model, symmetry, other, brief=True)
        marks.append(time.perf_counter())
        traced, analysed, proved = (later - earlier for earlier, later in itertools.pairwise(marks))
        times.append((export, max(traced - export, 0.0), analysed, proved))
    export, decompose, analysis, proof_time = (statistics.median(column) for column in zip(*times, strict=True))
    found = Counter(
        (s.size, s.copies, s.permutable, *[s.generators.count(kind) for kind in KINDS]) for s in symmetry.spaces
    )
    wanted = Counter(
        (e.size, e.copies, e.permutation and e.size > 1, e.scales, e.signs, e.norm_scales, e.norm_signs)
        for e in case.spaces
    )
    proof = ob.verify(model, symmetry, inputs, seed=7)
    right = found == wanted and proof.passed and bool(symmetry.unexplained) == case.unexplained
    part = case in GAPS and proof.passed
    ours = decompose + analysis + proof_time
    return {
        "name": case.name, "found": sum((found & wanted).values()), "expected": sum(wanted.values()),
        "error": proof.max_error, "export": export, "decompose": decompose, "analysis": analysis, "proof": proof_time,
        "ratio": (analysis + proof_time) / (FACTOR * export + EXTRA), "with": ours / (FACTOR * export + EXTRA),
        "verdict": "right" if right else "part (known gap)" if part else "WRONG",
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="names, or parts of names, of battery models")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    titles = (f"{'model':<26}", f"{'spaces':>8}", f"{'max error':>11}", f"{'export':>9}", f"{'decomp.':>9}")
    head = "".join((*titles, f"{'analysis':>10}", f"{'proof':>8}", f"{'of budget':>11}"))
    print(f"{head}  verdict\n{'-' * (len(head) + 9)}")
    cases = [case for case in (*BATTERY, *GAPS) if not options.only or any(part in case.name for part in options.only)]
    measure(cases[0], 1)  # the first export pays for imports
    rows = []
    for case in cases:
        if reason := missing(case):
            print(f"{case.name:<26}  skipped: {reason}")
            continue
        row = measure(case, options.repeats)
        rows.append(row)
        print(
            f"{row['name']:<26}{row['found']:>4}/{row['expected']:<3}{row['error']:>11.1e}{row['export']:>8.2f}s"
            f"{row['decompose']:>8.2f}s{row['analysis']:>9.2f}s{row['proof']:>7.2f}s{row['ratio']:>11.0%}"
            f"  {row['verdict']}",
            flush=True,
        )
    wrong = [row["name"] for row in rows if row["verdict"] == "WRONG"]
    right = sum(row["verdict"] == "right" for row in rows)
    slow = [row["name"] for row in rows if row["ratio"] > 1]
    slow_with = [row["name"] for row in rows if row["with"] > 1]
    part = len(rows) - right - len(wrong)
    print(f"\n{len(rows)} models: {right} right, {part} in part, wrong: {', '.join(wrong) or 'none'}")
    print(f"analysis + proof over 1.5 x export + 1 s: {', '.join(slow) or 'none'}")
    print(f"the same with decomposition counted as ours: {', '.join(slow_with) or 'none'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
