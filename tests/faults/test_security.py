"""Files of strangers: nothing in them is run, none hangs, fills memory or disk, or ends in an error of others."""

import ast
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import tests.malicious as malicious
from onebasin import Population, discover
from onebasin.cli import data as cli_data
from onebasin.data.cifar import read_pickle
from onebasin.data.load import load as load_data
from onebasin.errors import DiskError, InputError, OnebasinError, StorageError, SymmetryError, UnsafeFileError
from onebasin.inference.journal import read_definition
from onebasin.population.check import inspect_file
from onebasin.posterior.posterior import load_posterior
from onebasin.reporting.page import page
from onebasin.reporting.record import Axis, Figure, Panel, Record, Section, Series, read_record, write_record
from onebasin.reporting.write import write_report
from onebasin.symmetry.group import Symmetry
from tests.judging import sample

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
PACKAGES = (ROOT / "onebasin", ROOT / "onebasin_papers")
SOURCES = {
    path: ast.parse(path.read_text(encoding="utf-8")) for package in PACKAGES for path in sorted(package.rglob("*.py"))
}
Run = Callable[..., tuple[int, str, str]]
BUG = 1  # the exit code of what is no error of ours


def named(path: Path) -> str:
    """A source as docs/security.md names it: below onebasin/, or with the name of the other package."""
    return path.relative_to(ROOT / "onebasin" if (ROOT / "onebasin") in path.parents else ROOT).as_posix()


@pytest.fixture
def marker(tmp_path: Path) -> Iterator[Path]:
    """A folder that exists once something was run."""
    place = tmp_path / "marker"
    yield place
    assert not place.exists(), "a file ran code"


