"""Numbers per card, node and run: what adds up is summed over devices, and nothing else is."""

from __future__ import annotations

import pytest

from tests.records import BENCH, bench_record, training_record, verdict_on
from tests.results.test_judge import DIE, HALF, claim_of, one_verdict

HARDWARE = {"gpu": "mi250", "cards": 128, "nodes": 32, "software": "x"}
PEAK = 362.1


@pytest.mark.parametrize(("per", "devices"), [("device", 1), ("card", 2), ("node", 8), ("run", 256)])
def test_a_rate_is_summed_over_what_the_claim_counts(per: str, devices: int) -> None:
    claim = claim_of(
        kind="absolute",
        metric="model-flops",
        unit="TFLOP/s",
        per=per,
        formula="model-flops/6N+12LDS",
        point="nodes=32",
        value=79.5 * devices,
        better="higher",
        hardware=HARDWARE,
    )
    found = one_verdict(training_record(HALF), claim)
    assert found.outcome == "reproduced"
    assert found.measured == pytest.approx(79.5 * devices)


@pytest.mark.parametrize("per", ["device", "card"])
def test_a_share_of_a_card_is_that_of_its_devices(per: str) -> None:
    claim = claim_of(
        kind="absolute",
        metric="model-flops-share",
        unit="%",
        per=per,
        formula="model-flops/6N+12LDS",
        point="nodes=32",
        value=100 * 159 / PEAK,
        better="higher",
        hardware=HARDWARE,
    )
    found = one_verdict(training_record(HALF), claim)
    assert found.outcome == "reproduced"
    assert found.measured == pytest.approx(100 * 159 / PEAK, rel=1e-3)


def test_throughput_of_a_node_is_judged_on_the_published_hardware() -> None:
    record = training_record({"nodes=1": 47.8}, recipe="mamba-throughput")
    found = verdict_on(record, "throughput-4096-one-node")
    assert found.outcome == "reproduced"
    assert found.measured == pytest.approx(44000, rel=1e-3)


def test_a_time_of_a_device_is_none_of_a_run() -> None:
    claim = claim_of(
        kind="absolute",
        metric="time",
        unit="ms",
        per="run",
        measurement="scan-forward-fp16",
        point="2x4096x5376x16",
        value=2.0,
        better="lower",
        hardware=DIE,
    )
    found = one_verdict(bench_record({"scan-forward-fp16": [2.0, 2.0]}), claim, BENCH)
    assert found.outcome == "not-comparable"
    assert "measured per device, the claim is per run" in found.reason
