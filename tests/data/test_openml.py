"""OpenML through scikit-learn: its reader against answers that lie here, and its failures as sentences."""

import hashlib
import io
import json
from http.client import BadStatusLine
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError

import numpy as np
import pytest
import sklearn.datasets
import torch
from sklearn.utils import Bunch

from onebasin.data.load import load
from onebasin.data.openml import cache_folder, read_openml
from onebasin.errors import DiskError, InputError, StorageError

TABLE = """% a comment
@RELATION 'weather and play'

@attribute id INTEGER
@attribute outlook {sunny, 'partly cloudy', rain}
@attribute 'wind speed' REAL
@attribute play {no,yes}
@data
1,sunny,1.5,yes
% another
2,'partly cloudy',-2e3,no
3,rain,0.25,yes
"""
KINDS = {"id": "numeric", "outlook": "nominal", "wind speed": "numeric", "play": "nominal"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ONEBASIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Server:
    """Answers scikit-learn by the end of an address; counts what it was asked."""

    def __init__(self, table: str = TABLE, target: str = "play", md5: str | None = None) -> None:
        self.asked: list[str] = []
        features = [
            {
                "index": str(number),
                "name": name,
                "data_type": kind,
                "is_target": str(name == target).lower(),
                "is_ignore": "false",
                "number_of_missing_values": "0",
                "is_row_identifier": str(name == "id").lower(),
            }
            for number, (name, kind) in enumerate(KINDS.items())
        ]
        description = {
            "id": "61",
            "name": "weather",
            "version": "1",
            "format": "ARFF",
            "status": "active",
            "description": "",
            "url": "https://openml.org/data/v1/download/61/table.arff",
            "md5_checksum": md5 or hashlib.md5(table.encode()).hexdigest(),
        }
        rows = [{"did": 61, "version": 1, "status": "active"}, {"did": 9, "version": 3, "status": "active"}]
        self.answers = {
            "data/61": json.dumps({"data_set_description": description}),
            "features/61": json.dumps({"data_features": {"feature": features}}),
            "qualities/61": json.dumps({"data_qualities": {"quality": [{"name": "NumberOfInstances", "value": "3"}]}}),
            "table.arff": table,
            "data_name/weather/limit/2/status/active/": json.dumps({"data": {"dataset": rows}}),
        }

    def urlopen(self, request: Any, *arguments: Any, **options: Any) -> Any:
        url = request if isinstance(request, str) else request.full_url
        self.asked.append(url)
        for end, text in self.answers.items():
            if url.endswith(end):
                answer: Any = io.BytesIO(text.encode())
                answer.info = dict
                return answer
        raise HTTPError(url, 412, "unknown", {}, io.BytesIO(b"{}"))  # type: ignore[arg-type]


def serve(monkeypatch: pytest.MonkeyPatch, **options: Any) -> Server:
    server = Server(**options)
    monkeypatch.setattr("sklearn.datasets._openml.urlopen", server.urlopen)
    return server


def answer(monkeypatch: pytest.MonkeyPatch, result: Any) -> list[dict[str, Any]]:
    """Let `fetch_openml` return or raise something; the list of its arguments."""
    asked: list[dict[str, Any]] = []

    def fetch(**options: Any) -> Any:
        asked.append(options)
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(sklearn.datasets, "fetch_openml", fetch)
    return asked


def table(**changes: Any) -> Bunch:
    return Bunch(
        **{
            "data": np.array([[0.0, 1.5], [1.0, 2.5], [2.0, 3.5]]),
            "target": np.array(["b", "a", "b"], dtype=object),
            "feature_names": ["outlook", "wind"],
            "categories": {"outlook": ["sunny", "cloudy", "rain"]},
            **changes,
        }
    )


def test_a_table_by_number(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    server = serve(monkeypatch)
    parts = read_openml("61", download=True)
    assert parts.train is not None
    assert parts.train[0].tolist() == [[1, 0, 0, 1.5], [0, 1, 0, -2000], [0, 0, 1, 0.25]]
    assert parts.train[1].tolist() == [1, 0, 1]
    assert (parts.name, parts.classes, parts.test) == ("61", 2, None)
    assert (cache / "openml" / "61.npz").is_file()
    asked = len(server.asked)
    again = load("openml/61")  # from the cache, without the network
    assert len(server.asked) == asked
    assert (len(again.train[0]), len(again.test[0])) == (2, 1)


def test_a_name_means_an_active_version(monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch)
    assert load("openml/weather", download=True).classes == 2
    assert load("openml/weather").classes == 2
    with pytest.raises(InputError, match="check the name"):
        load("openml/nothing", download=True)


def test_values_are_predicted_as_values(monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, target="wind speed")
    found = load("openml/61", download=True)
    assert found.classes is None
    assert found.train[1].shape == (2, 1)
    answer(monkeypatch, table(target=np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])))
    assert load("openml/7", download=True).train[1].shape == (2, 2)


