"""What a plan predicts of its points, and what a record keeps of it."""

from __future__ import annotations

from tests.records import plan, training_record
from twinrun.report.page import tables


def test_every_microbatch_of_a_plan_is_predicted() -> None:
    made = plan(gpu="h200", scale="node", devices=8)
    for point in made.points:
        assert [one.attempt for one in point.predicted] == list(range(len(point.part.microbatches)))
        assert all((one.low or 0) < (one.seconds or 0) < (one.high or 0) for one in point.predicted)
        sizes = [one.memory_bytes for one in point.predicted]
        assert sizes == sorted(sizes, reverse=True)


def test_what_cannot_be_said_says_what_would_tell() -> None:
    many = plan().points[-1].predicted[0]
    assert many.seconds is None
    assert "network_gbit_s" in (many.unknown or "")
    asked = plan(gpu="h200", scale="node", settings=("compile=false",)).points[0].predicted[0]
    assert "no training with compile=False" in (asked.unknown or "")
    assert plan(gpu=None, scale="smoke", devices=0).points[0].predicted == ()


def test_predicted_stands_beside_measured() -> None:
    record = training_record({"nodes=1": 83.0}, gpu="mi250")
    (said,) = (note for note in tables(record)[0].notes if note.startswith("predicted of nodes=1"))
    predicted, measured = record.plan.points[0].predicted[0], record.points[0].measurement("step-time")
    off = (predicted.seconds or 0) / (measured.median if measured else 1) - 1
    assert said.endswith(f": {off:+.1%}")
