"""`invoke data c4` against a server on this machine with the hub's layout: real files, real tokenizer."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("streaming")

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from twinrun.planning.project import Project
from twinrun.protocol.training import DataSource
from twinrun.runs.data import acquire
from twinrun.workloads import load_workload

ROOT = Path(__file__).parents[2]
RECIPE = "recipes/mpt7b-scaling"


def hub_source() -> DataSource:
    """Return what the recipe says of the data set."""
    loaded = Project(ROOT).recipe(RECIPE)
    source = load_workload(loaded.workload).check(loaded, ())["c4"].source
    assert isinstance(source, DataSource)
    return source


WORDS = ["<|endoftext|>", "<|unknown|>", "a", "shard", "of", "text"]
TEXT_FILES = {f"en/c4-train.0000{number}-of-01024.json.gz" for number in range(2)}


def hub_files(folder: Path) -> dict[str, bytes]:
    """Return what the server holds, by the path that both addresses of a file end with."""
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, "<|unknown|>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    document = json.dumps({"text": "a shard of text " * 3000}).encode() + b"\n"
    return {
        "tokenizer.json": (folder / "tokenizer.json").read_bytes(),
        **{name: gzip.compress(document, mtime=0) for name in TEXT_FILES},
    }


class HubHandler(http.server.BaseHTTPRequestHandler):
    files: dict[str, bytes]
    fetched: list[str]

    def do_HEAD(self) -> None:
        """Describe a file as the hub does: its commit, its digest and its size."""
        name = next(name for name in self.files if self.path.endswith(f"/{name}"))
        content = self.files[name]
        self.send_response(200)
        self.send_header("X-Repo-Commit", self.path.partition("/resolve/")[2].partition("/")[0])
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()

    def do_GET(self) -> None:
        if self.path.startswith("/api/"):
            self.answer(json.dumps([self.entry(name) for name in self.files if self.lists(name)]).encode())
        else:
            name = next(name for name in self.files if self.path.endswith(f"/{name}"))
            self.fetched.append(name)
            self.answer(self.files[name])

    def lists(self, name: str) -> bool:
        return ("/datasets/" in self.path) == (name in TEXT_FILES)

    def entry(self, name: str) -> dict[str, object]:
        content = self.files[name]
        digest = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
        return {"type": "file", "path": name, "size": len(content), "oid": "f" * 40, "lfs": digest}

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Serve the files, with an empty cache on this side."""
    monkeypatch.setenv("TWINRUN_CACHE", str(tmp_path / "cache"))
    HubHandler.files, HubHandler.fetched = hub_files(tmp_path), []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), HubHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_published_data_becomes_shards_once(endpoint: str) -> None:
    said: list[str] = []

    def get() -> Path:
        return acquire(
            Project(ROOT), "c4", recipe=RECIPE, engine="host", files=1, endpoint=endpoint, say=said.append
        )

    source = hub_source()
    folder = get()
    corpus = json.loads((folder / "corpus.json").read_text())["content"]
    assert corpus["server"] == endpoint
    assert corpus["sequence"] == 2048
    # One file of 3000 times four words, and the separator behind them.
    assert corpus["tokens"] == 12_001 // 2048 * 2048
    assert sorted(HubHandler.fetched) == ["en/c4-train.00000-of-01024.json.gz", "tokenizer.json"]
    assert any(f"{source.repository} at {(source.revision or '')[:12]}" in line for line in said)
    assert get() == folder
    assert len(HubHandler.fetched) == 2
