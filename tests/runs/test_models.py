"""Models that are there: fetched from a server of this machine, or looked at where they lie."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub import COMMIT, Hub
from twinrun.checkpoints.model_folder import digest_of_folder
from twinrun.checkpoints.safetensors import Entry, header_of
from twinrun.foundation.errors import InputError, MachineError
from twinrun.protocol.model_source import FolderModel, RepositoryModel
from twinrun.runs.data import demand_model, fetch_model, model_folder

NAME = f"owner/texts@{COMMIT}"
SOURCE = RepositoryModel(repository="owner/texts", revision=COMMIT)
FILES = {
    "README.md": b"a model",
    "config.json": b'{"model_type": "gpt2", "vocab_size": 4}',
    "merges.txt": b"#version: 0.2\n",
    "model.safetensors": header_of([Entry(name="wte.weight", dtype="F32", shape=(2, 3))]) + bytes(24),
    "pytorch_model.bin": b"a pickle",
    "vocab.json": b'{"<|endoftext|>": 0}',
}


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Serve a model, with an empty cache on this side."""
    monkeypatch.setenv("TWINRUN_CACHE", str(tmp_path / "cache"))
    with Hub(models=dict(FILES)).serving() as server:
        yield server


def fetched(hub: Hub) -> Path:
    return fetch_model(NAME, endpoint=hub.endpoint, say=print)


def folder_at(place: Path) -> Path:
    place.mkdir()
    for name, content in FILES.items():
        (place / name).write_bytes(content)
    return place


def demanded(folder: Path | None = None, sha256: str | None = None, *, container: bool = True) -> None:
    source = FolderModel(path=str(folder), sha256=sha256) if folder else SOURCE
    demand_model(source, model_folder(source), container=container)


def test_a_repository_is_fetched_once_without_its_pickles(hub: Hub) -> None:
    with pytest.raises(MachineError, match="not on this machine") as caught:
        demanded()
    assert caught.value.hint == f"fetch it with `invoke data {NAME}`"
    folder = fetched(hub)
    assert folder == model_folder(SOURCE)
    here = {path.name for path in folder.iterdir() if path.name != ".cache" and path.name[:6] != "files-"}
    assert here == {"config.json", "merges.txt", "model.safetensors", "vocab.json", "corpus.json"}
    whole = json.loads((folder / "corpus.json").read_text())
    sha256, asked = digest_of_folder(folder), len(hub.asked)
    assert whole == SOURCE.model_dump() | {"sha256": sha256, "endpoint": hub.endpoint}
    assert fetched(hub) == folder
    demanded()
    assert len(hub.asked) == asked
    (folder / "vocab.json").write_text('{"<|endoftext|>": 1}')
    with pytest.raises(InputError, match="the model has another digest") as changed:
        demanded()
    assert (changed.value.found, changed.value.allowed) == (digest_of_folder(folder), sha256)


@pytest.mark.parametrize(
    ("left_out", "found", "hint"),
    [
        ("model.safetensors", "no *.safetensors", "pickles are never loaded"),
        ("config.json", "no config.json", "has its sizes in config.json"),
        ("merges.txt", "no tokenizer.json, and no vocab.json with merges.txt", "--tokenizer FILE"),
    ],
)
def test_a_commit_that_cannot_be_scored_is_refused_before_a_file_comes(
    hub: Hub, left_out: str, found: str, hint: str
) -> None:
    del hub.files["models"][left_out]
    with pytest.raises(InputError) as caught:
        fetched(hub)
    assert (caught.value.place, caught.value.found) == (NAME, found)
    assert hint in (caught.value.hint or "")
    assert not [path for path, _ in hub.asked if "/resolve/" in path]
    with pytest.raises(InputError) as folder:
        fetch_model("./models/small", endpoint=None, say=print)
    assert folder.value.found == "./models/small"


def test_a_folder_is_held_against_its_digest(tmp_path: Path) -> None:
    folder = folder_at(tmp_path / "model")
    sha256 = digest_of_folder(folder)
    demanded(folder)
    demanded(folder, sha256)
    # What no model reads decides no score.
    (folder / "README.md").write_text("another text")
    demanded(folder, sha256)
    with pytest.raises(InputError, match="another digest") as caught:
        demanded(folder, "0" * 64)
    assert (caught.value.found, caught.value.allowed) == (sha256, "0" * 64)
    with pytest.raises(InputError, match="no such folder of a model"):
        demanded(folder / "no")
    (folder / "model.safetensors").rename(tmp_path / "blob")
    (folder / "model.safetensors").symlink_to(tmp_path / "blob")
    demanded(folder, container=False)
    with pytest.raises(InputError, match="links lead out of the folder") as caught:
        demanded(folder)
    assert caught.value.found == ["model.safetensors"]


@pytest.mark.parametrize("path", ["~/model", "./model"])
def test_a_path_is_that_of_who_runs(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert os.path.normpath(model_folder(FolderModel(path=path, sha256=None))) == str(tmp_path / "model")
