"""Predictions against what was published, on rows that nothing was fitted on, and against physics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import mean, quantiles

import pytest

from tests.contracts.tree import ROOT
from twinrun.foundation.errors import InputError
from twinrun.manifests.vendor import Gpu
from twinrun.planning.project import Project
from twinrun.predict.calibration import Calibration, calibration
from twinrun.predict.parallel_layout import Machines, ParallelLayout
from twinrun.predict.prediction import Prediction, predict
from twinrun.predict.rows import Residual, residuals, rows
from twinrun.protocol.models import member

GPUS = Project(ROOT).gpus
KNOWN = calibration()
HELD_OUT = residuals(GPUS, KNOWN)


def errors(chosen: Callable[[Residual], bool]) -> list[float]:
    return [abs(one.error) for one in HELD_OUT if chosen(one)]


def test_mpt_of_other_sizes_and_on_more_nodes() -> None:
    found = errors(lambda one: one.row.software.startswith("foundry"))
    assert len(found) == 179
    assert mean(found) < 0.05
    assert quantiles(found, n=20)[-1] < 0.12


def test_tensor_pipeline_and_data_parallel() -> None:
    found = errors(lambda one: one.row.software == "megatron-2022")
    assert len(found) == 352
    assert mean(found) < 0.08
    assert quantiles(found, n=20)[-1] < 0.20


def without(known: Calibration, gpu: str) -> Calibration:
    """Return a calibration that never saw a kind of GPU."""

    def left(table: dict[str, float]) -> dict[str, float]:
        return {name: value for name, value in table.items() if not name.startswith(gpu)}

    others = [
        one.model_copy(update={"products": left(one.products), "attention": left(one.attention)})
        for one in known.software
    ]
    # Without another software that was fitted on it, too.
    return known.model_copy(update={"software": tuple(one for one in others if one.products)})


@pytest.mark.parametrize("gpu", ["h100", "a100"])
def test_a_gpu_left_out(gpu: str) -> None:
    left = without(KNOWN, gpu)
    chosen = [one for one in rows() if one.gpu.startswith(gpu) and one.software.startswith("foundry")]
    mine = [abs(Residual(row, row.predicted(GPUS, left)).error) for row in chosen]
    assert mean(mine) < 0.20


def test_intervals_cover_nine_of_ten() -> None:
    assert 0.86 <= mean(one.covered for one in HELD_OUT) <= 0.95


def test_memory_calls_nothing_impossible_that_ran() -> None:
    everything = (*HELD_OUT, *residuals(GPUS, KNOWN, part="fit"))
    assert {one.prediction.memory.fit(GPUS[one.row.gpu]) for one in everything} <= {"FITS", "AT RISK"}


def of(
    gpu: Gpu | str, layout: ParallelLayout, *, model: str = "mpt-7b", devices: int = 8, **more: object
) -> Prediction:
    row = GPUS[gpu] if isinstance(gpu, str) else gpu
    machines = Machines(row, devices, **more)  # type: ignore[arg-type]
    shape = member(model, place="model")
    return predict(shape, machines, layout, software=KNOWN.of("twinrun-2026"), calibration=KNOWN)


SHARDED = ParallelLayout(global_batch=1536, microbatch=2, shards="parameters")


def test_more_nodes_are_never_faster_a_device() -> None:
    one, many = (of("mi300x", SHARDED, nodes=nodes, network=50e9) for nodes in (1, 32))
    assert one.tokens_per_second is not None
    assert many.tokens_per_second is not None
    assert many.tokens_per_second <= one.tokens_per_second
    assert many.half > one.half


def test_no_device_beats_its_peak() -> None:
    for gpu in GPUS.values():
        share = of(gpu, SHARDED).model_flops_share
        assert share is None or share < 1


def test_what_is_not_known_is_said() -> None:
    assert "--network" in (of("h200", SHARDED, nodes=2).unknown or "")
    assert "selective scan" in (of("mi250", SHARDED, model="mambaoutai").unknown or "")
    assert "link_gb_s" in (of("mi300a", SHARDED).unknown or "")
    assert of("mi300a", SHARDED).time is None


def test_a_pipeline_waits_for_its_stages() -> None:
    whole = of("h200", replace(SHARDED, shards="none"))
    staged = of("h200", replace(SHARDED, shards="none", pipeline=4))
    assert whole.time is not None
    assert staged.time is not None
    assert whole.time.bubble == 0 < staged.time.bubble


@pytest.mark.parametrize(
    ("changed", "devices", "words"),
    [
        ({"tensor": 4}, 7, "does not divide 7 devices"),
        ({"tensor": 3}, 3, "does not divide 4096 features"),
        ({"global_batch": 100}, 8, "does not divide 100 sequences"),
        ({"pipeline": 5}, 5, "does not divide 32 layers"),
        ({"experts": 16}, 8, "experts are spread"),
        ({"microbatch": 0}, 8, "expected a count"),
    ],
)
def test_what_does_not_divide_is_refused(changed: dict[str, int], devices: int, words: str) -> None:
    with pytest.raises(InputError, match=words):
        of("h200", replace(SHARDED, **changed), devices=devices)  # type: ignore[arg-type]
