"""A server that speaks as much of the hub's protocol as a download needs, and can be told to misbehave."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)/revision/(.+)")
_FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class Hub:
    """What the server has.

    Attributes:
        files: "models/OWNER/NAME" or "datasets/OWNER/NAME" -> file name -> content.
        revisions: names of the only commit.
        etag: what to call every content, instead of its SHA-256.
        listed: names to list instead of the true ones.
        cut: bytes after which the next answer breaks off.
        answer: what to say instead of a listing.
        damaged: whether contents are sent with their first byte changed.
        requests: method, path and first byte asked for, of every request.
        url: where it answers.
    """

    files: dict[str, dict[str, bytes]]
    revisions: tuple[str, ...] = ("main", COMMIT)
    etag: str | None = None
    listed: dict[str, str] = field(default_factory=dict)
    cut: int | None = None
    answer: bytes | None = None
    damaged: bool = False
    requests: list[tuple[str, str, int]] = field(default_factory=list)
    url: str = ""


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, *, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        start = int(re.sub(r"\D", "", self.headers.get("Range", "").split("-")[0]) or 0)
        self.hub.requests.append((self.command, path, start))
        if found := _API.fullmatch(path):
            kind, repository, revision = found.groups()
            self.information(f"{kind}/{repository}", revision)
        elif found := _FILE.fullmatch(path):
            datasets, repository, revision, name = found.groups()
            self.file(f"{'datasets' if datasets else 'models'}/{repository}", revision, name, start, body=body)
        else:
            self.refuse(404, "EntryNotFound")

    def information(self, repository: str, revision: str) -> None:
        if repository not in self.hub.files:
            return self.refuse(404, "RepoNotFound")
        if revision not in self.hub.revisions:
            return self.refuse(404, "RevisionNotFound")
        siblings = [
            {
                "rfilename": self.hub.listed.get(name, name),
                "size": len(content),
                "lfs": {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130},
            }
            for name, content in self.hub.files[repository].items()
        ]
        text = json.dumps({"id": repository.split("/", 1)[1], "sha": COMMIT, "siblings": siblings}).encode()
        text = text if self.hub.answer is None else self.hub.answer
        self.send(200, {"Content-Type": "application/json", "Content-Length": str(len(text))}, text)

    def file(self, repository: str, revision: str, name: str, start: int, *, body: bool) -> None:
        content = self.hub.files.get(repository, {}).get(name)
        if content is None or revision not in self.hub.revisions:
            return self.refuse(404, "EntryNotFound")
        headers = {
            "ETag": f'"{self.hub.etag or hashlib.sha256(content).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
            "Content-Length": str(len(content) - start),
            "Accept-Ranges": "bytes",
        }
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        sent = bytes([content[0] ^ 1]) + content[1:] if self.hub.damaged else content
        if not body:
            sent = b""
        elif self.hub.cut is not None:
            sent, self.hub.cut, self.close_connection = sent[: start + self.hub.cut], None, True
        self.send(206 if start else 200, headers, sent[start:])

    def refuse(self, status: int, code: str) -> None:
        self.send(status, {"X-Error-Code": code, "Content-Length": "0"}, b"")

    def send(self, status: int, headers: Mapping[str, str], content: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)