@contextmanager
def within(seconds: int) -> Iterator[None]:
    def late(number: int, frame: object) -> None:
        raise TimeoutError(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def use(path: Path) -> None:
    """What a user does with networks."""
    found = Population.open(path)
    found.check(finite=True)
    found.member(0)
    found.stacked()


# ---------------------------------------------------------------------- torch files


def test_no_torch_file_runs_anything(tmp_path: Path, marker: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    files = list(malicious.torch_files(folder, marker))
    assert len(files) > 35
    for path in files:
        with within(10), pytest.raises((UnsafeFileError, StorageError)):
            Population.open(path)
        assert inspect_file(path).state == "damaged"
        assert not marker.exists(), path.name
    with pytest.raises((UnsafeFileError, StorageError)):
        Population.open(folder)


@pytest.mark.parametrize("name", ["mkdir", "exec", "eval", "loads", "nested in a list", "setstate"])
def test_these_values_do_act_where_they_are_let(tmp_path: Path, name: str) -> None:
    goal = tmp_path / "made"
    pickle.loads(pickle.dumps(malicious.payloads(goal)[name]))
    assert goal.exists()


@pytest.mark.parametrize("name", ["inst", "obj", "stack global"])
def test_these_pickles_do_act_where_they_are_let(tmp_path: Path, name: str) -> None:
    goal = tmp_path / "made"
    pickle.loads(malicious.bare_pickles(goal)[name])
    assert goal.exists()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_tensors_that_are_more_than_they_weigh_are_refused(tmp_path: Path) -> None:
    for path in malicious.swollen_tensors(tmp_path):
        with within(10), pytest.raises(UnsafeFileError, match=path.name):
            use(path)


def test_tied_weights_are_not_taken_for_a_bomb(tmp_path: Path) -> None:
    shared = torch.randn(1000, 1000, generator=torch.Generator().manual_seed(0))
    torch.save({f"w{number}": shared for number in range(5)}, tmp_path / "tied.pt")
    assert len(Population.open(tmp_path / "tied.pt").names) == 5


def test_keys_with_one_hash_do_not_keep_the_reader_busy(tmp_path: Path) -> None:
    path = malicious.colliding_keys(tmp_path / "c.pt", 200_000)  # torch.load alone: a quarter of an hour
    with within(10), pytest.raises(UnsafeFileError, match="keep its reader busy"):
        Population.open(path)
    keys = b"".join(b"\x8a\x0c" + (place * (2**61 - 1)).to_bytes(12, "little") + b"N" for place in range(1, 200_000))
    with within(10), pytest.raises(UnsafeFileError, match="keep its reader busy"):
        read_pickle(b"\x80\x02}(" + keys + b"u.", "here")


@pytest.mark.parametrize("name", malicious.colliding_tuples(1))
def test_tuples_with_one_hash_do_not_keep_the_reader_busy(tmp_path: Path, name: str) -> None:
    path = malicious.zipped_pickle(tmp_path / "t.pt", malicious.colliding_tuples(10_000)[name])
    with within(10), pytest.raises(UnsafeFileError, match="may share a hash"):
        Population.open(path)
    old = tmp_path / "old.pth"  # the same in a file of the old format, whose third pickle is read by the same code
    old.write_bytes(b"\x80\x02K\x01." * 3 + malicious.colliding_tuples(10_000)[name])
    with within(10), pytest.raises(UnsafeFileError, match="may share a hash"):
        Population.open(old)


@pytest.mark.parametrize("depth", [500, 200_000])
def test_a_deep_key_neither_crashes_the_interpreter_nor_is_a_bug(tmp_path: Path, run: Run, depth: int) -> None:
    path = malicious.zipped_pickle(tmp_path / "deep.pt", malicious.deep_key(depth))
    with within(10), pytest.raises(UnsafeFileError, match="100 deep"):
        Population.open(path)
    assert run("check", path)[0] == StorageError.exit_code


def test_endless_instructions_are_not_followed_to_their_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onebasin.storage.torch_file.STEPS", 10_000)
    path = malicious.zipped_pickle(tmp_path / "long.pt", b"\x80\x02" + b"N0" * 50_000 + b"}.")
    with pytest.raises(UnsafeFileError, match="more than 10,000 instructions"):
        Population.open(path)


def test_an_honest_checkpoint_of_many_tensors_is_read(tmp_path: Path) -> None:
    """Moments, seeds, sets and tuples as keys in their usual numbers, in both formats."""
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(200)])
    optimiser = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimiser.step()
    beside = {"seeds": [2**63 + number for number in range(50)], "places": {(1, 2): 3.5}, "seen": {1, 2, 3}}
    content = {"state_dict": model.state_dict(), "optimizer": optimiser.state_dict(), **beside}
    for legacy in (False, True):
        torch.save(content, tmp_path / "ok.pt", _use_new_zipfile_serialization=not legacy)
        assert len(Population.open(tmp_path / "ok.pt").names) == 400


@pytest.mark.parametrize("scalars", [False, True])
def test_a_header_of_endless_tensors_is_refused_at_once(tmp_path: Path, scalars: bool) -> None:
    path = malicious.many_tensors(tmp_path / "many.safetensors", 60_000, scalars=scalars)
    with within(10), pytest.raises(StorageError, match="at most 50,000 tensors"):
        Population.open(path)
    member = tarfile.TarInfo("many.safetensors")
    archive = malicious.tar_file(tmp_path / "many.tar", [(member, path.read_bytes())], honest=False)
    with within(10), pytest.raises(StorageError, match="60,000 tensors"):
        Population.open(archive)


def test_links_that_lead_to_each_other_are_no_bug(tmp_path: Path, run: Run) -> None:
    first, second = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    first.symlink_to(second)
    second.symlink_to(first)
    folder = tmp_path / "folder"
    folder.symlink_to(folder)
    for words in (
        ("check", first),
        ("check", folder),
        ("align", first, "-o", tmp_path / "out"),
        ("import", folder, "-o", tmp_path / "out"),
        ("merge", first, second, "-o", tmp_path / "m.safetensors", "--reference", "none"),
        ("align", tmp_path / "a.safetensors", "-o", folder),
        ("compact", first, "-o", second),
    ):
        code, _, err = run(*words)
        assert code not in (0, BUG), f"{words[0]}: {err}"


