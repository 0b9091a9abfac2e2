"""Models that are there: fetched from a server of this machine, or looked at where they lie."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoints.writing import write
from tests.runs import test_download
from tests.runs.test_download import COMMIT, Hub, endpoint
from twinrun.checkpoints.folder import FolderStore
from twinrun.checkpoints.model_folder import digest_of_folder
from twinrun.checkpoints.safetensors import Entry, header_of
from twinrun.checkpoints.tokenizer import BYTES
from twinrun.foundation.errors import InputError, MachineError
from twinrun.protocol.model_source import CheckpointModel, FolderModel, ModelSource, RepositoryModel
from twinrun.runs.models import demand_model, fetch_model, model_folder

hub = test_download.hub
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
def model_hub(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Serve a model, with an empty cache on this side."""
    monkeypatch.setenv("TWINRUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(test_download, "FILES", dict(FILES))
    hub.kind, hub.prefix = "models", ""
    test_download.entry.cache_clear()
    yield hub
    test_download.entry.cache_clear()


def fetched(hub: Hub) -> Path:
    return fetch_model(NAME, endpoint=endpoint(hub), say=lambda _text: None)


def files_of(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.name != ".cache"}


def folder_at(place: Path) -> Path:
    place.mkdir()
    for name, content in FILES.items():
        (place / name).write_bytes(content)
    return place


def test_a_repository_is_fetched_once_without_its_pickles(hub: Hub) -> None:
    folder = fetched(hub)
    assert folder == model_folder(SOURCE)
    named = {"config.json", "merges.txt", "model.safetensors", "vocab.json"}
    assert files_of(folder) == named | {"files.json", "corpus.json"}
    whole = json.loads((folder / "corpus.json").read_text())
    expected = {"repository": "owner/texts", "revision": COMMIT, "sha256": digest_of_folder(folder)}
    assert whole == expected | {"endpoint": endpoint(hub)}
    asked = len(hub.asked)
    assert fetched(hub) == folder
    demanded(SOURCE, container=True)
    assert model_folder(SOURCE) == folder
    assert len(hub.asked) == asked


@pytest.mark.parametrize(
    ("left_out", "found", "hint"),
    [
        ("model.safetensors", "no *.safetensors", "pickles are never loaded"),
        ("config.json", "no config.json", "has its sizes in config.json"),
        ("merges.txt", "no tokenizer.json, and no vocab.json with merges.txt", "--tokenizer FILE"),
    ],
)
def test_a_commit_that_cannot_be_scored_is_refused_before_a_file_comes(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, left_out: str, found: str, hint: str
) -> None:
    monkeypatch.delitem(test_download.FILES, left_out)
    with pytest.raises(InputError) as caught:
        fetched(hub)
    assert (caught.value.place, caught.value.found) == (NAME, found)
    assert hint in (caught.value.hint or "")
    assert not [path for path, _ in hub.asked if "/resolve/" in path]


def test_a_model_that_is_not_here_says_how_to_fetch_it() -> None:
    with pytest.raises(MachineError, match="not on this machine") as caught:
        demanded(SOURCE, container=False)
    assert caught.value.hint == f"fetch it with `invoke data {NAME}`"


@pytest.mark.parametrize("name", ["./models/small", "small/model"])
def test_only_a_repository_is_fetched(name: str) -> None:
    with pytest.raises(InputError) as caught:
        fetch_model(name, endpoint=None, say=print)
    assert caught.value.found == name


def test_a_file_that_was_changed_since_is_refused_with_both_digests(hub: Hub) -> None:
    folder = fetched(hub)
    whole = digest_of_folder(folder)
    (folder / "vocab.json").write_text('{"<|endoftext|>": 1}')
    with pytest.raises(InputError, match="the model has another digest") as caught:
        demanded(SOURCE, container=False)
    assert (caught.value.found, caught.value.allowed) == (digest_of_folder(folder), whole)


def demanded(source: ModelSource, *, container: bool) -> None:
    demand_model(source, model_folder(source), container=container)


def test_a_folder_is_held_against_its_digest(tmp_path: Path) -> None:
    folder = folder_at(tmp_path / "model")
    sha256 = digest_of_folder(folder)
    demanded(FolderModel(path=str(folder), sha256=None), container=True)
    demanded(FolderModel(path=str(folder), sha256=sha256), container=True)
    # What no model reads decides no score.
    (folder / "README.md").write_text("another text")
    demanded(FolderModel(path=str(folder), sha256=sha256), container=True)
    other = FolderModel(path=str(folder), sha256="0" * 64)
    with pytest.raises(InputError, match="another digest") as caught:
        demanded(other, container=True)
    assert (caught.value.found, caught.value.allowed) == (sha256, "0" * 64)
    with pytest.raises(InputError, match="no such folder of a model"):
        demanded(FolderModel(path=str(folder / "no"), sha256=None), container=True)


def test_links_out_of_a_folder_are_for_engines_without_containers(tmp_path: Path) -> None:
    folder = folder_at(tmp_path / "model")
    (tmp_path / "blob").write_bytes(FILES["model.safetensors"])
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(tmp_path / "blob")
    source = FolderModel(path=str(folder), sha256=None)
    demanded(source, container=False)
    with pytest.raises(InputError, match="links lead out of the folder") as caught:
        demanded(source, container=True)
    assert caught.value.found == ["model.safetensors"]


def test_a_path_is_that_of_who_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for path in ("~/model", "./model"):
        assert os.path.normpath(model_folder(FolderModel(path=path, sha256=None))) == str(tmp_path / "model")


def checkpoint(place: Path, identity: dict[str, str] | None = None) -> CheckpointModel:
    """Leave a checkpoint of one tensor after step 20, and return its name."""
    store = FolderStore(place)
    place.mkdir(parents=True)
    manifest = write(store, step=20, token=store.claim("test"), identity=identity)
    return CheckpointModel(place=str(place), step=20, sha256=manifest.digest())


def test_a_checkpoint_is_held_against_its_digest_before_it_is_read(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "saved", {"tokenizer": BYTES})
    demanded(source, container=True)
    with pytest.raises(InputError, match="the checkpoint has another digest") as caught:
        demanded(source.model_copy(update={"sha256": "0" * 64}), container=True)
    assert (caught.value.found, caught.value.allowed) == (source.sha256, "0" * 64)
    with pytest.raises(InputError, match="no such checkpoint") as caught:
        demanded(source.model_copy(update={"step": 21}), container=True)
    assert (caught.value.found, caught.value.allowed) == ("step-00000021", [20])
    with pytest.raises(InputError, match="no such folder of checkpoints"):
        demanded(source.model_copy(update={"place": str(tmp_path / "no")}), container=True)


def test_a_checkpoint_whose_tokenizer_is_not_here_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="tokenizer of this checkpoint is not on this machine") as caught:
        demanded(checkpoint(tmp_path / "saved", {"tokenizer": "1" * 64}), container=True)
    assert caught.value.found == "1" * 64
