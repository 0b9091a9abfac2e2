"""Every committed record has the figures that the code gave which read it first."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.goldens import GOLDEN as GOLDENS
from tests.goldens import check_entry, digest
from tests.records import PROJECT, ROOT
from twinrun.results.reading import read_record
from twinrun.results.record import Record

# A digest of the figures of each converted record, by the code that wrote the file it was converted from.
# Verdicts follow from the claims as they stand.
GOLDEN: dict[str, str] = json.loads((GOLDENS / "records-converted.json").read_text(encoding="utf-8"))


def test_a_converted_record_names_the_file_that_it_comes_from() -> None:
    found = [read_record(ROOT / path, PROJECT).converted_from for path in GOLDEN]
    assert {one.schema_version for one in found if one} == {1}
    assert len({one.sha256 for one in found if one}) == len(GOLDEN)


def test_no_record_is_left_out() -> None:
    converted = {
        path.relative_to(ROOT).as_posix()
        for path in ROOT.glob("recipes/*/results/*.json")
        if json.loads(path.read_text(encoding="utf-8")).get("converted_from")
    }
    assert converted == GOLDEN.keys()


@pytest.mark.parametrize("path", GOLDEN)
def test_figures_are_the_same(path: str) -> None:
    check_entry(
        "records-converted.json", path, digest(json.dumps(figures(read_record(ROOT / path, PROJECT))))
    )


def figures(record: Record) -> dict[str, dict[str, Any]]:
    """Return the figures of every call, or of every point of a training, to twelve digits."""
    if record.plan.workload != "bench":
        return {point.id: rounded(_point(record, point.id)) for point in record.points}
    calls = [
        f"{point.id}/{one.id}"
        for point in record.points
        for one in point.measurements
        if set("@/").isdisjoint(one.id) and one.id != "peak-memory"
    ]
    return {key: rounded(_call(record, key)) for key in calls}


def rounded(value: Any) -> Any:
    """Return a value with the first twelve digits of its numbers."""
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return value if value is None else f"{value:.12g}"


def _call(record: Record, key: str) -> dict[str, Any]:
    point_name, _, call = key.partition("/")
    point = record.point(point_name)
    assert point
    baseline = next((one.id for one in point.measurements if one.id.startswith(f"{call}@")), "")
    speedup = next((one.id for one in point.measurements if one.id.startswith(f"{call}/speedup")), "")
    medians = {
        "ratio": speedup,
        "bandwidth GB/s": f"{call}/bandwidth",
        "copy share": f"{call}/bandwidth-share",
        "bound ms": f"{call}/roofline-time",
        "bound share": f"{call}/roofline-share",
        "error": f"{call}/error",
    }
    spreads = {"time": call, "baseline": baseline}
    return {
        **{name: _spread(record, point_name, one) for name, one in spreads.items()},
        **{name: _median(record, point_name, one) for name, one in medians.items()},
    }


def _point(record: Record, key: str) -> dict[str, Any]:
    memory = (_spread(record, key, "peak-memory") or [math.nan])[0]
    point = record.point(key)
    assert point
    losses = point.one_series("loss")
    rates = {name: _spread(record, key, name) for name in ("tokens-per-second", "model-flops", "step-time")}
    share = _median(record, key, "model-flops-share")
    return {
        **rates,
        "mfu": share,
        "peak memory": memory * 2**30,
        "losses": list(losses.values if losses else ()),
    }


def _spread(record: Record, point: str, name: str) -> list[float] | None:
    found = record.point(point)
    one = found.measurement(name) if found else None
    return [one.median, one.low, one.high, one.count] if one else None


def _median(record: Record, point: str, name: str) -> float | None:
    found = _spread(record, point, name)
    return found[0] if found else None


def test_a_record_is_not_changed_by_reading(tmp_path: Path) -> None:
    path = ROOT / next(iter(GOLDEN))
    before = path.read_bytes()
    read_record(path, PROJECT)
    assert path.read_bytes() == before
