"""Llama in every layout trains what data parallelism trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the packages of a stack")
pytest.importorskip("streaming", reason="needs the packages of a stack")

from tests.train.small import LAYOUTS, SHAPE, WITH_DEEPSPEED, MakeJob, launch
from twinrun.foundation.manifest import load_json
from twinrun.protocol.layout import Layout
from twinrun.protocol.models import ModelShape, members
from twinrun.protocol.training import TrainingResult

SMOKE = members()["llama-smoke"].model_copy(update={"sequence": SHAPE.sequence})
TIED = SMOKE.model_copy(update={"tied": True})


def losses(make_job: MakeJob, shape: ModelShape, **layout: Any) -> list[float]:
    job = make_job(world_size=2, sharding=layout.get("sharding", "none"), shape=shape)
    job = job.model_copy(update={"layout": Layout(**{"framework": "deepspeed", **layout})})
    done = launch(LAYOUTS, job, modules=WITH_DEEPSPEED)
    assert done.returncode == 0, done.stderr[-4000:]
    result = load_json(Path(job.out) / "result.json", TrainingResult)
    assert result.parameters == shape.parameters()
    return [step.loss for step in result.steps]


@pytest.mark.needs("deepspeed")
@pytest.mark.parametrize(
    ("shape", "layouts"),
    [
        pytest.param(SMOKE, [{"zero": 3}, {"tensor": 2, "zero": 1}, {"pipeline": 2, "zero": 1}], id="untied"),
        pytest.param(TIED, [{"pipeline": 2, "zero": 1}], id="tied"),
    ],
)
def test_a_layout_has_the_losses_of_data_parallelism(
    make_job: MakeJob, shape: ModelShape, layouts: list[dict[str, Any]]
) -> None:
    expected = losses(make_job, shape, framework="torch")
    for layout in layouts:
        assert losses(make_job, shape, **layout) == pytest.approx(expected, rel=2e-6), layout
