"""What reading and writing the parts of a checkpoint costs, counted at two sizes, and their limit."""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from twinrun.checkpoints import folder, parts, store
from twinrun.checkpoints.folder import FolderStore
from twinrun.checkpoints.manifest import FORMAT, CheckpointManifest, StoredTensor
from twinrun.checkpoints.parts import Box, Piece, demand_describable, demand_tiled, parts_for, write_part
from twinrun.checkpoints.safetensors import Entry
from twinrun.checkpoints.store import DamagedError, Sink
from twinrun.checkpoints.verification import TensorReader, read_manifest, verify
from twinrun.foundation.errors import RunError

TENSORS, ROWS = 5, 64
SIZES = (4, 16)


class CountingStore(FolderStore):
    """A folder that counts what is opened."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.opened: Counter[str] = Counter()

    @contextlib.contextmanager
    def open(self, step: int, name: str) -> Iterator[folder._File]:
        self.opened[name.rpartition(".")[2]] += 1
        with super().open(step, name) as source:
            yield source


def save(place: Path, ranks: int) -> CheckpointManifest:
    """Save tensors of ROWS rows, as many on each of `ranks`."""
    written, target = [], FolderStore(place)
    token, rows = target.claim("run"), ROWS // ranks
    target.begin(1, token, needed=0)
    for rank in range(ranks):
        pieces = [
            Piece(name, (rank * rows,), Entry(name=f"{name}@{rank * rows}", dtype="U8", shape=(rows,)))
            for name in (f"model.{number}" for number in range(TENSORS))
        ]

        def put(sink: Sink, data: bytes = bytes([rank]) * rows, pieces: list[Piece] = pieces) -> list[str]:
            for _ in pieces:
                sink.write(data)
            return [hashlib.sha256(data).hexdigest()] * len(pieces)

        name = f"rank-{rank:05d}"
        written.append(write_part(target, pieces, put, step=1, token=token, name=name))
    tensors = {
        f"model.{number}": StoredTensor(dtype="U8", shape=(ROWS,), holders=((0, ranks - 1),))
        for number in range(TENSORS)
    }
    about: dict[str, Any] = {"samples": 0, "previous": None, "identity": {}, "layout": {}}
    manifest = CheckpointManifest(
        format=FORMAT, step=1, token=token, parts=tuple(written), tensors=tensors, **about
    )
    target.commit(1, token, manifest.text())
    return manifest


def needs(rank: int, world_size: int) -> dict[str, list[Box]]:
    rows = ROWS // world_size
    return {f"model.{number}": [Box.at((rank * rows,), (rows,))] for number in range(TENSORS)}


@pytest.mark.parametrize("ranks", SIZES)
def test_a_rank_reads_its_own_part_alone(tmp_path: Path, ranks: int) -> None:
    save(tmp_path, ranks)
    for rank in range(ranks):
        place = CountingStore(tmp_path)
        manifest = read_manifest(place, 1)
        found = parts_for(place, manifest, needs(rank, ranks), rank=rank, world_size=ranks)
        assert (list(found), place.opened) == ([rank], {"json": 1})


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize(("times", "most"), [(0.5, 4), (2, 2)])
def test_another_number_of_ranks_reads_the_neighbours_alone(
    tmp_path: Path, ranks: int, times: float, most: int
) -> None:
    save(tmp_path, ranks)
    size = int(ranks * times)
    for rank in range(size):
        place = CountingStore(tmp_path)
        manifest = read_manifest(place, 1)
        found = parts_for(place, manifest, needs(rank, size), rank=rank, world_size=size)
        assert sum(len(chunks) for one in found.values() for chunks in one.tensors.values()) == TENSORS * (
            2 if times < 1 else 1
        )
        assert place.opened["json"] <= most


@pytest.mark.parametrize("ranks", SIZES)
def test_each_description_is_read_once(tmp_path: Path, ranks: int) -> None:
    save(tmp_path, ranks)
    place = CountingStore(tmp_path)
    manifest = verify(place, 1)
    assert place.opened == {"json": ranks, "safetensors": ranks}
    place.opened.clear()
    reader = TensorReader(place, manifest, manifest.tensors)
    assert place.opened == {"json": ranks, "safetensors": ranks}
    assert reader.read("model.0") == b"".join(bytes([rank]) * (ROWS // ranks) for rank in range(ranks))


def test_the_index_does_not_grow_with_ranks_times_tensors(tmp_path: Path) -> None:
    few, many = (len(save(tmp_path / str(ranks), ranks).text()) for ranks in SIZES)
    assert (many - few) / (SIZES[1] - SIZES[0]) < 160


def test_what_could_not_be_read_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the limit it is written and read; with one byte more it is refused before anything is there."""
    manifest = save(tmp_path / "first", 4)
    for size, what in (
        (len(manifest.text()), "the index of this checkpoint"),
        (manifest.parts[0].description_bytes, "the description of a part"),
    ):
        for module in (store, folder, parts):
            monkeypatch.setattr(module, "MAX_MANIFEST_BYTES", size, raising=False)
        store.demand_readable(size, place="here", what=what)
        with pytest.raises(RunError, match=f"{what} would be too large") as caught:
            store.demand_readable(size + 1, place="here", what=what)
        assert (caught.value.found, caught.value.allowed) == (f"{size + 1} bytes", f"at most {size} bytes")
    # The limit is now that of a description, which an index is larger than.
    with pytest.raises(RunError, match="index of this checkpoint"):
        FolderStore(tmp_path / "second").commit(1, 1, manifest.text())
    assert not (tmp_path / "second").exists()
    pieces = [
        Piece(f"model.{number}", (0,), Entry(name=f"model.{number}@0", dtype="U8", shape=(16,)))
        for number in range(TENSORS)
    ]
    demand_describable(pieces, place="here")
    with pytest.raises(RunError, match="the description of a part"):
        demand_describable([*pieces, pieces[0]._replace(tensor="model.9")], place="here")


def grid(rows: int, columns: int) -> list[Box]:
    return [Box.at((2 * row, 3 * column), (2, 3)) for row in range(rows) for column in range(columns)]


@pytest.mark.parametrize("rows", [2, 20])
def test_parts_of_a_grid_tile_it(rows: int) -> None:
    whole = [Box.at((0, 0), (2 * rows, 3 * rows))]
    boxes = grid(rows, rows)
    demand_tiled(boxes, whole, place="here")
    # Columns that are cut into rows of their own.
    uneven = [Box.at((0, 0), (5, 1)), Box.at((0, 1), (2, 2)), Box.at((2, 1), (3, 2))]
    demand_tiled(uneven, [Box.at((0, 0), (5, 3))], place="here")
    with pytest.raises(DamagedError, match="do not make up"):
        demand_tiled(boxes[1:], whole, place="here")
    with pytest.raises(DamagedError, match="parts overlap"):
        demand_tiled([boxes[-1], *boxes[1:]], whole, place="here")
    demand_tiled([Box((), ())], [Box((), ())], place="a number")
