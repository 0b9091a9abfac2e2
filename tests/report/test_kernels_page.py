"""The page for kernel authors has every timed call of the records, and says which is the fastest."""

from __future__ import annotations

from tests.records import bench_record
from twinrun.report.kernels_page import kernels, rows_of


def test_every_timed_call_has_a_row() -> None:
    times = {
        "scan-forward-fp16": [0.5] * 9,
        "scan-forward-fp16@mamba_ssm": [1.0] * 9,
        "scan-backward-fp16": [2.0] * 9,
    }
    record = bench_record(times, gpu="h200", work=1e9)
    measured = [(point.id, one) for point in record.points for one in point.measurements]
    calls = {
        (name, one.labels["call"])
        for name, one in measured
        if one.metric == "time" and one.labels.get("call")
    }
    page = kernels({"Kernels": [record]})
    assert page.count("\n| ") == len(rows_of(record)) + 2 == len(calls) + 2
    assert page.count("**") >= 2 * len(calls)
