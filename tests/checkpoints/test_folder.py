"""Checkpoints in a folder, and what the command says of them, with no torch anywhere."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Literal

import pytest

from tests.checkpoints.writing import VALUES, write
from twinrun.checkpoints.folder import FolderStore, _File
from twinrun.checkpoints.manifest import Chunk
from twinrun.checkpoints.parts import parts_for, read_part, whole_of
from twinrun.checkpoints.safetensors import Entry, parse_header
from twinrun.checkpoints.store import DamagedError
from twinrun.checkpoints.verification import TensorReader, entry_of, read_manifest, retire, verify
from twinrun.cli.checkpoint import checkpoint
from twinrun.foundation.errors import InputError, RunError, TwinrunError
from twinrun.foundation.files import canonical_json, sha256_of_bytes

FILE = "rank-00000.safetensors"


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    """A place with checkpoints of steps 2, 4 and 6."""
    store = FolderStore(tmp_path / "place")
    token = store.claim("run")
    for step in (2, 4, 6):
        write(store, step=step, token=token)
    return store


def damage(store: FolderStore, step: int) -> None:
    file = Path(store.file(step, "rank-00001.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_the_newest_two_are_kept(store: FolderStore) -> None:
    assert retire(store) == [2]
    assert store.steps() == [4, 6]
    assert retire(store) == []


def test_the_last_good_one_is_kept(store: FolderStore) -> None:
    damage(store, 4)
    damage(store, 6)
    assert retire(store) == []
    assert verify(store, 2).step == 2


@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_a_good_one_stays(tmp_path: Path, seed: int) -> None:
    draw, store = random.Random(seed), FolderStore(tmp_path)
    token, good = store.claim("run"), set[int]()
    for step in range(10):
        write(store, step=step, token=token)
        good.add(step)
        if draw.random() < 0.5:
            damaged = draw.choice(store.steps())
            damage(store, damaged)
            good.discard(damaged)
        before = bool(good)
        good -= set(retire(store, kept=draw.randrange(1, 3)))
        assert bool(good) == before


def test_a_place_is_verified(store: FolderStore, capsys: pytest.CaptureFixture[str]) -> None:
    found = checkpoint("verify", store.place)
    assert found.show(as_json=True) == 0
    assert [row["verified"] for row in json.loads(capsys.readouterr().out)] == [True] * 3
    damage(store, 4)
    assert checkpoint("list", store.place).code == 0
    assert checkpoint("verify", store.place).show(as_json=False) == 4
    said = capsys.readouterr().out
    assert "rank-00001.safetensors: model.weight@1,0 was changed\n  found: " in said
    assert "\n  allowed: " in said


def test_parts_of_ranks_become_one_tensor(store: FolderStore) -> None:
    manifest = verify(store, 6)
    assert TensorReader(store, manifest, ["model.weight"]).read("model.weight") == VALUES


def test_a_disk_that_cannot_read_is_damage(store: FolderStore) -> None:
    with Path("/proc/self/mem").open("rb", buffering=0) as stream:
        # Nothing is mapped at its begin: the kernel answers as a disk does with a bad sector.
        source = _File(stream, place="a file")
        with pytest.raises(DamagedError, match="cannot be read") as caught:
            source.read_into(memoryview(bytearray(12)), 0)
    assert caught.value.found == "Input/output error at byte 0"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dtype": "F9"}, "no such type"),
        ({"holders": [[1, 0]]}, "ends before it begins"),
        ({"holders": [[0, 1], [1, 1]]}, "not ascending"),
        ({"holders": [[0, 2]]}, "is in part 2 of 2"),
    ],
)
def test_an_index_of_no_tensor_is_damage(store: FolderStore, change: dict[str, object], said: str) -> None:
    """Its own digest is right: whoever wrote it computed that too."""
    _rewrite_index(store, change)
    with pytest.raises(DamagedError, match="no manifest of a checkpoint") as caught:
        verify(store, 6)
    assert said in str(caught.value.found)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"shape": [6]}, "other dimensions"),
        ({"shape": [1, 3]}, "lies outside"),
        ({"shape": [3, 3]}, "do not make up"),
        ({"holders": [[0, 0]]}, "where the index has none"),
    ],
)
def test_parts_that_do_not_fit_to_the_index_are_damage(
    store: FolderStore, change: dict[str, object], said: str
) -> None:
    _rewrite_index(store, change)
    with pytest.raises(DamagedError, match=said) as caught:
        verify(store, 6)
    assert "model.weight" in str(caught.value.place)


def _rewrite_index(store: FolderStore, change: dict[str, object], parts: object = None) -> None:
    content = json.loads(verify(store, 6).text())["content"]
    content["tensors"]["model.weight"] |= change
    content["parts"] = parts or content["parts"]
    sealed = {"content": content, "sha256": sha256_of_bytes(canonical_json(content).encode())}
    Path(store.file(6, "manifest.json")).write_bytes(canonical_json(sealed).encode())


def test_two_parts_at_one_offset_are_damage(store: FolderStore) -> None:
    """As many elements as the tensor has, but half of them twice."""
    manifest = verify(store, 6)
    second = read_part(store, manifest, 1)
    (chunk,) = second.tensors["model.weight"]
    moved = chunk.model_copy(update={"offsets": (0, 0)})
    text = second.model_copy(update={"tensors": {"model.weight": (moved,)}}).text()
    stored = manifest.parts[1].model_copy(
        update={"description_bytes": len(text), "sha256": sha256_of_bytes(text)}
    )
    parts = [one.model_dump() for one in (manifest.parts[0], stored)]
    _rewrite_index(store, {}, parts)
    Path(store.file(6, stored.description)).write_bytes(text)
    with pytest.raises(DamagedError, match="parts overlap"):
        verify(store, 6)
    changed = read_manifest(store, 6)
    for read in (
        lambda: parts_for(store, changed, {"model.weight": [whole_of(changed.tensors["model.weight"])]}),
        lambda: TensorReader(store, changed, ["model.weight"]).read("model.weight"),
    ):
        with pytest.raises(DamagedError, match="parts overlap"):
            read()


@pytest.mark.parametrize(
    "described",
    [
        {"shape": [1, -3], "data_offsets": [0, -12]},
        {"shape": [1, 3], "data_offsets": [-12, 0]},
        {"shape": [1, 3], "data_offsets": [0]},
        {"shape": [1, 1e999], "data_offsets": [0, 12]},
        {"shape": [1, 3], "data_offsets": [0, 12], "dtype": "F9"},
    ],
)
def test_a_header_of_no_tensor_is_damage(described: dict[str, object]) -> None:
    text = json.dumps({"a": {"dtype": "F32"} | described}).encode()
    with pytest.raises(DamagedError, match="no safetensors header"):
        parse_header(len(text).to_bytes(8, "little") + text, place="a file")


def test_a_tensor_that_ends_after_its_file_is_refused_before_it_takes_memory(store: FolderStore) -> None:
    entry = Entry(name="model.weight@0,0", dtype="F32", shape=(1 << 50, 3))
    chunk = Chunk(key=entry.name, offsets=(0, 0), sizes=entry.shape, sha256="0" * 64)
    with store.open(6, FILE) as source, pytest.raises(DamagedError, match="ends after the file"):
        entry_of(chunk, {entry.name: entry}, source, place=FILE)


def test_a_run_that_another_has_replaced_is_told_so_at_every_step(tmp_path: Path) -> None:
    """Not that a file is missing: the other run has removed the draft."""
    old, new = FolderStore(tmp_path), FolderStore(tmp_path)
    token = old.claim("first")
    old.begin(2, token, needed=10)
    with old.create(2, token, "rank-00000.safetensors") as sink:
        sink.write(b"whole")
    new.claim("second")
    for call in (
        lambda: old.begin(4, token, needed=10),
        lambda: old.create(2, token, "rank-00001.safetensors").__enter__(),
        lambda: old.commit(2, token, b"{}"),
    ):
        with pytest.raises(RunError, match="another run writes its checkpoints here") as caught:
            call()
        assert (caught.value.found, caught.value.allowed) == ("writer 2 (second)", "this run, writer 1")
    assert old.steps() == []


def test_a_place_that_is_gone_is_named(store: FolderStore) -> None:
    shutil.rmtree(store.place)
    with pytest.raises(RunError, match="was emptied, or is gone") as caught:
        write(store, step=8, token=1)
    assert caught.value.place == store.place
    assert not Path(store.place).exists()


@pytest.mark.parametrize("version", [1, 3])
def test_another_format_is_refused(store: FolderStore, version: int) -> None:
    manifest = verify(store, 6).model_copy(update={"format": version})
    Path(store.file(6, "manifest.json")).write_bytes(manifest.text())
    with pytest.raises(InputError, match="another format") as caught:
        verify(store, 6)
    assert (caught.value.found, caught.value.allowed) == (version, 2)


@pytest.mark.parametrize("action", ["verify", "list", "convert"])
def test_a_folder_that_holds_none_is_named(
    tmp_path: Path, action: Literal["verify", "list", "convert"]
) -> None:
    with pytest.raises(TwinrunError) as caught:
        checkpoint(action, str(tmp_path / "nothing"), out=str(tmp_path / "out"))
    assert caught.value.exit_code == 2
