"""Every door through which a file enters onebasin: a valid example, and what a user would do with it.

A door builds a small folder, names the file in it that will be damaged, and uses the folder: it reads all there is,
computes with it and writes it again, as a file that is accepted must also be good for something.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import pickle
import shutil
import struct
import zlib
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from onebasin.alignment.align import align
from onebasin.cli import data as cli_data
from onebasin.cli.main import main
from onebasin.data.load import load as load_data
from onebasin.data.openml import read_openml
from onebasin.inference import Ensemble, sample
from onebasin.population.archive import write_archives
from onebasin.population.population import Population
from onebasin.posterior.fit import fit
from onebasin.posterior.posterior import load_posterior
from onebasin.posterior.pruning import Masks
from onebasin.reporting.page import page
from onebasin.reporting.record import (
    Axis,
    Column,
    Figure,
    Number,
    Panel,
    Record,
    Section,
    Series,
    Table,
    read_record,
    write_record,
)
from onebasin.state import state_of
from onebasin.storage.integrity import checksum
from onebasin.storage.integrity import seal as seal_texts
from onebasin.symmetry.discover import discover
from onebasin.symmetry.group import Symmetry

OUT = "out"  # below the folder of a door: what a use writes, removed after each file


@dataclass(frozen=True)
class Door:
    """One reader.

    Attributes:
        name: for tables.
        victim: the file that is damaged, below the folder.
        build: fills an empty folder.
        use: reads the folder and works with what it holds.
        seal: puts the checksum right that would refuse every damaged file.
        share: how many files it gets, relative to the others; slow uses get fewer.
    """

    name: str
    victim: str
    build: Callable[[Path], object]
    use: Callable[[Path], object]
    seal: Callable[[bytes], bytes] = lambda content: content
    share: float = 1.0


def network(seed: int = 0) -> nn.Sequential:
    """A small network with a batch norm: weights, statistics and an integer counter."""
    made = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).eval()
    chance = torch.Generator().manual_seed(seed)
    for value in made.parameters():
        value.data = torch.randn(value.shape, generator=chance)
    return made


def population() -> Population:
    """Four such networks in two chains."""
    states = [state_of(network(seed)) for seed in range(4)]
    return Population.from_states(states, chain=torch.tensor([0, 0, 1, 1]), log_density=torch.arange(4.0).double())


# ---------------------------------------------------------------------- networks


def check(path: Path) -> None:
    """What `onebasin check` says: whole or damaged, never that it has a bug."""
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as said:
        code = main(["check", str(path)])
    assert code != 1, said.getvalue()
    assert "\x1b" not in out.getvalue() + said.getvalue(), "the terminal is steered"


def _use_networks(path: Path, folder: Path) -> None:
    found = Population.open(path)
    repr(found)
    found.check(finite=True)
    for member in found[:8]:
        assert member.keys() == found.spec.keys()
    found.save(folder / OUT)
    Population.open(folder / OUT).stacked()


def _use_folder(folder: Path) -> None:
    check(folder / "population")
    _use_networks(folder / "population", folder)


def _networks_door(name: str, file: str, build: Callable[[Path], object]) -> Door:
    return Door(name, file, build, lambda folder: (check(folder / file), _use_networks(folder / file, folder)))


def _build_population(folder: Path) -> None:
    with Population.writer(
        folder / "population", population().spec, name="aa", provenance={"made": {"by": "fuzz"}}
    ) as writer:
        for number, state in enumerate(population()):
            writer.append(state, chain=number // 2, log_density=-1.0 * number)


def _build_archive(folder: Path, *, packed: bool) -> None:
    (made,) = write_archives(population(), folder, "tiny-net")
    content = made.read_bytes()
    (folder / ("a.tgz" if packed else "a.tar")).write_bytes(content if packed else gzip.decompress(content))
    shutil.rmtree(folder / "models")


def _save_torch(path: Path, *, legacy: bool) -> None:
    content = {"state_dict": state_of(network()), "epoch": 3, "best": [0.5, {"lr": 1e-3}]}
    torch.save(content, path, _use_new_zipfile_serialization=not legacy)


# ---------------------------------------------------------------------- what onebasin found


def _use_posterior(folder: Path) -> None:
    check(folder / "posterior.safetensors")
    found = load_posterior(folder / "posterior.safetensors")
    chance = torch.Generator().manual_seed(0)
    repr(found)
    drawn = found.draw(3, chance, statistics=False)
    found.log_density(drawn.member(0))
    assert found.mean.keys() == found.std.keys()
    found.save(folder / OUT / "again.safetensors")


def _build_posterior(folder: Path) -> None:
    fit(population(), "mixture", components=torch.tensor([0, 0, 1, 1])).save(folder / "posterior.safetensors")


def _use_masks(folder: Path) -> None:
    found = Masks.load(folder / "masks.safetensors")
    str(found)
    found.apply(population())
    found.save(folder / OUT / "again.safetensors")


@cache
def _symmetry() -> Symmetry:
    return discover(network(), torch.zeros(2, 3))


def _build_symmetry(folder: Path) -> None:
    (folder / "symmetry.json").write_text(_symmetry().to_json())


def _use_symmetry(folder: Path) -> None:
    found = Symmetry.from_json((folder / "symmetry.json").read_text(encoding="utf-8", errors="replace"))
    str(found), repr(found)
    element = found.random(0)
    moved = found.apply(element, state_of(network()))
    found.apply(found.invert(found.compose(element, element)), moved)
    Symmetry.from_json(found.to_json())


class _EnoughError(Exception):
    """Stops an alignment in the middle."""


def _build_journal(folder: Path) -> None:
    journal = import_module("onebasin.alignment.align")

    before, journal._SECONDS = journal._SECONDS, -1.0
    told: list[int] = []

    def stop(done: int, members: int, text: str) -> None:
        told.append(done)
        if len(told) > 5:
            raise _EnoughError

    try:
        align(population(), _symmetry(), path=folder / "aligned", progress=stop)
    except _EnoughError:
        pass
    finally:
        journal._SECONDS = before


def _use_journal(folder: Path) -> None:
    check(folder / "aligned.journal")
    shutil.copy(folder / "aligned.journal", folder / OUT / "aligned.journal")
    align(population(), _symmetry(), path=folder / OUT / "aligned")


def seal(content: bytes) -> bytes:
    """The file with checksums that fit its damaged tensors, as a forger would put them."""
    try:
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        told, body = header["__metadata__"], content[8 + length :]
        tensors = {
            name: body[slice(*entry["data_offsets"])] for name, entry in header.items() if name != "__metadata__"
        }
        if "checksums" in told:
            names = json.loads(told["checksums"])
            told["checksums"] = json.dumps({name: checksum(memoryview(tensors[name])) for name in names})
        if told.get("onebasin", "")[:1] == "{":  # a journal
            value = 0
            for name in sorted(tensors):
                value = zlib.crc32(tensors[name], zlib.crc32(name.encode(), value))
            told["onebasin"] = json.dumps({**json.loads(told["onebasin"]), "sum": value})
        told.pop("seal", None)
        header["__metadata__"] = seal_texts(told) if "checksums" in told else told
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text + body
    except Exception:
        return content  # too damaged to be forged


def _build_run(folder: Path) -> None:
    _sample(folder / "run", draws=2)


def _sample(path: Path, draws: int) -> None:
    sample(*_problem(), Ensemble(draws=draws, epochs=2, every=1, batch=5), chains=2, noise=0.1, seed=0, path=path)


def _problem() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    x = torch.linspace(-1, 1, 10)[:, None]
    return nn.Sequential(nn.Linear(1, 2), nn.Tanh(), nn.Linear(2, 1)), (x, torch.sin(3 * x))


def _use_run(folder: Path) -> None:
    check(folder / "run")
    shutil.copytree(folder / "run", folder / OUT / "run")
    _sample(folder / OUT / "run", draws=3)


# ---------------------------------------------------------------------- records


def _build_record(folder: Path) -> None:
    table = Table("t", "Table", (Column("a"), Column("b", better="lower", digits=2)), (("x", Number(0.5, 0.1, 0.4)),))
    lines = Panel(
        "lines", "", Axis("x"), Axis("y", "log"), (Series("s", (0.0, 1.0), (1.0, 2.0), (0.5, 1.0), (2.0, 3.0)),)
    )
    section = Section("s", "Question?", ("Answer `code`.",), (table, Figure("f", "F?", "So.", (lines,))))
    write_record(
        Record("n", "Title", ("One.",), (section,), "make it", {"seed": 0}, {"torch": "2"}), folder / "record.json"
    )


def _use_record(folder: Path) -> None:
    check(folder)
    assert "<script>alert" not in page([read_record(folder)])


# ---------------------------------------------------------------------- data


def _build_npz(folder: Path) -> None:
    np.savez(folder / "d.npz", inputs=np.arange(24.0).reshape(8, 3), targets=np.arange(8) % 2)


def _build_uci(folder: Path) -> None:
    rows = np.arange(12)
    indices = {"train_idx": rows[None, :9], "test_idx": rows[None, 9:]}
    np.savez_compressed(folder / "t.npz", X_num=np.eye(12), X_cat=rows[:, None] % 3, y=rows * 0.5, **indices)


def _use_data(path: Path) -> None:
    found = load_data(path)
    found.standardised()
    cli_data.read(f"{path}#0:test")


def _build_idx(folder: Path, *, packed: bool) -> None:
    pixels = bytes(range(96))
    for part in ("train", "t10k"):
        files = {
            f"{part}-images-idx3-ubyte": b"\0\0\x08\x03" + struct.pack(">3I", 6, 4, 4) + pixels,
            f"{part}-labels-idx1-ubyte": b"\0\0\x08\x01" + struct.pack(">I", 6) + bytes(range(6)),
        }
        for name, content in files.items():
            (folder / f"{name}.gz" if packed else folder / name).write_bytes(
                gzip.compress(content) if packed else content
            )


def _build_cifar(folder: Path) -> None:
    pixels = np.arange(2 * 3072, dtype=np.uint32).astype(np.uint8).reshape(2, 3072)
    batch = {b"data": pixels, b"labels": [3, 7], b"batch_label": b"testing"}
    for protocol, name in ((2, "data_batch_1"), (5, "test_batch")):
        (folder / name).write_bytes(pickle.dumps(batch, protocol=protocol))


def _build_binary(folder: Path) -> None:
    for name in ("data_batch_1.bin", "test_batch.bin"):
        (folder / name).write_bytes((b"\x03" + bytes(3072)) * 2)


def _build_mosaic(folder: Path) -> None:
    from PIL import Image

    pixels = np.zeros((32, 3200, 3), np.uint8)
    pixels[::3, ::5] = 200
    for part in ("train_1", "test"):
        Image.fromarray(pixels).save(folder / f"{part}.webp", lossless=True)
    np.savez(folder / "labels.npz", y_train=np.arange(100) % 10, y_test=np.arange(100) % 10)


def _build_openml(folder: Path) -> None:
    (folder / "openml").mkdir()
    arrays = {"inputs": np.ones((4, 3), "f4"), "targets": np.array([0, 1, 1, 0]), "classes": np.array(2)}
    np.savez(folder / "openml" / "weather.npz", **arrays)


def _use_openml(folder: Path) -> None:
    import os

    os.environ["ONEBASIN_CACHE"] = str(folder)
    read_openml("weather").dataset()


def _build_sums(folder: Path) -> None:
    _build_npz(folder)
    digest = hashlib.sha256((folder / "d.npz").read_bytes()).hexdigest()
    (folder / "SHA256SUMS").write_text(f"{digest}  d.npz\n")


def _build_examples(folder: Path) -> None:
    save_file({"inputs": torch.ones(4, 3), "targets": torch.zeros(4, dtype=torch.int64)}, folder / "d.safetensors")


def _use_examples(folder: Path) -> None:
    found = cli_data.read(str(folder / "d.safetensors"))
    assert found.targets is not None
    found.targets.sum()


def warm_up() -> None:
    """Do once, before there are children, what each of them would do again: imports, and one discovery."""
    _symmetry()
    with TemporaryDirectory() as name:
        for number, build in enumerate((_build_run, _build_record, _build_journal)):
            place = Path(name) / str(number)
            place.mkdir()
            build(place)
            if build is _build_record:
                _use_record(place)