def test_a_batch_of_cifar_with_endless_lengths_is_refused_at_once() -> None:
    long = b"\x8b" + (10**6).to_bytes(4, "little") + b"\x7f" * 10**6 + b"q\x01"
    array = b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n)R(K\x01(" + long + b"h\x01" * 10_000 + b"t"
    array += b"cnumpy\ndtype\nU\x02u1\x85R\x89U\x01xtb."
    with within(5), pytest.raises(StorageError, match="without a shape"):
        read_pickle(array, "here")


# ---------------------------------------------------------------------- safetensors, archives, arrays


@pytest.mark.parametrize("name", malicious.bad_headers())
def test_a_header_that_lies_is_refused(tmp_path: Path, name: str) -> None:
    header, body, length = malicious.bad_headers()[name]
    for file in ("x.safetensors", "shard-00000-aa.safetensors"):
        path = malicious.safetensors_file(tmp_path / file, header, body, length)
        with within(10), pytest.raises(OnebasinError):
            use(path)
        with pytest.raises(OnebasinError):
            load_posterior(path)


@pytest.mark.parametrize("ending", ["tgz", "tar"])
@pytest.mark.parametrize("name", malicious.bad_members(Path("/x")))
def test_an_archive_with_a_strange_member_is_refused(tmp_path: Path, name: str, ending: str, marker: Path) -> None:
    member = malicious.bad_members(marker)[name]
    path = malicious.tar_file(tmp_path / f"a.{ending}", [(member, b"")])
    before = sorted(tmp_path.iterdir())
    with within(10), pytest.raises((UnsafeFileError, StorageError)):
        use(path)
    assert sorted(tmp_path.iterdir()) == before, "something was unpacked"


CONFINED = """
import resource, sys, time
from onebasin import Population
from onebasin.data import load
from onebasin.errors import OnebasinError
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + (2 << 30)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for path in sys.argv[1:]:
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    try:
        load(path) if path.endswith(".npz") else Population.open(path).stacked()
        said = "accepted"
    except OnebasinError as error:
        said = "refused"
    more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(said, f"{more:.0f}", f"{time.perf_counter() - began:.1f}", path)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux to limit memory")
def test_bombs_take_neither_memory_nor_time(tmp_path: Path) -> None:
    bombs = [malicious.packed_bomb(tmp_path / "zeros.tgz", 1 << 26), malicious.pax_bomb(tmp_path / "pax.tgz", 1 << 26)]
    bombs += [malicious.zipped_pickle(tmp_path / "packed.pt", b"\x80\x02}q\x00." + bytes(1 << 26), 8)]
    bombs += [malicious.side_bomb(tmp_path / f"side-{n}.pt", name, 1 << 27) for n, name in enumerate(malicious.SIDES)]
    bombs += list(malicious.npz_files(tmp_path, tmp_path / "marker"))
    small = [path.stat().st_size for path in bombs]
    assert max(small) < 2 << 20
    command = [sys.executable, "-c", CONFINED, *map(str, bombs)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=True)
    rows = [line.split(" ", 3) for line in done.stdout.splitlines()]
    assert len(rows) == len(bombs)
    for said, megabytes, seconds, path in rows:
        assert said == "refused", path
        assert float(megabytes) < 150, path
        assert float(seconds) < 10, path
    assert not (tmp_path / "marker").exists()


def test_an_array_of_objects_is_not_unpickled(tmp_path: Path, marker: Path) -> None:
    values = np.array([malicious.Runs(os.mkdir, str(marker))], dtype=object)
    np.savez(tmp_path / "d.npz", inputs=values, targets=values)
    for read in (load_data, cli_data.read):
        with pytest.raises(UnsafeFileError):
            read(tmp_path / "d.npz")
    np.save(tmp_path / "e.npy", values)
    shutil.move(tmp_path / "e.npy", tmp_path / "e.npz")
    with pytest.raises(StorageError):
        load_data(tmp_path / "e.npz")


def test_a_picture_of_so_many_pixels_is_not_unpacked(tmp_path: Path) -> None:
    from PIL import Image

    np.savez(tmp_path / "labels.npz", y_train=np.zeros(3, int))
    Image.new("RGB", (3, 3)).save(tmp_path / "train_1.webp", lossless=True)
    content = bytearray((tmp_path / "train_1.webp").read_bytes())
    assert content[12:16] == b"VP8L"
    content[21:25] = b"\xff\xff\xff\x0f"  # 14 bits of width, 14 bits of height
    (tmp_path / "train_1.webp").write_bytes(content)
    with within(10), pytest.raises(StorageError, match=r"train_1\.webp"):
        load_data(tmp_path)


# ---------------------------------------------------------------------- JSON


def read_symmetry_file(folder: Path) -> None:
    Symmetry.from_json((folder / "symmetry.json").read_text(encoding="utf-8"))


JSON_DOORS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "manifest": ("population.json", Population.open),
    "record": ("record.json", read_record),
    "definition": ("run/definition.json", read_definition),
    "symmetry": ("symmetry.json", read_symmetry_file),
}


@pytest.mark.parametrize("door", JSON_DOORS)
@pytest.mark.parametrize("name", malicious.json_texts())
def test_json_that_means_harm_is_refused(tmp_path: Path, door: str, name: str) -> None:
    file, read = JSON_DOORS[door]
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(malicious.json_texts()[name], encoding="utf-8")
    with within(10), pytest.raises((StorageError, SymmetryError)):
        read(tmp_path)


# ---------------------------------------------------------------------- the command line


def model_file(folder: Path) -> str:
    (folder / "model.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def factory():\n    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))\n"
        "def example_input():\n    return torch.zeros(2, 3)\n"
    )
    return f"{folder / 'model.py'}:factory"


@pytest.mark.usefixtures("restored_imports")
def test_no_verb_calls_a_strange_file_a_bug(tmp_path: Path, run: Run, marker: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    torch.save({"w": malicious.Runs(os.mkdir, str(marker))}, folder / "a.pt")
    malicious.safetensors_file(folder / "b.safetensors", {"\x1b[2J": malicious.tensor([1], 0, 4)}, bytes(4))
    malicious.tar_file(folder / "c.tgz", [(malicious.bad_members(marker)["symbolic link"], b"")])
    (folder / "d.json").write_text("[" * 100_000)
    malicious.zipped_arrays(folder / "e.npz", pickle.dumps(malicious.Runs(os.mkdir, str(marker))))
    model, symmetry = model_file(tmp_path), tmp_path / "symmetry.json"
    symmetry.write_text(
        discover(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.zeros(2, 3)).to_json()
    )
    for path in sorted(folder.iterdir()):
        calls = [
            ("check", path),
            ("align", path, "--symmetry", symmetry, "--output", tmp_path / "out"),
            ("discover", model, "--weights", path),
            ("compare", path, path, "--symmetry", symmetry),
            ("evaluate", model, path, path),
            ("align", path, "--symmetry", path, "--output", tmp_path / "out"),
            ("report", path),
        ]
        for arguments in calls:
            code, out, err = run(*arguments)
            assert code not in (0, BUG), (arguments, err)
            assert "\x1b" not in out + err, arguments
            assert not marker.exists(), arguments


def test_a_terminal_is_not_steered_by_names(tmp_path: Path, run: Run) -> None:
    save_file({"w": torch.ones(1)}, tmp_path / "a.safetensors")
    (tmp_path / "\x1b[31mred").mkdir()
    (tmp_path / "\x1b[31mred" / "b.safetensors").write_bytes(b"none")
    code, _, err = run("check", tmp_path / "\x1b[31mred" / "missing")
    assert code not in (0, BUG)
    assert "\x1b" not in err


# ---------------------------------------------------------------------- nothing is imported that nobody named


def test_code_that_a_file_names_is_not_imported(tmp_path: Path, marker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "evil.py").write_text(f"import os\nos.mkdir({str(marker)!r})\ndef factory(): pass\n")
    named = {"model": "evil.py:factory", "module": "evil", "factory": f"{tmp_path / 'evil.py'}:factory"}
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    state = {name: value.detach() for name, value in model.state_dict().items()}
    Population.from_states([state, state], provenance=named).save(tmp_path / "population")
    opened = Population.open(tmp_path / "population")
    assert opened.provenance["model"] == "evil.py:factory"
    found = discover(model, torch.zeros(1, 2))
    told = {**json.loads(found.to_json()), **named}
    Symmetry.from_json(json.dumps(told))
    record = Record("evil", "evil", ("evil.py:factory",), (), "onebasin discover evil.py:factory")
    write_record(record, tmp_path / "r.json")
    write_report(read_record(tmp_path / "r.json"), tmp_path / "page")
    (tmp_path / "population" / "alignment.json").write_text(json.dumps(named))
    Population.open(tmp_path / "population").check()
    assert "evil" not in sys.modules


def test_only_these_files_import_what_a_text_names() -> None:
    importers = {
        named(path)
        for path, tree in SOURCES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "exec_module")
    }
    assert importers <= {
        "__init__.py",  # names of our own packages
        "storage/__init__.py",  # names of its own files
        "cli/main.py",  # names of our own verbs
        "cli/work/reproduce.py",  # names of our own studies
        "population/hub.py",  # huggingface_hub
        "alignment/assignment.py",  # one file of scipy, by its own name
        "population/population.py",  # our own predict, which stands above it
        "cli/load.py",  # what the user named on the command line
    }
    users = [path for path in SOURCES if "onebasin.cli.load" in path.read_text(encoding="utf-8")]
    assert {named(path).split("/")[0] for path in users} == {"cli"}


# ---------------------------------------------------------------------- nothing is written elsewhere


def test_links_in_a_strangers_folder_are_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("keep me")
    run_folder = tmp_path / "run"
    (run_folder / "run").mkdir(parents=True)
    (run_folder / "run" / "lock").symlink_to(precious)
    x = torch.linspace(-1, 1, 8)[:, None]
    with pytest.raises(DiskError, match="is a link"):
        sample(nn.Linear(1, 1), (x, x), "ensemble", chains=1, draws=1, epochs=1, noise=0.1, path=run_folder)
    lines = Panel("lines", "", Axis("x"), Axis("y"), (Series("s", (0.0, 1.0), (1.0, 2.0)),))
    record = Record("n", "T", (), (Section("s", "Q", (), (Figure("f", "F", "", (lines,)),)),), "c")
    study = tmp_path / "study"
    (study / "figures").mkdir(parents=True)
    write_record(record, study / "record.json")
    for name in ("record.json.part", "report.html", "report.html.part", "figures/f.svg", "figures/f.pdf"):
        (study / name).symlink_to(precious)
    write_record(record, study / "record.json")
    write_report(read_record(study), study)
    assert precious.read_text() == "keep me"
    assert not (study / "report.html").is_symlink()
    shutil.rmtree(study / "figures")
    (study / "figures").symlink_to(tmp_path)
    with pytest.raises(DiskError, match="is a link"):
        write_report(read_record(study), study)


PIPES = [
    "population.json",
    "shard-00000-aa.safetensors",
    "a.safetensors",
    "a.pt",
    "a.tgz",
    "record.json",
    "train_1.webp",
]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
@pytest.mark.parametrize("name", PIPES)
def test_a_pipe_in_a_strangers_folder_is_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    np.savez(tmp_path / "labels.npz", y_train=np.zeros(3, int))
    for read in (Population.open, read_record, load_data, read_definition):
        with within(5):
            try:
                read(tmp_path)
            except (StorageError, InputError):
                continue
            assert read is read_definition  # there is none, which is said by None


def test_an_endless_manifest_is_not_read(tmp_path: Path) -> None:
    for name, read in (("population.json", Population.open), ("record.json", read_record)):
        with (tmp_path / name).open("wb") as file:
            file.truncate(1 << 40)  # takes no room on the disk
        with within(5), pytest.raises(StorageError, match="endless"):
            read(tmp_path)


# ---------------------------------------------------------------------- the page


class Watch(HTMLParser):
    """Notes everything on a page that could act."""

    def __init__(self) -> None:
        super().__init__()
        self.acts: list[str] = []
        self.scripts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        if tag in ("iframe", "object", "embed", "form", "base", "link", "foreignobject", "animate", "set"):
            self.acts.append(tag)
        for name, value in attrs:
            goes = name in ("href", "xlink:href", "src", "action", "formaction", "srcdoc", "data")
            if name.startswith("on") or (goes and not re.match(r"#[\w-]+$|data:image/png;base64,", value or "")):
                self.acts.append(f"{tag} {name}={value}")


ATTACKS = (
    "<script>document.title='x'</script>",
    "\"onmouseover=\"alert(1)\" x=\"",
    "'onload='alert(1)",
    "]]><script>alert(1)</script>",
    "javascript:alert(1)",
    "<svg><animate onbegin=alert(1)>",
    "</svg></title></style></script><img src=x onerror=alert(1)>",
    "<!--<script>",
    "$\\frac{\\input{/etc/passwd}}{2}$",
    "$" + "{" * 5000,
    "\\write18{touch x}",
    "url(javascript:alert(1))",
    "a\x1b[2Jb\x00\ud800\u202e",
)  # fmt: skip


@pytest.mark.parametrize("text", ATTACKS)
def test_words_of_a_record_never_act(text: str) -> None:
    axis = Axis(text, names=(text, text))
    panel = Panel("bars", text, axis, Axis(text), (Series(text, (0.0, 1.0), (1.0, 2.0)),))
    section = Section(text, text, (text, f"`{text}`"), (Figure(text, text, text, (panel,)),), command=text)
    watch = Watch()
    watch.feed(page([Record(text, text, (text,), (section,), text, {text: text}, {text: text}, {text: text})]))
    assert watch.acts == []
    assert watch.scripts == 1  # our own, allowed by its hash


# ---------------------------------------------------------------------- the source

FORBIDDEN = {
    "eval", "exec", "compile", "__import__", "os.system", "os.popen", "pickle.load", "pickle.loads", "marshal.loads",
    "shelve.open", "yaml.load", "shutil.unpack_archive", "tempfile.mktemp", "torch.jit.load",
    "runpy.run_path", "np.fromfile", "pandas.read_pickle", "joblib.load", "torch.hub.load",
    "torch.serialization.add_safe_globals",
}  # fmt: skip
WIRE = "parallel"  # the package whose processes send functions to each other: a wire, never a file of a stranger


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_source_can_run_a_file(path: Path) -> None:
    for node in ast.walk(SOURCES[path]):
        if not isinstance(node, ast.Call):
            continue
        name, options = ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords}
        assert name not in FORBIDDEN or WIRE in path.parts, f"line {node.lineno}: {name}"
        assert name.split(".")[-1] not in ("extractall", "extract"), f"line {node.lineno}: archives are never unpacked"
        assert options.get("shell") != "True", f"line {node.lineno}"
        assert options.get("trust_remote_code", "False") == "False", f"line {node.lineno}"
        if name == "torch.load":
            assert options.get("weights_only") == "True", f"line {node.lineno}"
        if name in ("np.load", "numpy.load"):
            assert options.get("allow_pickle") == "False", f"line {node.lineno}"


READING = {
    "open", "read_text", "read_bytes", "safe_open", "urlopen", "ZipFile", "GzipFile", "from_file", "loads",
    "read_table",
}  # fmt: skip


def test_every_file_that_reads_files_is_in_the_table() -> None:
    readers = set()
    for path, tree in SOURCES.items():
        called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        own = {name for name in called if name.split(".")[-1] in READING}
        own -= {"Population.open", "os.open", "tarfile.open", "webbrowser.open"}
        if own | (called & {"torch.load", "np.load", "json.load"}):
            readers.add(named(path))
    listed = {name for name in re.findall(r"`([\w/]+\.py)`", PAGE) if not name.startswith("tests/")}
    assert readers - listed == set(), "docs/security.md, table of readers"
    assert listed <= {named(path) for path in SOURCES}, "some files are gone"
