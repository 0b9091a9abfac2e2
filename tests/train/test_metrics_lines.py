"""Points that start for the first time read no line of those before them, counted at two sizes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.train.small import MakeJob
from twinrun.execution import ranks
from twinrun.execution.engine import point_folder
from twinrun.protocol import metrics_lines
from twinrun.train import rank


@pytest.mark.parametrize("points", [10, 100])
def test_a_new_point_reads_no_line(
    tmp_path: Path, make_job: MakeJob, monkeypatch: pytest.MonkeyPatch, points: int
) -> None:
    read: Counter[str] = Counter()

    def counted(metrics: Path, point: str) -> None:
        read[point] += 1
        metrics_lines.forget(metrics, point)

    monkeypatch.setattr(ranks, "forget_lines", counted)
    monkeypatch.setattr(rank, "forget", counted)
    metrics = tmp_path / ranks.METRICS
    job = make_job().model_copy(update={"metrics": str(metrics)})

    def started(name: str) -> None:
        out = point_folder(tmp_path, name)
        out.mkdir(parents=True, exist_ok=True)
        rank.start_over(job.model_copy(update={"point": name, "out": str(out)}))
        with metrics.open("a") as stream:
            stream.write(json.dumps({"attempt": "a", "point": name}) + "\n")

    for number in range(points):
        ranks.clear(tmp_path, f"p{number}")
        started(f"p{number}")
    assert not read
    # Started anew by its scheduler, and then by its user; the plan may have lost the point since.
    metrics.write_text(metrics.read_text() + '{"attempt": "a", "poi')
    started("p3")
    ranks.clear(tmp_path, "p4")
    assert read == {"p3": 1, "p4": 1}
    kept = [json.loads(line)["point"] for line in metrics.read_text().splitlines()]
    assert Counter(kept) == Counter(f"p{number}" for number in range(points) if number != 4)
