"""`invoke data c4` against a server on this machine with the hub's layout: real files, real tokenizer."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("streaming")

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from tests.hub import Hub
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


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Serve the files, with an empty cache on this side."""
    monkeypatch.setenv("TWINRUN_CACHE", str(tmp_path / "cache"))
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, "<|unknown|>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    document = json.dumps({"text": "a shard of text " * 3000}).encode() + b"\n"
    texts = {name: gzip.compress(document, mtime=0) for name in TEXT_FILES}
    model = {"tokenizer.json": (tmp_path / "tokenizer.json").read_bytes()}
    with Hub(datasets=texts, models=model).serving() as server:
        yield server


def test_published_data_becomes_shards_once(hub: Hub) -> None:
    said: list[str] = []

    def get() -> Path:
        return acquire(
            Project(ROOT), "c4", recipe=RECIPE, engine="host", files=1, endpoint=hub.endpoint, say=said.append
        )

    source = hub_source()
    folder = get()
    corpus = json.loads((folder / "corpus.json").read_text())["content"]
    assert corpus["server"] == hub.endpoint
    assert corpus["sequence"] == 2048
    # One file of 3000 times four words, and the separator behind them.
    assert corpus["tokens"] == 12_001 // 2048 * 2048
    fetched = [path.rpartition("/")[2] for path, _ in hub.asked if "/resolve/" in path]
    assert sorted(fetched) == ["c4-train.00000-of-01024.json.gz", "tokenizer.json"]
    assert any(f"{source.repository} at {(source.revision or '')[:12]}" in line for line in said)
    asked = len(hub.asked)
    assert get() == folder
    assert len(hub.asked) == asked
