from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.benches import POINT, bench_record, loaded_bench
from tests.records import gpus
from twinrun.claims import Claim, Published
from twinrun.judge import judge
from twinrun.record import BenchRecord, Verdict

# Published over the times of `bench_record`, at which ours takes exactly the published time.
SCAN_ON_DIE = 2.7 / 0.3


def verdict(record: BenchRecord, claim: str) -> Verdict:
    return next(item for item in record.verdicts if item.claim == claim)


def test_every_published_time_is_a_claim() -> None:
    claims = loaded_bench().published.claim
    assert len(claims) == 8
    assert {claim.better for claim in claims} == {"lower"}
    assert {claim.hardware.devices or claim.hardware.cards for claim in claims if claim.hardware} == {1}


@pytest.mark.parametrize(
    ("factor", "outcome"),
    [
        (0.2, "reproduced"),
        (1.0, "reproduced"),
        (1.04, "reproduced"),
        (1.06, "not-reproduced"),
        (30, "not-reproduced"),
    ],
)
def test_less_is_better(factor: float, outcome: str) -> None:
    found = verdict(bench_record(gpu="mi250", factor=SCAN_ON_DIE * factor), "scan-forward-mi250")
    assert found.outcome == outcome
    assert found.measured == pytest.approx(2.7 * factor)
    assert "lower is better" in found.reason


@given(st.floats(min_value=1.0501, max_value=1e6))
def test_a_slower_run_never_passes(factor: float) -> None:
    slower = bench_record(gpu="mi250", scale="paper", factor=SCAN_ON_DIE * factor)
    assert verdict(slower, "scan-forward-mi250").outcome == "not-reproduced"


def test_the_baseline_decides_nothing() -> None:
    fast = bench_record(gpu="mi250", factor=SCAN_ON_DIE)
    slow_baseline = [one.ratio for one in fast.points[0].measurements]
    assert min(ratio for ratio in slow_baseline if ratio) > 1
    assert verdict(fast, "scan-forward-mi250").outcome == "reproduced"


def test_another_gpu_is_not_comparable_and_says_what_it_took() -> None:
    found = verdict(bench_record(gpu="h200"), "scan-forward-a40")
    assert found.outcome == "not-comparable"
    assert found.reason == "published on NVIDIA A40, this run is on NVIDIA H200 SXM; 0.3 ms here"


def test_a_run_that_only_checks_is_not_judged() -> None:
    record = bench_record(gpu="mi250", scale="smoke")
    assert {item.outcome for item in record.verdicts} == {"not-comparable"}
    assert f"no case {POINT}" in record.verdicts[0].reason
    untimed = bench_record(gpu="mi250", settings=("repeats=0",))
    assert "no time of scan-forward-fp16" in untimed.verdicts[0].reason


def test_on_a_processor_nothing_is_judged() -> None:
    assert {item.outcome for item in bench_record(gpu=None, scale="smoke").verdicts} == {"not-comparable"}


def test_a_case_that_is_not_the_published_one_is_a_mismatch() -> None:
    published = loaded_bench().published
    other = Published(fingerprint=published.fingerprint | {"batch": 4}, claim=published.claim)
    found = judge(bench_record(gpu="mi250", scale="paper"), other, gpus())[0]
    assert found.outcome == "config-mismatch"
    assert "batch is 2, published 4" in found.reason


@pytest.mark.parametrize(
    "changes",
    [
        {"better": "higher"},
        {"unit": "TFLOP/s"},
        {"measurement": None},
        {"per": "card"},
        {"hardware": None},
    ],
)
def test_a_claim_of_a_time_cannot_be_turned_round(changes: dict[str, object]) -> None:
    claim = loaded_bench().published.claim[0]
    with pytest.raises(ValueError, match=claim.id):
        Claim.model_validate(claim.model_dump() | changes)
