"""Measure how work grows with its size, and print the table of docs/reference/growth.md.

Work is counted, not timed: files that are opened, bytes that are read or written, lines that are looked at,
functions of Python that are called.
The exponent is that of a power of the size, between the smallest size and the largest: 1 is linear.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from twinrun.checkpoints.folder import FolderStore, _File
from twinrun.checkpoints.manifest import FORMAT, CheckpointManifest, StoredTensor
from twinrun.checkpoints.parts import Box, Piece, parts_for, write_part
from twinrun.checkpoints.safetensors import Entry
from twinrun.checkpoints.store import Sink
from twinrun.checkpoints.verification import read_manifest, verify
from twinrun.execution.ranks import METRICS, clear
from twinrun.foundation.processes import end_of
from twinrun.parity.answer import judge_logs
from twinrun.parity.readers import read_log
from twinrun.planning.project import Project
from twinrun.protocol import metrics_lines
from twinrun.report.page import write_recipe_report
from twinrun.results.compare import compare
from twinrun.results.judge import judge
from twinrun.results.reading import read_record
from twinrun.results.record import Record, write_record

PROJECT = Project(Path(__file__).resolve().parents[1])
# A recipe with committed records of one point.
RECIPE = "mpt-throughput"
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


def calls(work: Callable[[], object]) -> int:
    """Return how many functions of Python `work` calls, when what is read once has been read."""
    work()
    found = 0

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal found
        found += event == "call"

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found


@cache
def committed() -> Record:
    """Return a committed record of RECIPE."""
    return read_record(min((PROJECT.root / "recipes" / RECIPE / "results").glob("*.json")), PROJECT)


def record_of(points: int) -> Record:
    """Return a record with so many copies of its first point."""
    record = committed()
    planned, measured = record.plan.points[0], record.points[0]
    names = [f"{planned.id}-{number}" for number in range(points)]
    plan = record.plan.model_copy(
        update={"points": tuple(planned.model_copy(update={"id": name}) for name in names)}
    )
    own = tuple(measured.model_copy(update={"id": name}) for name in names)
    record = record.model_copy(update={"plan": plan, "plan_sha256": plan.sha256(), "points": own})
    verdicts = judge(record, PROJECT.recipe(RECIPE).published, PROJECT)
    return record.model_copy(update={"verdicts": verdicts}).with_digest()


def calls_of_reading(place: Path, points: int) -> int:
    """Return the calls that reading a record takes."""
    place.mkdir()
    write_record(place / "record.json", record_of(points))
    return calls(lambda: read_record(place / "record.json", PROJECT))


def calls_of_comparison(place: Path, points: int) -> int:
    """Return the calls that holding two records side by side takes."""
    place.mkdir()
    write_record(place / "record.json", record_of(points))
    one, other = (read_record(place / "record.json", PROJECT) for _ in "ab")
    return calls(lambda: compare(one, other, PROJECT))


def pages(place: Path, records: int) -> Callable[[], Path]:
    """Return what writes the pages of a recipe that has so many records."""
    known = [committed().model_copy(update={"run": f"run-{number:05}"}) for number in range(records)]
    recipe = PROJECT.recipe(RECIPE)
    return lambda: write_recipe_report(place / "report.html", records=known, recipe=recipe, project=PROJECT)


def bytes_of_page(place: Path, records: int) -> int:
    """Return the size of the page of a recipe."""
    return pages(place, records)().stat().st_size


def calls_of_pages(place: Path, records: int) -> int:
    """Return the calls that the page of a recipe and those of its records take."""
    return calls(pages(place, records))


def log_of(place: Path, steps: int) -> Path:
    """Write a log of so many steps whose loss falls."""
    place.mkdir()
    log = place / "run.jsonl"
    log.write_text("".join(f'{{"step": {one}, "loss": {2 + 8 / (one + 1)}}}\n' for one in range(steps)))
    return log


def calls_of_a_log(place: Path, hundreds: int) -> int:
    """Return the calls that reading the log of another program takes."""
    log = log_of(place, 100 * hundreds)
    return calls(lambda: read_log(log))


def calls_of_parity(place: Path, hundreds: int) -> int:
    """Return the calls that holding two curves together takes, with two controls."""
    curve = read_log(log_of(place, 100 * hundreds))
    others = [
        curve.model_copy(
            update={"values": tuple(one * factor for one in curve.values), "digest": str(factor)}
        )
        for factor in (1.00001, 0.99999, 1.00002)
    ]
    return calls(lambda: judge_logs(curve, others[0], controls=others[1:], metric=PROJECT.metrics["loss"]))


ROWS = (
    GrowthRow("index of a checkpoint", "ranks", "bytes", bytes_of_index),
    GrowthRow("descriptions that a rank reads to go on", "ranks", "bytes", bytes_of_a_rank),
    GrowthRow("descriptions that a verification reads", "ranks", "bytes", bytes_of_verification),
    GrowthRow("lines of metrics read before new points", "points", "lines", lines_before_points),
    GrowthRow("a record, read", "points", "calls", calls_of_reading),
    GrowthRow("two records, compared", "points", "calls", calls_of_comparison),
    GrowthRow("page of a recipe", "records", "bytes", bytes_of_page),
    GrowthRow("all pages of a recipe, written", "records", "calls", calls_of_pages),
    GrowthRow("log of another program, read", "100 steps", "calls", calls_of_a_log),
    GrowthRow("two curves and two controls, judged", "100 steps", "calls", calls_of_parity),
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
