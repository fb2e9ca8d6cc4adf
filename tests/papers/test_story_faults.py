"""What a hostile reader found in data, archives, records, reports and studies; each once broke something."""

from __future__ import annotations

import ast
import io
import math
import os
import pickle
import subprocess
import sys
import tarfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from safetensors.torch import save

import onebasin
from onebasin.cli.main import group
from onebasin.data.dataset import split
from onebasin.data.load import load
from onebasin.errors import DiskError, InputError, OnebasinError, StorageError
from onebasin.population.archive import networks_in, write_archives
from onebasin.population.population import Population
from onebasin.reporting.markdown import markdown
from onebasin.reporting.record import (
    Axis,
    Column,
    Figure,
    Number,
    Panel,
    Record,
    Rule,
    Section,
    Series,
    Table,
    read_record,
    write_record,
)
from onebasin.reporting.write import write_report
from onebasin_papers.numbers import mean_number
from onebasin_papers.study import Part, Settings, Study, Workspace, run_study

ROWS = 12
X = np.arange(2.0 * ROWS).reshape(ROWS, 2)
Y = np.arange(ROWS) % 2


def table(folder: Path, **arrays: Any) -> Path:
    np.savez(folder / "table.npz", **{"X": X, "y": Y, **arrays})
    return folder / "table.npz"


# Tables with published splits


def test_a_negative_row_number_is_no_row(tmp_path: Path) -> None:
    """-1, which pads short splits, is the last row: it stood in the training part too."""
    path = table(tmp_path, train_idx=np.arange(3, ROWS)[None], test_idx=np.array([[0, 1, -1]]))
    with pytest.raises(StorageError, match="each in one part only"):
        load(path)


@pytest.mark.parametrize(
    "arrays",
    [
        {"is_test": np.array([1, 0, 0])},
        {"test_mask": np.eye(3, dtype=bool)},
        {"X": X[:5], "is_test": Y},
        {"X": np.concatenate([X, X]), "is_test": Y},
        {"y": np.array(3), "is_test": Y},
        {"X": X[:0], "y": Y[:0], "is_test": Y[:0]},
        {"train_idx": np.arange(5), "test_idx": np.arange(5, ROWS)},
        {"test_idx": np.array([[0, 1]])},  # was ignored, and another division was made up
    ],
    ids=["short mask", "short masks", "few inputs", "many inputs", "one target", "nothing", "flat", "half a split"],
)
def test_arrays_that_do_not_fit_together_are_refused(tmp_path: Path, arrays: dict[str, Any]) -> None:
    with pytest.raises(StorageError, match=r"one row per example|train_idx beside test_idx"):
        load(table(tmp_path, **arrays))


@pytest.mark.parametrize("categories", [[-1] * ROWS, [10**12] * ROWS, [0.5] * ROWS, [math.nan] * ROWS])
def test_categories_that_cannot_be_columns_are_refused(tmp_path: Path, categories: list[float]) -> None:
    path = tmp_path / "mixed.npz"
    np.savez(path, X_num=X, X_cat=np.array(categories)[:, None], y=Y, is_test=Y)
    with pytest.raises(InputError, match=r"numbered from 0|one column per category|without large gaps"):
        load(path)


# Examples


def test_a_column_of_class_numbers_is_class_numbers(tmp_path: Path) -> None:
    """As Keras keeps those of CIFAR: (n, 1) is neither trained with nor kept in its shares."""
    np.savez(tmp_path / "column.npz", x=X, y=Y[:, None])
    found = load(tmp_path / "column.npz")
    assert found.train[1].shape == (9,)
    assert sorted(found.test[1].tolist()) in ([0, 0, 1], [0, 1, 1])


@pytest.mark.parametrize(("inputs", "targets"), [(X[:, :1], Y), (X, Y * 1.0)])
def test_training_and_test_examples_are_of_one_kind(tmp_path: Path, inputs: Any, targets: Any) -> None:
    np.savez(tmp_path / "two.npz", x=X, y=Y, x_test=inputs, y_test=targets)
    with pytest.raises(InputError, match="of one kind"):
        load(tmp_path / "two.npz")


def test_complex_numbers_do_not_lose_a_part_in_silence(tmp_path: Path) -> None:
    np.savez(tmp_path / "wave.npz", x=X + 1j, y=Y)
    for source in (tmp_path / "wave.npz", lambda: (X + 1j, Y)):
        with pytest.raises(InputError, match=r"expected (real )?numbers"):
            load(source)


