"""Checkpoints in a folder, and what the command says of them, with no torch anywhere."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from tests.checkpoints.writing import place_of, write
from twinrun.checkpoints.folder import DamagedError, FolderStore
from twinrun.checkpoints.safetensors import parse_header
from twinrun.checkpoints.verification import retire, verify
from twinrun.cli.records import checkpoint
from twinrun.foundation.errors import RunError
from twinrun.foundation.files import canonical_json, sha256_of_bytes


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return place_of(tmp_path / "place")


def damage(store: FolderStore, step: int) -> None:
    file = Path(store.file(step, "rank-00001.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


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
    found = checkpoint("verify", Path(store.place))
    assert found.show(as_json=True) == 0
    assert [row["verified"] for row in json.loads(capsys.readouterr().out)] == [True] * 3
    damage(store, 4)
    assert checkpoint("list", Path(store.place)).code == 0
    assert checkpoint("verify", Path(store.place)).show(as_json=False) == 4
    said = capsys.readouterr().out
    assert "rank-00001.safetensors: model.weight@1,0 was changed\n  found: " in said
    assert "\n  allowed: " in said


@pytest.mark.parametrize(
    ("change", "message", "said"),
    [
        ({"dtype": "F9"}, "no manifest of a checkpoint", "should match pattern"),
        ({"holders": [[0, 2]]}, "no manifest of a checkpoint", "is in part 2 of 2"),
        ({"shape": [3, 3]}, "do not make up", "model.weight"),
    ],
)
def test_an_index_that_does_not_fit_is_damage(
    store: FolderStore, change: dict[str, object], message: str, said: str
) -> None:
    """Its own digest is right: whoever wrote it computed that too."""
    _rewrite_index(store, change)
    with pytest.raises(DamagedError, match=message) as caught:
        verify(store, 6)
    assert said in str(caught.value)


def _rewrite_index(store: FolderStore, change: dict[str, object]) -> None:
    content = json.loads(verify(store, 6).text())["content"]
    content["tensors"]["model.weight"] |= change
    sealed = {"content": content, "sha256": sha256_of_bytes(canonical_json(content).encode())}
    Path(store.file(6, "manifest.json")).write_bytes(canonical_json(sealed).encode())


WHOLE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "second",
    [
        {"shape": [-2], "data_offsets": [8, 0]},
        {"data_offsets": [8]},
        {"shape": [1e999], "data_offsets": [8, 16]},
        {"data_offsets": [8, 16], "dtype": "F9"},
        # They overlap, or leave a gap.
        {"data_offsets": [4, 12]},
        {"data_offsets": [0, 8]},
        {"data_offsets": [12, 20]},
    ],
)
def test_a_header_of_no_tensors_is_damage(second: dict[str, object]) -> None:
    text = json.dumps({"a": WHOLE, "b": WHOLE | second}).encode()
    with pytest.raises(DamagedError, match="no safetensors header"):
        parse_header(len(text).to_bytes(8, "little") + text, place="a file")


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
