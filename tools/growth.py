"""Measure how work grows with its size, and print the table of docs/reference/growth.md.

Work is counted, not timed: files that are opened, bytes that are read or written, lines that are looked at.
The exponent is that of a power of the size, between the smallest size and the largest: 1 is linear.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from twinrun.checkpoints.folder import FolderStore, _File
from twinrun.checkpoints.manifest import FORMAT, CheckpointManifest, StoredTensor
from twinrun.checkpoints.parts import Box, Piece, parts_for, write_part
from twinrun.checkpoints.safetensors import Entry
from twinrun.checkpoints.store import Sink
from twinrun.checkpoints.verification import read_manifest, verify
from twinrun.execution.ranks import METRICS, clear
from twinrun.foundation.processes import end_of
from twinrun.protocol import metrics_lines

TENSORS = 20
SIZES = (4, 16, 64)
Work = Callable[[Path, int], int]


class GrowthRow(NamedTuple):
    """One kind of work."""

    what: str
    size: str
    unit: str
    work: Work


class DescriptionCounter(FolderStore):
    """A folder of checkpoints that counts the bytes of the descriptions it opens."""

    described = 0

    @contextlib.contextmanager
    def open(self, step: int, name: str) -> Iterator[_File]:
        with super().open(step, name) as source:
            if name.endswith(".json"):
                self.described += source.size
            yield source


def save(place: Path, ranks: int) -> CheckpointManifest:
    """Save TENSORS tensors with a row on each of `ranks`."""
    store, parts = FolderStore(place), []
    token = store.claim("growth")
    store.begin(1, token, needed=0)
    names = [f"model.layers.{number}.weight" for number in range(TENSORS)]
    for rank in range(ranks):
        pieces = [
            Piece(name, (rank,), Entry(name=f"{name}@{rank}", dtype="U8", shape=(1,))) for name in names
        ]

        def put(sink: Sink) -> list[str]:
            sink.write(bytes(TENSORS))
            return [hashlib.sha256(bytes(1)).hexdigest()] * TENSORS

        parts.append(write_part(store, pieces, put, step=1, token=token, name=f"rank-{rank:05d}"))
    about: dict[str, Any] = {"samples": 0, "previous": None, "identity": {}, "layout": {}}
    tensors = {name: StoredTensor(dtype="U8", shape=(ranks,), holders=((0, ranks - 1),)) for name in names}
    manifest = CheckpointManifest(
        format=FORMAT, step=1, token=token, parts=tuple(parts), tensors=tensors, **about
    )
    store.commit(1, token, manifest.text())
    return manifest


def bytes_of_index(place: Path, ranks: int) -> int:
    """Return the size of the index."""
    return len(save(place, ranks).text())


def bytes_of_a_rank(place: Path, ranks: int) -> int:
    """Return the bytes of descriptions that one rank reads when it goes on."""
    save(place, ranks)
    store = DescriptionCounter(place)
    manifest = read_manifest(store, 1)
    needed = {name: [Box.at((ranks // 2,), (1,))] for name in manifest.tensors}
    parts_for(store, manifest, needed, rank=ranks // 2, world_size=ranks)
    return store.described


def bytes_of_verification(place: Path, ranks: int) -> int:
    """Return the bytes of descriptions that a verification reads."""
    save(place, ranks)
    store = DescriptionCounter(place)
    verify(store, 1)
    return store.described


def lines_before_points(place: Path, points: int) -> int:
    """Return how many lines of metrics are read before new points start."""
    read, real = 0, metrics_lines._is_of_another
    metrics = place / METRICS
    place.mkdir()

    def counted(line: str, point: str) -> bool:
        nonlocal read
        read += 1
        return real(line, point)

    metrics_lines._is_of_another = counted
    try:
        for number in range(points):
            clear(place, f"p{number}")
            with metrics.open("a") as stream:
                stream.write(f'{{"attempt": "a", "point": "p{number}"}}\n')
    finally:
        metrics_lines._is_of_another = real
    return read


def bytes_of_a_log(place: Path, mebibytes: int) -> int:
    """Return the bytes that a message about a failed rank takes of its log."""
    place.mkdir()
    log = place / "stderr.log"
    log.write_bytes(b"a line\n" * (mebibytes << 20 >> 3))
    return len(end_of(log))


ROWS = (
    GrowthRow("index of a checkpoint", "ranks", "bytes", bytes_of_index),
    GrowthRow("descriptions that a rank reads to go on", "ranks", "bytes", bytes_of_a_rank),
    GrowthRow("descriptions that a verification reads", "ranks", "bytes", bytes_of_verification),
    GrowthRow("lines of metrics read before new points", "points", "lines", lines_before_points),
    GrowthRow("log of a rank that failed, read for its message", "MiB", "bytes", bytes_of_a_log),
)


def exponent(sizes: Sequence[int], counts: Sequence[int]) -> float:
    """Return the power with which counts grow between the smallest size and the largest."""
    if not counts[0] or not counts[-1]:
        return 0.0
    return math.log(counts[-1] / counts[0]) / math.log(sizes[-1] / sizes[0])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="ranks or points, ascending")
    sizes = parser.parse_args().sizes
    print("| work | counted | " + " | ".join(f"at {size}" for size in sizes) + " | exponent |")
    print("| --- | --- |" + " --: |" * (len(sizes) + 1))
    for row in ROWS:
        with tempfile.TemporaryDirectory() as folder:
            counts = [row.work(Path(folder) / str(size), size) for size in sizes]
        found = " | ".join(map(str, counts))
        by = f"{row.unit}, by {row.size}"
        print(f"| {row.what} | {by} | {found} | {exponent(sizes, counts):.2f} |")


if __name__ == "__main__":
    main()