def test_labels_that_no_integer_holds_are_a_sentence(tmp_path: Path) -> None:
    content = {"data": np.zeros((2, 3072), np.uint8), "labels": [1, 2**70]}
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps(content, 2))
    with pytest.raises(StorageError, match="labels"):
        load(tmp_path)


def test_a_folder_with_an_npz_file_names_the_remedy(tmp_path: Path) -> None:
    table(tmp_path)
    with pytest.raises(StorageError, match=r"path of the \.npz file itself"):
        load(tmp_path)


@pytest.mark.parametrize("share", [math.nan, -0.5, 1.5, math.inf])
def test_a_share_is_a_share(share: float) -> None:
    with pytest.raises(InputError, match="a share"):
        split(torch.arange(8.0), torch.arange(8), test=share)


# The network


# Archives


def packed(names: list[str]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name in names:
            content = save({"w": torch.ones(40, 40)})
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return made.getvalue()


def test_a_damaged_head_is_not_the_end_of_an_archive(tmp_path: Path) -> None:
    whole = packed(["a.safetensors", "b.safetensors", "c.safetensors"])
    damaged = bytearray(whole)
    damaged[whole.index(b"b.safetensors") + 2] ^= 1
    (tmp_path / "whole.tar").write_bytes(whole)
    (tmp_path / "damaged.tar").write_bytes(damaged)
    assert len(list(networks_in(tmp_path / "whole.tar"))) == 3
    with pytest.raises(StorageError, match="damaged"):
        list(networks_in(tmp_path / "damaged.tar"))


def test_networks_behind_the_end_of_an_archive_are_not_lost_in_silence(tmp_path: Path) -> None:
    (tmp_path / "both.tar").write_bytes(packed(["a.safetensors"]) + packed([f"{n}.safetensors" for n in range(4)]))
    with pytest.raises(StorageError, match="follows its end"):
        list(networks_in(tmp_path / "both.tar"))


@pytest.mark.parametrize("name", ["a\\b", "c:net"])
def test_no_archive_is_written_that_would_not_be_read(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="expected a name such as"):
        write_archives(Population.from_states([{"w": torch.ones(2)}]), tmp_path, name)


# Records and reports


def record(*items: Table | Figure) -> Record:
    return Record("r", "R", ("short",), (Section("s", "S?", ("so",), items),), "command")


def one_cell(number: Number, digits: int = 3) -> Table:
    return Table("t", "T", (Column("row"), Column("c", digits=digits)), (("a", number),))


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int64, int, float])
def test_numbers_of_numpy_are_numbers(tmp_path: Path, kind: Callable[[float], Any]) -> None:
    write_record(record(one_cell(Number(kind(2), error=kind(1)))), tmp_path / "record.json")
    assert read_record(tmp_path) == record(one_cell(Number(2.0, error=1.0)))


def test_what_is_no_number_is_refused_before_it_is_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="texts and numbers, found a Tensor"):
        write_record(record(one_cell(Number(torch.ones(())))), tmp_path / "record.json")  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_a_record_in_a_place_that_is_none_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "no").write_text("a file, not a folder")
    with pytest.raises(DiskError, match="choose another place"):
        write_record(record(), tmp_path / "no" / "record.json")


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_numbers_that_are_none_are_shown_as_missing(tmp_path: Path, value: float) -> None:
    shown = record(one_cell(Number(value, error=value, published=value)))
    page = write_report(shown, tmp_path, figures=False).read_text()
    assert "paper inf" not in page
    write_record(shown, tmp_path / "record.json")
    assert markdown(shown).count("–") == markdown(read_record(tmp_path)).count("–") == 1


@pytest.mark.parametrize("seconds", ["1e999", "-Infinity", "NaN", "1" + "0" * 400, "true"])
def test_a_number_that_no_float_holds_is_a_damaged_record(tmp_path: Path, seconds: str) -> None:
    write_record(record(one_cell(Number(0.123))), tmp_path / "record.json")
    text = (tmp_path / "record.json").read_text()
    (tmp_path / "record.json").write_text(text.replace("0.123", seconds))
    with pytest.raises(StorageError, match="should be"):
        read_record(tmp_path)


@pytest.mark.parametrize("digits", [-1, 16, 10**10])
def test_no_column_shows_more_digits_than_a_number_has(digits: int) -> None:
    with pytest.raises(InputError, match="digits"):
        Column("c", digits=digits)


