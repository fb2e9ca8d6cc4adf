"""Networks by name on the hub: against a server that speaks its protocol, and without one from the cache."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save

from onebasin.cli.main import main
from onebasin.errors import DiskError, InputError, OnebasinError, SpecError, StorageError, UnsafeFileError
from onebasin.population import hub as hub_cache
from onebasin.population import open as opening
from onebasin.population.archive import write_archives
from onebasin.population.import_networks import import_networks
from onebasin.population.population import Population
from onebasin.population.shard import read_manifest
from tests.hub_server import COMMIT, Hub, serving


def packed(numbers: range, folder: Path) -> bytes:
    states = [{"w": torch.tensor([float(number)])} for number in numbers]
    (path,) = write_archives(Population.from_states(states), folder, "mnist-optunet", first=numbers.start)
    return path.read_bytes()


def one(number: int, size: int = 1) -> bytes:
    return save({"w": torch.full((size,), float(number))})


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A server with a data set and a model, and an empty cache; the library reads its settings when it is imported."""
    folder = "models/mnist-optunet/mnist-optunet"
    files = {
        "datasets/torch-uncertainty/Checkpoints": {
            "README.md": b"hello",
            f"{folder}-0-3.tgz": packed(range(4), tmp_path / "made"),
            f"{folder}-4-5.tgz": packed(range(4, 6), tmp_path / "made"),
            "models/other/x.tgz": b"of no use",
        },
        "models/owner/net": {
            "config.json": b"{}",
            "pytorch_model.bin": b"a pickle",
            "model.safetensors": one(7),
            "checkpoints/step10/model.safetensors": one(10),
            "checkpoints/step9/model.safetensors": one(9),
        },
        "models/owner/pickles": {"pytorch_model.bin": b"a pickle", "a.pt": b"another"},
    }
    with serving(Hub(files)) as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        template = running.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr("huggingface_hub.file_download.HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
        yield running


def values(where: str) -> list[float]:
    return Population.open(where).tensor("w")[:, 0].tolist()


DATA = "hf://datasets/torch-uncertainty/Checkpoints"
OPTUNET = f"{DATA}/models/mnist-optunet"


def test_a_data_set_opens_by_name(hub: Hub) -> None:
    found = Population.open(OPTUNET)
    assert found.tensor("w")[:, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert found.spec["w"].dtype == torch.float16
    assert found.provenance["commit"] == COMMIT
    assert found.provenance["source"] == f"{DATA}@main/models/mnist-optunet"
    assert values(f"{OPTUNET}/mnist-optunet-4-5.tgz") == [4, 5]
    assert not any(path.endswith(("README.md", "x.tgz")) for _, path, _ in hub.requests)


def test_a_model_and_its_checkpoints_open_by_name(hub: Hub) -> None:
    assert values("hf://owner/net") == [7]
    assert values("hf://owner/net/model.safetensors") == [7]
    assert values("hf://owner/net@main/checkpoints/step9") == [9]
    assert values(f"hf://owner/net@{COMMIT}/checkpoints/*/model.safetensors") == [9, 10]
    assert not any(path.endswith((".bin", ".json")) for _, path, _ in hub.requests)


def test_what_is_in_the_cache_is_not_fetched_again(hub: Hub) -> None:
    assert values(OPTUNET) == values(OPTUNET)
    asked = [path for method, path, _ in hub.requests if method == "GET" and "resolve" in path]
    assert len(asked) == 2


def test_import_by_name(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", OPTUNET, "-o", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "6 networks" in out
    assert "--model onebasin.examples:optunet" in out
    found = read_manifest(tmp_path / "out").provenance
    assert found["commit"] == COMMIT
    assert [archive["networks"] for archive in found["archives"]] == [4, 2]
    assert values(str(tmp_path / "out")) == [0, 1, 2, 3, 4, 5]


def test_large_archives_are_not_even_fetched(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "IN_MEMORY", 100)
    with pytest.raises(InputError, match=f"onebasin import '{OPTUNET.replace('points/', 'points@main/')}' -o FOLDER"):
        Population.open(OPTUNET)
    assert not any("resolve" in path for _, path, _ in hub.requests)
    import_networks(OPTUNET, tmp_path / "out")
    assert values(str(tmp_path / "out")) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("where", "kind", "words"),
    [
        ("hf://owner/nothing", InputError, "no such repository"),
        ("hf://owner/net@v9", InputError, "no such version"),
        ("hf://owner/n..t", InputError, "no such repository"),
        (f"{DATA}", InputError, "none there but some in models/mnist-optunet, models/other"),
        (f"{DATA}/models/mnist", InputError, "some in models/mnist-optunet"),
        ("hf://owner/pickles", InputError, "found pytorch_model.bin, a.pt: convert"),
        ("hf://owner/net/checkpoints", InputError, "some in ., checkpoints/step10"),
        (f"{DATA}/models/other", StorageError, "x.tgz"),
    ],
)
def test_what_cannot_be_had_is_explained(hub: Hub, where: str, kind: type[OnebasinError], words: str) -> None:
    with pytest.raises(kind, match=words):
        Population.open(where)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b'{"id": "owner/net"}',
        b'{"id": "owner/net", "sha": "../..", "siblings": []}',
        b'{"id": "owner/net", "sha": 3, "siblings": []}',
        b'{"id": "owner/net", "sha": "%s", "siblings": 3}' % COMMIT.encode(),
        b'{"id": "owner/net", "sha": "%s", "siblings": [{"rfilename": 3, "size": "x"}]}' % COMMIT.encode(),
    ],
)
def test_an_answer_may_be_anything(hub: Hub, answer: bytes) -> None:
    hub.answer = answer
    with pytest.raises(StorageError, match="no usable answer"):
        Population.open("hf://owner/net")


