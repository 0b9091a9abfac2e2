from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.records import gpus, node_record, smoke_record
from twinrun.formulas import MODEL_FLOPS, model_flops_per_token
from twinrun.hardware import Gpu
from twinrun.job import Plan
from twinrun.measure import measured_point
from twinrun.record import PointRecord
from twinrun.training import PointResult, StepMetrics


@cache
def node_plan() -> Plan:
    return node_record().plan


def measured(
    seconds: list[float],
    *,
    warmup: int = 0,
    place: int = 0,
    gpu: str | None = "h200",
    plan: Plan | None = None,
) -> PointRecord:
    """Measure steps of these lengths at one point of a plan."""
    plan = plan or node_plan()
    point = plan.points[place]
    steps = tuple(
        StepMetrics(point=point.id, step=index + 1, loss=5.0 - index, seconds=value, timed=index >= warmup)
        for index, value in enumerate(seconds)
    )
    result = PointResult(
        point=point.id,
        parameters=7,
        microbatch=4,
        steps=steps,
        peak_memory_bytes=123,
        device_name="a device",
        device_memory_bytes=456,
        attention_backend="flash",
        parallelism="fsdp2",
        data_hash="a" * 64,
        order_hash="b" * 64,
        libraries={},
    )
    row: Gpu | None = gpus()[gpu] if gpu else None
    return measured_point(plan=plan, point=point, result=result, attempts=(), gpu=row)


def test_a_rate_is_that_of_one_device() -> None:
    plan = node_plan()
    tokens = plan.training.global_batch * plan.shape.sequence
    for place, point in enumerate(plan.points):
        rate = measured([2.0, 2.0], place=place).tokens_per_second
        assert rate.median == tokens / 2.0 / point.world_size
        assert (rate.unit, rate.per) == ("tokens/s", "device")


def test_warm_up_is_trained_but_not_timed() -> None:
    found = measured([100.0, 50.0, 2.0, 4.0, 3.0], warmup=2)
    assert (found.warmup_steps, found.seconds_per_step.count) == (2, 3)
    assert (found.seconds_per_step.low, found.seconds_per_step.median, found.seconds_per_step.high) == (
        2,
        3,
        4,
    )
    assert found.losses == (5.0, 4.0, 3.0, 2.0, 1.0)


def test_the_slowest_step_is_the_lowest_rate() -> None:
    found = measured([1.0, 2.0, 4.0])
    assert found.tokens_per_second.high == 4 * found.tokens_per_second.low
    assert found.model_flops.rate.high == pytest.approx(4 * found.model_flops.rate.low)


def test_flops_are_tokens_times_the_formula_and_name_it() -> None:
    found = measured([2.0])
    flops = found.tokens_per_second.median * model_flops_per_token(node_plan().shape) / 1e12
    assert found.model_flops.rate.median == pytest.approx(flops)
    assert (found.model_flops.formula, found.model_flops.rate.unit) == (MODEL_FLOPS, "TFLOP/s")


def test_utilisation_is_over_the_dense_peak_of_a_device() -> None:
    found = measured([2.0], gpu="mi250")
    assert found.utilisation is not None
    assert found.utilisation.peak_tflops == gpus()["mi250"].peak_bf16_tflops / 2
    assert found.utilisation.value == pytest.approx(found.model_flops.rate.median / 181)
    assert found.utilisation.peak_source == gpus()["mi250"].source


def test_without_a_peak_or_in_another_precision_there_is_none() -> None:
    assert measured([2.0], gpu=None).utilisation is None
    assert smoke_record().plan.training.precision == "fp32"
    assert measured([2.0], gpu="h200", plan=smoke_record().plan).utilisation is None


@given(seconds=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=20), factor=st.floats(1.01, 10))
def test_a_slower_run_is_slower_in_every_number(seconds: list[float], factor: float) -> None:
    fast, slow = measured(seconds), measured([value * factor for value in seconds])
    assert slow.tokens_per_second.median < fast.tokens_per_second.median
    assert slow.model_flops.rate.high < fast.model_flops.rate.high
    assert slow.utilisation is not None
    assert fast.utilisation is not None
    assert slow.utilisation.value < fast.utilisation.value
