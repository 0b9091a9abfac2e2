from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benches import CEILINGS, POINT, bench_plan, bench_record
from tests.records import smoke_record
from twinrun.benchmark import BenchResult, Ceiling, Measured, Timing, Work
from twinrun.errors import InputError
from twinrun.measure import floor, measured_case
from twinrun.record import BenchRecord, MeasurementRecord, Record, read_any_record, read_record, write_record


def measurement(record: BenchRecord, name: str = "scan-forward-bf16") -> MeasurementRecord:
    case = record.point(POINT)
    found = case.measurement(name) if case else None
    assert found
    return found


def test_a_record_is_read_back(tmp_path: Path) -> None:
    record = bench_record()
    write_record(tmp_path / "record.json", record)
    again = read_any_record(tmp_path)
    assert isinstance(again, BenchRecord)
    assert again == record
    assert (tmp_path / "record.json").stat().st_size < 200_000


def test_both_kinds_are_told_apart(tmp_path: Path) -> None:
    write_record(tmp_path / "sweep.json", smoke_record())
    assert isinstance(read_any_record(tmp_path / "sweep.json"), Record)
    write_record(tmp_path / "bench.json", bench_record())
    with pytest.raises(InputError, match="record is of a benchmark"):
        read_record(tmp_path / "bench.json")


def test_a_changed_time_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    write_record(path, bench_record())
    content = json.loads(path.read_text())
    content["points"][0]["measurements"][0]["ours"]["milliseconds"]["median"] = 0.001
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match="changed after it was written"):
        read_any_record(path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"plan": {"bench": {}}}', '{"plan": 3}'])
def test_what_is_no_record_is_told(text: str, tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text(text)
    with pytest.raises(InputError):
        read_any_record(tmp_path)


def test_bandwidth_and_shares_follow_from_the_median() -> None:
    one = measurement(bench_record())
    assert one.ours.milliseconds
    assert one.gigabytes_per_second == pytest.approx(one.amounts["copy"] / 0.3e-3 / 1e9)
    assert one.copy_share == pytest.approx(one.amounts["copy"] / 0.3e-3 / 4.25e12)
    assert one.floor
    assert one.floor_share == pytest.approx(one.floor.milliseconds / one.ours.milliseconds.median)
    assert one.ratio == pytest.approx(0.8 / 0.3)
    assert (one.ours.milliseconds.count, one.ours.milliseconds.unit) == (30, "ms")


def test_the_floor_is_the_slowest_ceiling() -> None:
    work = Work(formula="f", amounts={"copy": 4.25e9, "exp2": 8.2e9, "fp32": 1.0})
    least = floor(work, CEILINGS)
    assert least
    assert least.milliseconds == pytest.approx(2.0)
    assert least.ceiling == "exp2"
    only_copy = floor(work, (Ceiling(id="copy", rate=4.25e12, what="w"),))
    assert only_copy
    assert only_copy.milliseconds == pytest.approx(1.0)


def test_without_ceilings_there_is_no_floor() -> None:
    one = measurement(bench_record(scale="node", settings=("repeats=0",)))
    assert (one.floor, one.copy_share, one.gigabytes_per_second, one.ratio) == (None, None, None, None)
    assert one.ours.milliseconds is None


def test_a_baseline_that_is_absent_says_why() -> None:
    (case, *_) = bench_plan(scale="smoke").points
    measured = Measured(
        id="a",
        operation="o",
        element="bf16",
        way="kernels",
        work=Work(formula="f", amounts={}),
        allowed_error=1.0,
        ours=Timing(
            implementation="i", version="1", milliseconds=(1.0, 3.0, 2.0), errors={"out": 0.5, "A": 0.75}
        ),
        baseline=None,
        baseline_absent="cannot be imported",
    )
    result = BenchResult(
        point=case.id,
        seed=1,
        ceilings=(),
        measurements=(measured,),
        device_name="cpu",
        device_memory_bytes=1,
        peak_memory_bytes=0,
        libraries={},
    )
    (one,) = measured_case(case=case, result=result).measurements
    assert (one.baseline, one.baseline_absent, one.ratio) == (None, "cannot be imported", None)
    assert (one.ours.error, one.ours.errors) == (0.75, {"out": 0.5, "A": 0.75})
    assert one.ours.milliseconds
    assert (one.ours.milliseconds.low, one.ours.milliseconds.median, one.ours.milliseconds.high) == (1, 2, 3)
