"""The page for kernel authors has every timed call of the records, and says which is the fastest."""

from __future__ import annotations

from pathlib import Path

import pytest

from twinrun.planning.project import Project
from twinrun.report.kernels_page import kernels, rows_of
from twinrun.results.reading import read_record

ROOT = Path(__file__).resolve().parents[2]
RECORDS = sorted(ROOT.glob("recipes/*/results/h100*cuda13.0-torch2.11*.json"))
BENCHED = [path for path in RECORDS if path.parents[1].name in {"flash-attention", "mamba-kernels"}]


@pytest.mark.parametrize("path", BENCHED, ids=lambda path: path.parents[1].name + path.stem)
def test_every_timed_call_has_a_row(path: Path) -> None:
    record = read_record(path, Project(ROOT))
    measured = [(point.id, one) for point in record.points for one in point.measurements]
    calls = {
        (name, one.labels["call"])
        for name, one in measured
        if one.metric == "time" and one.labels.get("call")
    }
    page = kernels({"Kernels": [record]})
    assert page.count("\n| ") == len(rows_of(record)) + 2 == len(calls) + 2
    assert page.count("**") >= 2 * len(calls)