def test_places_that_cannot_be_kept_are_refused_where_they_are_made() -> None:
    """They were written, and then no record could be read."""
    for wrong in ({"value": math.nan}, {"value": math.inf}, {"direction": "sideways"}):
        with pytest.raises(InputError, match="a rule has"):
            Rule("r", **wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="NaN or infinite"):
        Panel("heat", "", Axis("x"), Axis("y"), grid=((1.0, 2.0),), columns=(0.0, math.nan), rows=(0.0,))


def test_ids_of_the_page_itself_are_not_given_away(tmp_path: Path) -> None:
    drawn = Figure("tip", "F?", "c", (Panel("lines", "", Axis("x"), Axis("y"), (Series("a", (0.0,), (1.0,)),)),))
    shown = Record("content", "R", (), (Section("s", "S?", ("so",), (drawn,)),), "")
    page = write_report(shown, tmp_path, figures=False).read_text()
    assert page.count('id="content"') == 1
    assert 'id="tip"' not in page


# Studies


def study(part: Callable[[Workspace[Settings]], Section]) -> Study:
    return Study("s", "S", (Part("one", "One?", part),), lambda sections: [], {})


def test_a_section_is_kept_under_the_name_of_its_part(tmp_path: Path) -> None:
    """Under its own it was never found again: hours of work were neither kept nor shown."""
    calls: list[int] = []

    def run(workspace: Workspace[Settings]) -> Section:
        calls.append(1)
        return Section("another", "One?", ("so",))

    for _ in range(2):
        found = run_study(study(run), Workspace(Settings(), 0, tmp_path / "run"), "command")
        assert [section.name for section in found.sections] == ["one"]
    assert calls == [1]


def test_a_new_beginning_leaves_no_record_of_the_run_before(tmp_path: Path) -> None:
    def stop(workspace: Workspace[Settings]) -> Section:
        raise KeyboardInterrupt

    run_study(study(lambda workspace: Section("one", "?", ("so",))), Workspace(Settings(), 0, tmp_path), "command")
    with pytest.raises(KeyboardInterrupt):
        run_study(study(stop), Workspace(Settings(), 1, tmp_path), "command", fresh=True)
    with pytest.raises(StorageError, match="there is no record"):
        read_record(tmp_path)


@pytest.mark.parametrize("stored", ["", "5", "null", "[1]", "[]", '"text"'])
def test_a_damaged_plan_is_a_sentence(tmp_path: Path, stored: str) -> None:
    (tmp_path / "plan.json").write_text(stored)
    with pytest.raises(OnebasinError, match="--fresh"):
        run_study(study(lambda workspace: Section("one", "?", ("so",))), Workspace(Settings(), 0, tmp_path), "command")


def test_small_numbers_keep_their_digits() -> None:
    found = mean_number([1.0e-12, 3.0e-12])
    assert found.value == pytest.approx(2e-12, rel=1e-9)
    assert found.error == pytest.approx(1e-12, rel=1e-9)


# The command line


@pytest.mark.parametrize(("verb", "name"), [("demo", "demo"), ("reproduce", "compact"), ("reproduce", "symmetry")])
def test_help_names_the_parts_that_there_are(verb: str, name: str) -> None:
    text = " ".join(group.commands[verb].help.split())  # type: ignore[union-attr]
    names = ", ".join(part.name for part in import_module(f"onebasin_papers.{name}").STUDY.parts)
    assert f"Parts: {names}." in text


@pytest.mark.parametrize("encoding", ["utf-8:strict", "ascii:strict"])
def test_a_folder_of_any_name_is_reported(tmp_path: Path, encoding: str) -> None:
    folder = os.fsencode(tmp_path) + b"/caf\xe9"
    os.mkdir(folder)
    write_record(record(), os.fsdecode(folder + b"/record.json"))
    found = subprocess.run(
        [sys.executable, "-c", "from onebasin.cli.main import entry; entry()", "report", folder],
        env={**os.environ, "PYTHONIOENCODING": encoding},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (found.returncode, found.stderr) == (0, b"")
    if encoding.startswith("utf"):
        assert os.path.isfile(found.stdout.strip())


# The package


def test_the_package_goes_by_name_to_other_processes() -> None:
    """As notebooks send functions: with the modules that they mention."""
    assert pickle.loads(cloudpickle.dumps(onebasin)) is onebasin


def test_a_checker_does_not_believe_in_every_name() -> None:
    """It did, for a module with __getattr__ has whatever one asks for: only the interpreter may see it."""
    module = ast.parse(Path(onebasin.__file__).read_text(encoding="utf-8"))
    bound = [node.id for node in ast.walk(module) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    assert "__all__" in bound
    assert "__getattr__" not in bound
    assert not hasattr(onebasin, "algin")
