"""DeepSpeed's configuration of each layout of the recipe."""

from __future__ import annotations

from typing import Any

import pytest
from configuration import configuration

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


def test_a_setting_inside_a_value_is_refused() -> None:
    job = jobs(**SMOKE)["zero-1"]
    assert job.layout
    layout = job.layout.model_copy(update={"settings": {"steps_per_print.every": 1}})
    with pytest.raises(InputError, match="no table") as caught:
        configuration(job.model_copy(update={"layout": layout}))
    assert caught.value.found == "steps_per_print.every: steps_per_print"


def test_how_an_offload_holds_its_memory_is_a_setting_beside_where_it_goes() -> None:
    job = jobs(**SMOKE, settings=("layouts=zero-2-offload-pageable",))["zero-2-offload-pageable"]
    zero = configuration(job)["zero_optimization"]
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": False}


def test_the_published_configuration_is_rendered_as_published() -> None:
    config = configuration(jobs(**PAPER)["tp2-pp2-dp2"])
    assert config["zero_optimization"]["stage"] == 1
    assert config["fp16"]["enabled"]
    assert config["fp16"]["initial_scale_power"] == 11
    assert (config["train_batch_size"], config["train_micro_batch_size_per_gpu"]) == (256, 2)
    assert config["gradient_clipping"] == 1.0
