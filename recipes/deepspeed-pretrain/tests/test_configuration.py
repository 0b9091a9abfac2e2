"""DeepSpeed's configuration of each layout of the recipe."""

from __future__ import annotations

from typing import Any

import pytest
from configuration import configuration, refuse

from tests.records import plan
from twinrun.foundation.errors import InputError
from twinrun.protocol.training import TrainingJob
from twinrun.workloads import load_workload
from twinrun.workloads.workload import Run

RECIPE = "deepspeed-pretrain"
SMOKE: dict[str, Any] = {"scale": "smoke", "gpu": None, "devices": 0}
PAPER: dict[str, Any] = {"scale": "paper", "gpu": "mi210", "devices": 8}
RUN = Run(recipe=RECIPE, accelerator=False, out="", metrics="", attempt="0")


def jobs(**choices: Any) -> dict[str, TrainingJob]:
    made = plan(RECIPE, **choices)
    workload = load_workload("training")
    found = {point.id: workload.job(made.part, point, 0, RUN) for point in made.points}
    assert all(isinstance(job, TrainingJob) for job in found.values())
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("scale", [SMOKE, PAPER], ids=lambda one: str(one["scale"]))
def test_the_batch_arithmetic_is_deepspeeds_own(scale: dict[str, Any]) -> None:
    for name, job in jobs(**scale).items():
        config = configuration(job)
        copies = job.world_size // job.replicas
        product = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * copies
        assert product == config["train_batch_size"] == job.training.global_batch, name


@pytest.mark.parametrize(
    ("name", "found", "says"),
    [
        ("steps_per_print.every", "steps_per_print.every: steps_per_print", "no table"),
        ("zero_optimization.stage", "zero_optimization.stage", "says this itself"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(name: str, found: str, says: str) -> None:
    job = jobs(**SMOKE)["zero-1"]
    assert job.layout
    layout = job.layout.model_copy(update={"settings": {name: 1}})
    with pytest.raises(InputError, match=says) as caught:
        configuration(job.model_copy(update={"layout": layout}))
    assert caught.value.found == found


def test_the_published_configuration_is_rendered_as_published() -> None:
    config = configuration(jobs(**PAPER)["tp2-pp2-dp2"])
    assert (config["zero_optimization"]["stage"], config["gradient_clipping"]) == (1, 1.0)
    assert (config["fp16"]["enabled"], config["fp16"]["initial_scale_power"]) == (True, 11)
    assert (config["train_batch_size"], config["train_micro_batch_size_per_gpu"]) == (256, 2)
    # How an offload holds its memory is a setting beside where it goes.
    job = jobs(**SMOKE, settings=("layouts=zero-2-offload-pageable",))["zero-2-offload-pageable"]
    offload = configuration(job)["zero_optimization"]["offload_optimizer"]
    assert offload == {"device": "cpu", "pin_memory": False}


@pytest.mark.parametrize(
    ("point", "layout", "key", "why"),
    [
        ("pp2", {"zero": 2}, "zero", "ZeRO-2 and 3 split"),
        ("moe-ep2", {"zero": 3}, "zero", "experts"),
        ("moe-ep2", {"experts": 3}, "experts", "whole"),
        ("zero-1", {"experts": 2}, "experts", "whole"),
        ("zero-1", {"sharding": "full"}, "sharding", "by its own stages"),
        ("zero-2-offload", {"zero": 0}, "offload", "is offloaded"),
        ("zero-2-offload", {"offload": "parameters"}, "offload", "only ZeRO-3"),
        ("zero-2-offload", {"storage": "/disk"}, "storage", "writes to a disk"),
        ("pp2", {"pipeline": 8}, "pipeline", "a stage has a layer"),
        ("pp2", {"tensor": 3}, "tensor", "heads"),
        ("pp2", {"offload": "optimizer"}, "offload", "on the device"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(point: str, layout: dict[str, Any], key: str, why: str) -> None:
    job = jobs(**SMOKE)[point]
    assert job.layout
    refuse(job)
    with pytest.raises(InputError, match=why) as caught:
        refuse(job.model_copy(update={"layout": job.layout.model_copy(update=layout)}))
    assert caught.value.place == f"layouts.{point}.{key}"


@pytest.mark.parametrize("zero", [1, 0])
def test_fp16_needs_a_gpu_and_a_stage(zero: int) -> None:
    job = jobs(**SMOKE)["zero-1"]
    assert job.layout
    changes = {"training": job.training.model_copy(update={"precision": "fp16"}), "accelerator": not zero}
    with pytest.raises(InputError, match="no fp16 on a processor" if zero else "hidden step"):
        refuse(job.model_copy(update={**changes, "layout": job.layout.model_copy(update={"zero": zero})}))