def test_networks_that_differ_are_named(hub: Hub) -> None:
    hub.files["models/owner/net"]["checkpoints/step10/model.safetensors"] = one(10, size=3)
    with pytest.raises(SpecError, match=r"step10/model\.safetensors"):
        Population.open("hf://owner/net/checkpoints/*/model.safetensors")


def test_one_network_in_parts_is_explained(hub: Hub) -> None:
    hub.files["models/owner/net"] = {f"model-0000{part}-of-00002.safetensors": one(part) for part in (1, 2)}
    with pytest.raises(InputError, match="one network in several files"):
        Population.open("hf://owner/net")


def test_no_server_and_offline(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    assert values(OPTUNET) == [0, 1, 2, 3, 4, 5]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    asked = len(hub.requests)
    assert values(OPTUNET) == [0, 1, 2, 3, 4, 5]
    with pytest.raises(StorageError, match="not in the cache"):
        Population.open("hf://owner/net")
    with pytest.raises(StorageError, match=r"1 of 1 files of .* are not in the cache"):
        Population.open(f"{DATA}/models/other")
    assert len(hub.requests) == asked


def test_half_a_download_is_not_taken_for_all_offline(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    Population.open(f"{OPTUNET}/mnist-optunet-0-3.tgz")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(StorageError, match=r"1 of 2 files .*mnist-optunet-4-5\.tgz"):
        Population.open(OPTUNET)


def test_a_cache_that_others_filled_serves_offline(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import snapshot_download

    snapshot_download("owner/net", endpoint=hub.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert values("hf://owner/net/checkpoints/*/model.safetensors") == [9, 10]
    with pytest.raises(StorageError, match="not in the cache"):
        Population.open("hf://owner/net@other")


def test_a_server_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(StorageError, match="HF_HUB_OFFLINE=1"):
        Population.open("hf://owner/net")


def test_a_download_that_was_cut_off_goes_on(hub: Hub) -> None:
    content = torch.randn(3_500_000, generator=torch.Generator().manual_seed(0))
    hub.files["models/owner/net"] = {"model.safetensors": save({"w": content})}
    hub.cut = 12 << 20  # the library writes ten megabytes at a time
    with pytest.raises(StorageError, match=r"model\.safetensors"):
        Population.open("hf://owner/net")
    assert torch.equal(Population.open("hf://owner/net").tensor("w")[0], content)
    asked = [start for method, path, start in hub.requests if method == "GET" and "resolve" in path]
    assert asked == [0, constants.DOWNLOAD_CHUNK_SIZE]


def test_damage_on_the_way_is_noticed_and_not_kept(hub: Hub) -> None:
    hub.damaged = True
    with pytest.raises(StorageError, match="expected sha256"):
        Population.open("hf://owner/net")
    hub.damaged = False
    assert values("hf://owner/net") == [7]


def test_damage_in_the_cache_is_noticed(hub: Hub) -> None:
    Population.open(OPTUNET)
    (path,) = Path(constants.HF_HUB_CACHE).rglob("*4-5.tgz")
    path.resolve().write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StorageError, match=r"expected .* bytes"):
        Population.open(OPTUNET)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("../../out.safetensors", "/*/*/*"),
        ("/tmp/out.safetensors", "/*/*/*"),
        ("a//out.safetensors", "/a"),
        ("./out.safetensors", ""),
        ("a\\..\\out.safetensors", ""),
        ("C:x.tgz", ""),
    ],
)
def test_names_cannot_lead_out_of_the_cache(hub: Hub, name: str, path: str, tmp_path: Path) -> None:
    hub.listed = {"model.safetensors": name}
    with pytest.raises(UnsafeFileError, match="leads elsewhere"):
        Population.open(f"hf://owner/net{path}")
    assert {found.name for found in tmp_path.rglob("*out*")} == set()
    assert not any("resolve" in asked for _, asked, _ in hub.requests)


@pytest.mark.parametrize("etag", ["../../../out", "/tmp/onebasin-test-etag", "a/b", ".."])
def test_contents_cannot_be_called_what_leads_out_of_the_cache(hub: Hub, etag: str, tmp_path: Path) -> None:
    hub.etag = etag
    with pytest.raises(UnsafeFileError, match="do not use this server"):
        Population.open("hf://owner/net")
    assert not (tmp_path / "out").exists() and not Path("/tmp/onebasin-test-etag").exists()
    assert not any("blobs" in str(path) for path in (tmp_path / "cache").rglob("*"))


def test_room_on_the_disk_is_looked_at_first(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(1, 1, 1000))
    with pytest.raises(DiskError, match="MB are free"):
        Population.open(OPTUNET)
    assert not any("resolve" in path for _, path, _ in hub.requests)


def test_without_the_extra_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub.constants", None)
    with pytest.raises(InputError, match=r"onebasin\[hub\]"):
        Population.open("hf://owner/net")


def test_damaged_notes_are_named(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    Population.open("hf://owner/net")
    (note,) = (Path(constants.HF_HUB_CACHE) / "models--owner--net" / hub_cache._NOTES).iterdir()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for text in ("", "[]", '{"commit": "../..", "files": []}', '{"commit": 3}'):
        note.write_text(text)
        with pytest.raises(StorageError, match="damaged"):
            Population.open("hf://owner/net")


def test_the_environment_is_honoured(hub: Hub, tmp_path: Path) -> None:
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    code = (
        "import sys; from onebasin import Population; "
        "print([Population.open(word).tensor('w')[:, 0].tolist() for word in sys.argv[1:]])"
    )
    command = [sys.executable, "-c", code, OPTUNET, "hf://owner/net"]
    for extra in ({}, {"HF_HUB_OFFLINE": "1"}):
        done = subprocess.run(command, env=settings | extra, capture_output=True, text=True, timeout=100, check=False)
        assert done.stdout == "[[0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [7.0]]\n", done.stderr
    assert list((tmp_path / "home" / "hub").glob("*--*"))
