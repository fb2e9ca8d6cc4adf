"""Runs that are interrupted: nothing finished is lost, and the end is the same as without interruption."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from onebasin import Population
from onebasin.errors import InputError
from onebasin.inference import driver as loop
from onebasin.inference.journal import read_info
from onebasin.inference.sample import by_chain
from onebasin.storage import read_tensors, write_tensors
from tests.interrupted_run import OPTIONS, problem
from tests.judging import sample

HERE = Path(__file__).resolve().parents[1]


def same(a: Population, b: Population) -> bool:
    facts = torch.equal(a.chain, b.chain) and torch.equal(a.log_density, b.log_density)
    return facts and all(torch.equal(a.tensor(name), b.tensor(name)) for name in a.names)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("method", list(OPTIONS))
def test_killed_ten_times_and_resumed_it_draws_the_same(method: str, tmp_path: Path) -> None:
    command = [sys.executable, str(HERE / "interrupted_run.py"), method, str(tmp_path / "killed"), "10"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE.parent, timeout=250, check=True)
    assert int(done.stdout.split()[-1]) == 10, "the run must be long enough to be killed ten times"
    model, data = problem()
    whole = sample(model, data, method, chains=3, seed=5, noise=0.1, path=tmp_path / "whole", **OPTIONS[method])
    assert same(by_chain(Population.open(tmp_path / "killed")), whole)
    a, b = read_info(tmp_path / "killed"), read_info(tmp_path / "whole")
    assert a.keys() == b.keys()
    for name in a:  # NaN stands where an entry is told once only: bit for bit the same numbers, and the same gaps
        assert torch.allclose(a[name], b[name], rtol=0, atol=0, equal_nan=True)
    assert not Population.open(tmp_path / "killed").check()


def test_control_c_keeps_every_finished_draw(tmp_path: Path) -> None:
    code = (
        "\n"
        "import signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it\n"
        "from tests.interrupted_run import *\n"
        "model, data = problem()\n"
        "told = lambda done, total, text: print(text, flush=True)\n"
        "method = ob.HMC(draws=100000, warmup=5, leapfrog=3, epochs=1)\n"
        f"ob.sample(model, data, method, chains=3, noise=0.1, path={str(tmp_path / 'run')!r}, progress=told,\n"
        "          compile=False)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=HERE.parent
    )
    assert process.stdout is not None
    told = next(int(line.split(" draws")[0].split()[-1]) for line in process.stdout if " draws of" in line)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in errors
    assert told > 0
    assert len(Population.open(tmp_path / "run")) >= told


def test_a_run_in_memory_and_on_disk_draws_the_same(tmp_path: Path) -> None:
    model, data = problem()
    options = {"chains": 3, "noise": 0.1, "draws": 7, "warmup": 5, "leapfrog": 3, "epochs": 2}
    memory = sample(model, data, "hmc", **options)
    disk = sample(model, data, "hmc", path=tmp_path / "run", **options)
    assert same(memory, disk)
    assert memory.provenance["diagnostics"] == disk.provenance["diagnostics"]


def test_a_finished_run_is_returned_and_makes_more_draws(tmp_path: Path) -> None:
    model, data = problem()
    options = {"chains": 2, "noise": 0.1, "warmup": 5, "leapfrog": 3, "epochs": 2, "seed": 1}
    first = sample(model, data, "hmc", path=tmp_path / "run", draws=30, **options)
    assert same(first, sample(model, data, "hmc", path=tmp_path / "run", draws=30, **options))
    more = sample(model, data, "hmc", path=tmp_path / "run", draws=37, **options)
    whole = sample(model, data, "hmc", draws=37, **options)
    for chain in range(2):
        a, b = more[(more.chain == chain).nonzero()[:, 0]], whole[(whole.chain == chain).nonzero()[:, 0]]
        assert len(a) == 37
        assert torch.equal(a.tensor("0.weight"), b.tensor("0.weight"))


def test_a_run_of_fewer_chains_than_a_batch_has_is_reopened(tmp_path: Path) -> None:
    model, data = problem()
    run = {"chains": 2, "chains_per_batch": 5, "seed": 5, "noise": 0.1, "path": tmp_path / "run", "epochs": 1}
    first = sample(model, data, "ensemble", **run)
    assert same(sample(model, data, "ensemble", **run), first)


def test_what_cannot_be_resumed_is_refused(tmp_path: Path) -> None:
    model, data = problem()
    options = {"noise": 0.1, "draws": 2, "warmup": 2, "leapfrog": 2, "epochs": 1}
    sample(model, data, "hmc", path=tmp_path / "run", **options)
    with pytest.raises(
        InputError, match=r"another seed: 0, found 1 now; give the same .* choose another path, or delete it"
    ):
        sample(model, data, "hmc", path=tmp_path / "run", seed=1, **options)
    with pytest.raises(InputError, match="another noise"):
        sample(model, data, "hmc", path=tmp_path / "run", **{**options, "noise": 0.2})
    with pytest.raises(InputError, match="another data"):
        sample(model, (data[0] + 1, data[1]), "hmc", path=tmp_path / "run", **options)
    with pytest.raises(InputError, match="another architecture"):
        sample(nn.Linear(1, 1), data, "hmc", path=tmp_path / "run", **options)
    with pytest.raises(InputError, match="another method: 'hmc', found 'ensemble'"):
        sample(model, data, "ensemble", path=tmp_path / "run", noise=0.1)
    with pytest.raises(InputError, match="another leapfrog: 2, found 3"):
        sample(model, data, "hmc", path=tmp_path / "run", **{**options, "leapfrog": 3})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match="not empty"):
        sample(model, data, "hmc", path=tmp_path / "other", **options)


def test_a_checkpoint_is_written_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_CHECKPOINT_SECONDS", 0.0)
    model, data = problem()
    seen = []

    def told(done: int, total: int, text: str) -> None:
        seen.append((done, total))
        assert (tmp_path / "run" / "run" / "definition.json").is_file()

    sample(model, data, "hmc", noise=0.1, path=tmp_path / "run", progress=told, draws=3, warmup=4, leapfrog=3, epochs=2)
    assert list((tmp_path / "run" / "run").glob("state-*"))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1]


def test_a_run_of_0_1_goes_on(tmp_path: Path) -> None:
    """As 0.1 stored it: modes, lanes, only the options that were given, by their old names, and `rest` in States."""
    model = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    _, data = problem()
    options = {"chains": 2, "noise": 0.1, "warmup": 5, "leapfrog": 3, "epochs": 2, "lr": 0.01, "lr_schedule": "cosine"}
    sample(model, data, "hmc", path=tmp_path / "run", draws=3, **options)
    file = tmp_path / "run" / "run" / "definition.json"
    definition = json.loads(file.read_text())
    definition["modes"], definition["lanes"] = definition.pop("chains"), definition.pop("chains_per_batch")
    given = {"draws": 3, "warmup": 5, "leapfrog": 3, "epochs": 2, "rate": 0.01, "schedule": "cosine"}
    file.write_text(json.dumps({**definition, "options": given, "density": {"noise": 0.1}}))
    state = tmp_path / "run" / "run" / "state-u000000.safetensors"
    tensors, facts = read_tensors(state)
    old = {name.replace("buffers/", "rest/"): value for name, value in tensors.items()}
    assert old.keys() != tensors.keys()
    write_tensors(state, old, facts)
    more = sample(model, data, "hmc", path=tmp_path / "run", draws=5, **options)
    assert same(more, sample(model, data, "hmc", draws=5, **options))
    with pytest.raises(InputError, match=r"another lr: 0.01, found 0.001"):
        sample(model, data, "hmc", path=tmp_path / "run", draws=5, **{**options, "lr": 0.001})
