"""OpenML: a local server that speaks its paths, and the text format of its tables."""

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onebasin.data import openml
from onebasin.data import openml as download
from onebasin.data.load import load
from onebasin.data.openml import read_table
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

3, rain , 0.25 ,yes
"""


class Server:
    """Answers by path; counts what it was asked."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, bytes]] = {}
        self.asked: list[str] = []
        self.cut = False
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked.append(self.path)
                code, content = outer.answers.get(self.path, (412, b'{"error":{"code":"372","message":"No results"}}'))
                self.send_response(code)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content[: len(content) // 2] if outer.cut else content)

            def log_message(self, *arguments: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.http.server_port}"
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def offer(self, number: int, table: str, **about: Any) -> None:
        file = f"/data/v1/download/{number}/table.arff"
        description = {
            "id": str(number),
            "name": "weather",
            "format": "ARFF",
            "url": f"{self.address}{file}",
            "default_target_attribute": "play",
            "md5_checksum": hashlib.md5(table.encode()).hexdigest(),
            **about,
        }
        self.answers[file] = 200, table.encode()
        self.describe(number, {"data_set_description": description})

    def describe(self, number: int, answer: Any) -> None:
        self.answers[f"/api/v1/json/data/{number}"] = 200, json.dumps(answer).encode()

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("ONEBASIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    found = Server()
    yield found
    found.close()


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_a_table_by_number(server: Server, tmp_path: Path) -> None:
    server.offer(61, TABLE, row_id_attribute="id")
    parts = openml.read_openml("61", download=True, server=server.address)
    assert parts.train is not None
    assert parts.train[0].tolist() == [[1, 0, 0, 1.5], [0, 1, 0, -2000], [0, 0, 1, 0.25]]
    assert parts.train[1].tolist() == [1, 0, 1]
    assert (parts.name, parts.classes, parts.test) == ("weather", 2, None)
    assert files_in(tmp_path / "cache") == ["61.arff", "61.json"]
    asked = len(server.asked)
    again = load("openml/61", server=server.address)  # from the cache, without the network
    assert len(server.asked) == asked
    assert (len(again.train[0]), len(again.test[0])) == (2, 1)


def test_a_name_means_the_oldest_active_version(server: Server) -> None:
    rows = [{"did": 9, "name": "weather", "version": 3}, {"did": 5, "name": "weather", "version": 1}]
    server.answers["/api/v1/json/data/list/data_name/weather/status/active"] = (
        200,
        json.dumps({"data": {"dataset": rows}}).encode(),
    )
    server.offer(5, TABLE, ignore_attribute=["id", "outlook"])
    found = load("openml/weather", download=True, server=server.address)
    assert found.train[0].shape[1] == 1
    assert [path.split("/")[-1] for path in server.asked] == ["active", "5", "table.arff"]
    asked = len(server.asked)
    load("openml/weather", server=server.address)
    assert len(server.asked) == asked


def test_nothing_is_asked_without_permission(server: Server) -> None:
    server.offer(61, TABLE)
    with pytest.raises(StorageError, match=r"in the cache.*download=True.*--download"):
        load("openml/61", server=server.address)
    assert server.asked == []


def test_a_wrong_digest_is_not_kept(server: Server, tmp_path: Path) -> None:
    server.offer(61, TABLE, md5_checksum="0" * 32)
    with pytest.raises(StorageError, match=r"expected md5 0{32}.*arrived damaged and was not kept"):
        load("openml/61", download=True, server=server.address)
    assert files_in(tmp_path / "cache") == ["61.json"]


def test_damage_in_the_cache_is_noticed_and_mended(server: Server, tmp_path: Path) -> None:
    server.offer(61, TABLE)
    first = load("openml/61", download=True, server=server.address)
    file = next((tmp_path / "cache").rglob("61.arff"))
    file.write_text(TABLE.replace("1.5", "1.6"))
    with pytest.raises(StorageError, match=r"damaged after its download.*--download"):
        load("openml/61", server=server.address)
    again = load("openml/61", download=True, server=server.address)
    assert torch.equal(again.train[0], first.train[0])


def test_a_cut_answer_is_not_kept(server: Server, tmp_path: Path) -> None:
    server.offer(61, TABLE)
    server.cut = True
    with pytest.raises(StorageError):
        load("openml/61", download=True, server=server.address)
    server.answers["/table"] = 200, b"0123456789"
    with pytest.raises(StorageError, match=r"expected 10 bytes from .*, found 5: try again"):
        download.fetch(f"{server.address}/table", tmp_path / "cache" / "table")
    assert files_in(tmp_path / "cache") == []


def test_offline_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    server.close()
    with pytest.raises(StorageError, match=r"expected an answer from http://127.0.0.1:\d+.*connect.*digits needs no"):
        load("openml/iris", download=True, server=server.address)
    monkeypatch.setattr(server, "close", lambda: None)  # the fixture would close it again
    assert files_in(tmp_path / "cache") == []


def test_a_silent_server_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    monkeypatch.setenv("ONEBASIN_CACHE", str(tmp_path))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(download, "SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(StorageError, match="timed out"):
            load("openml/61", download=True, server=address)


def test_what_the_server_does_not_know_or_cannot_do(server: Server, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no active data set 'nothing' "):
        load("openml/nothing", download=True, server=server.address)
    with pytest.raises(InputError, match="no active data set '7'"):
        load("openml/7", download=True, server=server.address)
    server.answers["/api/v1/json/data/8"] = 503, b"later"
    with pytest.raises(StorageError, match="HTTP 503: try again later"):
        load("openml/8", download=True, server=server.address)
    assert files_in(tmp_path / "cache") == []


@pytest.mark.parametrize(
    ("answer", "error", "told"),
    [
        ([], StorageError, "JSON of an answer"),
        ({"data_set_description": {"id": "61"}}, StorageError, "description with an address"),
        ({"data_set_description": {"url": "x", "format": "parquet"}}, InputError, "found parquet"),
        (
            {"data_set_description": {"url": "file:///etc/passwd", "default_target_attribute": "a"}},
            StorageError,
            "http or",
        ),
    ],
)
def test_strange_answers(server: Server, answer: Any, error: type, told: str) -> None:
    server.describe(61, answer)
    with pytest.raises(error, match=told):
        load("openml/61", download=True, server=server.address)


def test_an_answer_that_is_no_json_is_not_believed_again(server: Server, tmp_path: Path) -> None:
    server.answers["/api/v1/json/data/61"] = 200, b"<html>"
    with pytest.raises(StorageError, match="expected JSON"):
        load("openml/61", download=True, server=server.address)
    assert files_in(tmp_path / "cache") == []
    server.offer(61, TABLE)
    assert load("openml/61", download=True, server=server.address).classes == 2


def test_limits_and_full_disks(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.answers["/large"] = 200, bytes(3 << 20)
    with pytest.raises(StorageError, match="at most 1,000,000 bytes"):
        download.fetch(f"{server.address}/large", tmp_path / "x", largest=1_000_000)
    (tmp_path / "file").touch()
    with pytest.raises(DiskError, match="ONEBASIN_CACHE"):
        download.fetch(f"{server.address}/large", tmp_path / "file" / "x")
    assert files_in(tmp_path) == ["file"]
    monkeypatch.delenv("ONEBASIN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert download.cache_folder() == tmp_path / "xdg" / "onebasin"


def test_targets_of_every_kind(server: Server) -> None:
    server.offer(1, TABLE, default_target_attribute="wind speed")
    values = load("openml/1", download=True, server=server.address)
    assert values.classes is None
    assert values.train[1].shape == (2, 1)
    server.offer(2, TABLE, default_target_attribute="id,wind speed")
    assert load("openml/2", download=True, server=server.address).train[1].shape == (2, 2)
    server.offer(3, TABLE, default_target_attribute=None)
    with pytest.raises(InputError, match="does not say what to predict"):
        load("openml/3", download=True, server=server.address)
    parts = openml.read_openml("3", server=server.address, target="outlook")
    assert parts.classes == 3


@pytest.mark.parametrize(
    ("old", "new", "error", "told"),
    [
        ("1.5", "?", InputError, "found wind speed missing in row 1"),
        ("1.5", "hot", StorageError, "others in row 1"),
        ("sunny,1.5", "snow,1.5", StorageError, "others in row 1"),
        ("1,sunny,1.5,yes", "1,sunny,1.5", StorageError, "4 values in row 1"),
        ("1,sunny,1.5,yes", "{0 1, 2 1.5}", InputError, "sparse rows"),
        ("id INTEGER", "id STRING", InputError, "found string in 'id'"),
        ("@data", "@dada", StorageError, "attributes and @data"),
        ("@attribute id INTEGER", "@attribute id", StorageError, "@attribute NAME KIND"),
        ("play {no,yes}", "played {no,yes}", InputError, "expected 'play' among the attributes"),
    ],
)
def test_tables_that_cannot_be_read(old: str, new: str, error: type, told: str) -> None:
    with pytest.raises(error, match=told):
        read_table(TABLE.replace(old, new, 1).splitlines(), "play", "here")


def test_a_table_without_rows_or_inputs() -> None:
    head = TABLE.split("1,sunny")[0]
    with pytest.raises(StorageError, match="rows after @data"):
        read_table(head.splitlines(), "play", "here")
    with pytest.raises(InputError, match="beside the target"):
        read_table(TABLE.splitlines(), "play", "here", ["id", "outlook", "wind speed"])


def test_quotes_in_names() -> None:
    lines = ["@attribute 'it\\'s' real", '@attribute "a \\"b\\"" real', "@data", "1,2"]
    assert read_table(lines, "it's", "here")[1].tolist() == [[1.0]]
    assert read_table(lines, 'a "b"', "here")[1].tolist() == [[2.0]]


def test_scipy_reads_the_same(tmp_path: Path) -> None:
    from scipy.io import arff

    path = tmp_path / "table.arff"
    text = TABLE.replace("'partly cloudy'", "cloudy").replace(" rain ", "rain")  # scipy knows neither in rows
    path.write_text(text)
    rows, about = arff.loadarff(path)
    inputs, targets, classes = read_table(text.splitlines(), "play", "here")
    assert inputs[:, 0].tolist() == rows["id"].tolist()
    assert np.allclose(inputs[:, 4], rows["wind speed"])
    levels = about["play"][1]
    assert [levels[target].encode() for target in targets] == rows["play"].tolist()
    assert classes == len(levels)


LEVEL = st.text(st.characters(codec="utf-8", exclude_characters="\r\n\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"), max_size=8)


@settings(deadline=None)
@given(st.data(), st.sampled_from("'\""), st.lists(LEVEL, min_size=1, max_size=4, unique=True))
def test_quoted_levels_and_numbers_survive(data: st.DataObject, quote: str, levels: list[str]) -> None:
    def quoted(text: str) -> str:
        return quote + text.replace("\\", "\\\\").replace(quote, "\\" + quote) + quote

    rows = data.draw(
        st.lists(
            st.tuples(st.floats(width=32, allow_nan=False, allow_infinity=False), st.sampled_from(levels)),
            min_size=1,
            max_size=5,
        )
    )
    lines = [
        "@relation r",
        "@attribute a real",
        f"@attribute {quoted('the b')} {{{','.join(map(quoted, levels))}}}",
        "@data",
    ]
    lines += [f"{value!r},{quoted(level)}" for value, level in rows]
    inputs, targets, classes = read_table(lines, "the b", "here")
    assert inputs[:, 0].tolist() == [value for value, _ in rows]
    assert [levels[target] for target in targets] == [level for _, level in rows]
    assert classes == len(levels)
