"""The page for kernel authors has every timed call of the records, and says which is the fastest."""

from __future__ import annotations

from pathlib import Path

import pytest

from twinrun.planning.project import Project
from twinrun.report.kernels_page import bar, kernels, rows_of
from twinrun.results.reading import read_record

ROOT = Path(__file__).resolve().parents[2]
RECORDS = sorted(ROOT.glob("recipes/*/results/h100*cuda13.0-torch2.11*.json"))
BENCHED = [path for path in RECORDS if path.parents[1].name in {"flash-attention", "mamba-kernels"}]


@pytest.mark.parametrize("path", BENCHED, ids=lambda path: path.parents[1].name + path.stem)
def test_every_timed_call_has_a_row(path: Path) -> None:
    record = read_record(path, Project(ROOT))
    calls = {
        (point.id, one.labels["call"])
        for point in record.points
        for one in point.measurements
        if one.metric == "time" and "call" in one.labels
    }
    rows = rows_of(record)
    assert len(rows) == len(calls) > 0
    assert all(row.ours and row.ours > 0 for row in rows)
    page = kernels({"Kernels": [record]})
    assert page.count("\n| ") == len(rows) + 2
    assert page.count("**") >= 2 * len(rows)


def test_a_bar_is_as_long_as_the_share() -> None:
    assert '<rect width="60"' in bar(0.5)
    assert "50% of the roofline bound" in bar(0.5)
    assert '<rect width="120" height="10" fill="currentColor"/>' in bar(1.2)
