"""Peers that are installed: one virtual environment each under `.peers/`, made when first asked for.

A peer is called through a driver script that runs in the peer's own interpreter. Arrays go in and out as .npz files,
everything else comes back as the last line of its standard output, in JSON. The driver itself takes the time, so that
starting Python and importing the peer is never counted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FOLDER = ROOT / ".peers"


class PeerMissing(Exception):  # noqa: N818 - a state of the machine, not a mistake
    """The environment of a peer could not be made; the message says why."""


def interpreter(name: str) -> Path:
    """Python with the packages of `<name>.txt`; installs them on the first call and when that file has changed."""
    folder, listed = FOLDER / name, HERE / f"{name}.txt"
    python, stamp = folder / "bin" / "python", folder / "installed.txt"
    wanted = listed.read_text(encoding="utf-8") + (ROOT / "constraints.txt").read_text(encoding="utf-8")
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return python
    print(f"installing {name} into {folder.relative_to(ROOT)} ...", file=sys.stderr, flush=True)
    _run([sys.executable, "-m", "venv", "--clear", str(folder)])
    _run([str(python), "-m", "pip", "install", "-qq", "--no-deps", "-r", str(listed)])
    stamp.write_text(wanted, encoding="utf-8")
    return python


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        raise PeerMissing(f"`{' '.join(command[1:4])}` failed: {last}")


def call(name: str, arrays: Mapping[str, Tensor], *options: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Run `drive_<name>.py` on arrays; returns what it printed and the arrays it wrote.

    Raises:
        PeerMissing: the peer could not be installed, or its driver failed.
    """
    python = interpreter(name)
    with tempfile.TemporaryDirectory() as place:
        source, target = Path(place) / "in.npz", Path(place) / "out.npz"
        np.savez(source, **{key: value.numpy() for key, value in arrays.items()})
        command = [str(python), str(HERE / f"drive_{name}.py"), str(source), str(target), *options]
        threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}  # as many as we take ourselves
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=place, check=False, env={**os.environ, **threads}
        )
        if done.returncode:
            raise PeerMissing(f"the driver of {name} failed:\n{done.stderr.strip()[-2000:]}")
        told = json.loads(done.stdout.strip().splitlines()[-1])
        with np.load(target, allow_pickle=False) as found:
            return told, {key: torch.from_numpy(found[key]) for key in found.files}