def test_a_wrong_digest_is_not_kept(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    serve(monkeypatch, md5="0" * 32)
    with pytest.raises(InputError, match="md5"):
        load("openml/61", download=True)
    assert not list(cache.glob("openml/*.npz"))


def test_nothing_is_asked_without_permission(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    asked = answer(monkeypatch, table())
    with pytest.raises(StorageError, match=r"in the cache.*download=True.*--download"):
        load("openml/61")
    assert asked == []
    load("openml/61", download=True)
    load("openml/61", download=True)
    (options,) = asked
    assert (options["data_id"], options["data_home"]) == (61, cache)
    assert load("openml/A b", download=True).classes == 2
    assert asked[-1]["name"] == "A b"


def test_damage_in_the_cache_is_noticed(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    answer(monkeypatch, table())
    first = load("openml/61", download=True)
    file = cache / "openml" / "61.npz"
    content = bytearray(file.read_bytes())
    content[content.index(np.float32(1.5).tobytes())] ^= 1
    for damaged in (bytes(content), content[:-20], b""):
        file.write_bytes(damaged)
        with pytest.raises(StorageError, match=r"damaged after its download.*--download"):
            load("openml/61", download=True)
    file.unlink()
    assert torch.equal(load("openml/61", download=True).train[0], first.train[0])


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (HTTPError("u", 412, "m", {}, None), InputError, "no active data set '8'"),  # type: ignore[arg-type]
        (HTTPError("u", 404, "m", {}, None), InputError, "no active data set '8'"),  # type: ignore[arg-type]
        (HTTPError("u", 503, "m", {}, None), StorageError, "HTTP 503: try again later"),  # type: ignore[arg-type]
        (URLError("no route"), StorageError, r"expected an answer.*no route.*digits needs no"),
        (TimeoutError("timed out"), StorageError, "timed out"),
        (ConnectionResetError("reset"), StorageError, "connect to the network"),
        (BadStatusLine("SSH-2.0"), StorageError, "connect to the network"),
        (ValueError("STRING attributes are not supported"), InputError, r"STRING.*give it as \.npz"),
        (KeyError("data_set_description"), InputError, "cannot read openml/8"),
    ],
)
def test_what_goes_wrong_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, cache: Path, error: Exception, kind: type[Exception], words: str
) -> None:
    answer(monkeypatch, error)
    with pytest.raises(kind, match=words):
        load("openml/8", download=True)
    assert not list(cache.rglob("*.npz"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": np.array([[0.0, np.nan], [1.0, 2.5], [2.0, 3.5]])}, "gaps in wind"),
        ({"target": None}, "inputs and a target"),
        ({"target": np.array([["a", "b"]] * 3, dtype=object)}, "found 2 targets"),
        ({"data": np.zeros((3, 0)), "feature_names": [], "categories": {}}, "inputs and a target"),
        ({"categories": {"outlook": range(1 << 30)}}, "one column per category"),  # names without their memory
    ],
)
def test_tables_that_cannot_be_learned(monkeypatch: pytest.MonkeyPatch, changes: Any, words: str) -> None:
    answer(monkeypatch, table(**changes))
    with pytest.raises(InputError, match=words):
        load("openml/8", download=True)


def test_classes_are_numbered_by_number_or_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for number, (levels, numbers) in enumerate(
        [(["10", "9", "9"], [1, 0, 0]), (["b", "é", "b"], [0, 1, 0]), (["2", "x", "1"], [1, 2, 0])]
    ):
        answer(monkeypatch, table(target=np.array(levels, dtype=object)))
        parts = read_openml(str(number), download=True)
        assert parts.train is not None
        assert parts.train[1].tolist() == numbers


def test_sparse_tables_become_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    from scipy.sparse import csr_matrix

    answer(monkeypatch, table(data=csr_matrix(table().data), categories=None))
    parts = read_openml("1", download=True)
    assert parts.train is not None
    assert parts.train[0].tolist() == [[0, 1.5], [1, 2.5], [2, 3.5]]


def test_full_disks_and_the_place_of_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answer(monkeypatch, table())
    (tmp_path / "file").touch()
    monkeypatch.setenv("ONEBASIN_CACHE", str(tmp_path / "file"))
    with pytest.raises(DiskError, match="not a folder"):
        load("openml/1", download=True)
    monkeypatch.delenv("ONEBASIN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "onebasin"
