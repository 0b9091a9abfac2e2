"""Checkpoints in a folder, and what the command says of them, with no torch anywhere."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.checkpoints.writing import VALUES, write
from twinrun.checkpoints.folder import FolderStore
from twinrun.checkpoints.retention import retire
from twinrun.checkpoints.verification import verify
from twinrun.checkpoints.whole import whole_tensor
from twinrun.cli.checkpoint import checkpoint
from twinrun.foundation.errors import InputError, TwinrunError


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
    assert checkpoint("verify", store.place, step=None, out=None, as_json=True) == 0
    assert [row["verified"] for row in json.loads(capsys.readouterr().out)] == [True] * 3
    damage(store, 4)
    assert checkpoint("list", store.place, step=None, out=None, as_json=False) == 0
    assert checkpoint("verify", store.place, step=None, out=None, as_json=False) == 4
    said = capsys.readouterr().out
    assert "rank-00001.safetensors: model.weight@1,0 was changed\n  found: " in said
    assert "\n  allowed: " in said


def test_parts_of_ranks_become_one_tensor(store: FolderStore) -> None:
    manifest = verify(store, 6)
    assert whole_tensor(store, manifest, manifest.tensors["model.weight"]) == VALUES


def test_a_newer_format_is_refused(store: FolderStore) -> None:
    manifest = verify(store, 6).model_copy(update={"format": 2})
    Path(store.file(6, "manifest.json")).write_bytes(manifest.text())
    with pytest.raises(InputError, match="another format") as caught:
        verify(store, 6)
    assert (caught.value.found, caught.value.allowed) == (2, 1)


@pytest.mark.parametrize("action", ["verify", "list", "convert", "verfy"])
def test_a_folder_that_holds_none_is_named(tmp_path: Path, action: str) -> None:
    with pytest.raises(TwinrunError) as caught:
        checkpoint(action, str(tmp_path / "nothing"), step=None, out=str(tmp_path / "out"), as_json=False)
    assert caught.value.exit_code == 2
