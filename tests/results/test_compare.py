"""Two records side by side."""

from __future__ import annotations

import pytest

from tests.records import bench_record, training_record
from twinrun.foundation.errors import InputError
from twinrun.results.compare import compare
from twinrun.results.judged import Judged

HALF = {"nodes=1": 83.0, "nodes=32": 79.5}
WHOLE = {name: 2 * rate for name, rate in HALF.items()}


def one(rate: float, node: str = "nodes=1") -> Judged:
    return training_record({node: rate}, spread=0.01)


def test_a_record_equals_itself_and_a_gain_is_in_the_direction_of_the_metric() -> None:
    record = training_record(HALF, spread=0.01)
    found = compare(record, record)
    assert not found.differences
    assert {pair.gain.times for pair in found.pairs if pair.gain} == {1.0}
    assert {pair.metric: pair.difference for pair in found.pairs if not pair.gain} == {"loss": 0.0}
    assert all(pair.within_spread for pair in found.pairs)
    pairs = compare(record, training_record(WHOLE)).pairs
    gains = {pair.metric: round(pair.gain.times, 9) for pair in pairs if pair.gain}
    assert gains["step-time"] == gains["tokens-per-second"] == gains["model-flops"] == 2.0
    assert gains["peak-memory"] == 1.0


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        (
            training_record(HALF),
            training_record(WHOLE),
            (
                "B is faster: 2.00 times (2.00 to 2.00) A in MFU at 2 measurements, 2 of which differ by more"
                " than their spread; nothing recorded explains it"
            ),
        ),
        (one(90.0), one(60.0), "A is faster: 1.50 times (1.47 to 1.53) B in MFU at nodes=1"),
        (one(60.0), one(60.3), "Neither is faster: B is 1.00 times"),
        (one(83.0), one(79.5, "nodes=32"), "A is faster"),
        (
            training_record(HALF),
            training_record({"nodes=1": 300.0, "nodes=32": 290.0}, gpu="h200"),
            "most likely because: GPU model AMD Instinct MI250 -> NVIDIA H200 SXM",
        ),
    ],
)
def test_the_first_line_says_which_is_faster_and_why(a: Judged, b: Judged, said: str) -> None:
    found = compare(a, b)
    assert said in found.summary
    same = {point.id for point in a.points} & {point.id for point in b.points}
    assert ("the largest of each" in found.pairing) == (not same)


@pytest.mark.parametrize(
    ("settings", "refused", "summary"),
    [
        (
            ("model=mpt-1b",),
            {"step-time", "tokens-per-second", "model-flops", "loss", "peak-memory"},
            (
                "Two experiments. Not compared, because the runs differ in parameters 6,658,859,008 and"
                " 1,315,950,592: step time, tokens/s, model FLOP/s, peak memory, loss."
                " B is better: 2.00 times (2.00 to 2.00) A in MFU"
            ),
        ),
        (
            ("optimizer.learning_rate=1e-6",),
            {"loss"},
            (
                "B is faster: 2.00 times (2.00 to 2.00) A in MFU at 2 measurements, 2 of which differ by more"
                " than their spread; nothing recorded explains it. Not compared, because the runs differ in"
                " optimizer.learning_rate 0.00012 and 1e-06: loss"
            ),
        ),
    ],
)
def test_what_a_metric_depends_on_must_be_the_same_for_a_ratio(
    settings: tuple[str, ...], refused: set[str], summary: str
) -> None:
    found = compare(training_record(HALF), training_record(WHOLE, settings=settings))
    assert {pair.metric for pair in found.pairs if pair.obstacles} == refused
    assert not any(pair.gain or pair.difference for pair in found.pairs if pair.obstacles)
    assert found.summary.startswith(summary)


def test_benchmarks_are_compared_call_by_call() -> None:
    same = {"conv-forward-fp16": [0.2, 0.2], "scan-forward-fp16@upstream": [3.0, 3.0]}
    a = bench_record({"scan-forward-fp16": [2.0, 2.2], **same})
    b = bench_record({"scan-forward-fp16": [1.0, 1.1], **same})
    found = compare(a, b)
    gains = {pair.measurement: round(pair.gain.times, 6) for pair in found.pairs if pair.gain}
    expected = {"scan-forward-fp16": 2.0, "conv-forward-fp16": 1.0, "scan-forward-fp16@upstream": 1.0}
    assert gains.items() >= (expected | {"scan-forward-fp16/speedup@upstream": 2.0}).items()
    # What a baseline takes says nothing of the change.
    assert "in time at 2 measurements, 1 of which differ by more than their spread" in found.summary
    with pytest.raises(InputError, match="different recipes"):
        compare(training_record(HALF), a)
