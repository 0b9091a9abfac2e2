"""What reading and writing the parts of a checkpoint costs, counted at two sizes, and their limit."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from twinrun.checkpoints import folder
from twinrun.checkpoints.folder import FolderStore, Sink
from twinrun.checkpoints.manifest import FORMAT, CheckpointManifest, StoredTensor
from twinrun.checkpoints.parts import Box, Piece, parts_for, write_part
from twinrun.checkpoints.safetensors import Entry
from twinrun.checkpoints.verification import read_manifest
from twinrun.foundation.errors import RunError

NAMES, ROWS = [f"model.{number}" for number in range(5)], 64
SIZES = (4, 16)


def save(place: Path, ranks: int) -> CheckpointManifest:
    """Save tensors of ROWS rows, as many on each of `ranks`."""
    written, target = [], FolderStore(place)
    token, rows = target.claim("run"), ROWS // ranks
    target.begin(1, token, needed=0)
    for rank in range(ranks):
        first = rank * rows
        pieces = [
            Piece(name, (first,), Entry(name=f"{name}@{first}", dtype="U8", shape=(rows,))) for name in NAMES
        ]

        def put(sink: Sink, data: bytes = bytes([rank]) * rows, pieces: list[Piece] = pieces) -> list[str]:
            for _ in pieces:
                sink.write(data)
            return [hashlib.sha256(data).hexdigest()] * len(pieces)

        name = f"rank-{rank:05d}"
        written.append(write_part(target, pieces, put, step=1, token=token, name=name))
    tensors = dict.fromkeys(NAMES, StoredTensor(dtype="U8", shape=(ROWS,), holders=((0, ranks - 1),)))
    about: dict[str, Any] = {"samples": 0, "identity": {}, "layout": {}}
    manifest = CheckpointManifest(
        format=FORMAT, step=1, token=token, parts=tuple(written), tensors=tensors, **about
    )
    target.commit(1, token, manifest.text())
    return manifest


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize(("times", "chunks", "most"), [(1, 1, 2), (0.5, 2, 5), (2, 1, 3)])
def test_a_rank_reads_its_own_part_or_the_neighbours_alone(
    tmp_path: Path, ranks: int, times: float, chunks: int, most: int
) -> None:
    save(tmp_path, ranks)
    size = int(ranks * times)
    rows = ROWS // size
    for rank in range(size):
        place = FolderStore(tmp_path)
        needed = {name: [Box.at((rank * rows,), (rows,))] for name in NAMES}
        with mock.patch.object(FolderStore, "open", autospec=True, side_effect=FolderStore.open) as opened:
            found = parts_for(place, read_manifest(place, 1), needed, rank=rank, world_size=size)
        read = [len(one) for part in found.values() for one in part.tensors.values()]
        assert sum(read) == len(NAMES) * chunks
        assert sum(call.args[2].endswith(".json") for call in opened.call_args_list) <= most
        assert times != 1 or list(found) == [rank]


@pytest.mark.parametrize("which", ["the index of this checkpoint", "the description of a part"])
def test_what_could_not_be_read_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    manifest = save(tmp_path / "first", 4)
    sizes = {"index": len(manifest.text()), "description": manifest.parts[0].description_bytes}
    size = sizes[which.split()[1]]
    for name, limit in (("second", size), ("third", size - 1)):
        monkeypatch.setattr(folder, "MAX_MANIFEST_BYTES", limit)
        if name == "third":
            with pytest.raises(RunError, match=f"{which} would be too large"):
                save(tmp_path / name, 4)
            assert FolderStore(tmp_path / name).steps() == []
        elif "index" in which:
            save(tmp_path / name, 4)
