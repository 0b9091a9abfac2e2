"""Training in fp8: torchao's own recipe, whose products a processor emulates."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the packages of a stack")
pytest.importorskip("streaming", reason="needs the packages of a stack")

from tests.train.small import SHAPE, TRAINING, MakeJob, launch
from twinrun.foundation.manifest import load_json
from twinrun.protocol.models import members
from twinrun.protocol.training import TrainingJob, TrainingResult

LLAMA = members()["llama-smoke"].model_copy(update={"sequence": SHAPE.sequence})


def trained(job: TrainingJob) -> TrainingResult:
    done = launch(TRAINING, job, modules=("twinrun.train.loop", "twinrun.train.data_parallel"))
    assert done.returncode == 0, done.stderr[-4000:]
    return load_json(Path(job.out) / "result.json", TrainingResult)


@pytest.mark.needs("torchao")
def test_fp8_trains_what_bf16_trains_and_rounds_more(make_job: MakeJob) -> None:
    fp8, bf16 = (
        trained(make_job(shape=LLAMA, precision=precision, trainer="plain")) for precision in ("fp8", "bf16")
    )
    losses, expected = ([step.loss for step in one.steps] for one in (fp8, bf16))
    assert losses != expected
    assert losses == pytest.approx(expected, rel=2e-2)
    assert losses[-1] < losses[0]
    assert fp8.parameters == bf16.parameters == LLAMA.parameters()
    assert fp8.weights_hash == bf16.weights_hash
    assert fp8.fp8_recipe == "torchao tensorwise, emulated: rounded to fp8, multiplied in fp32"
    assert "torchao" in fp8.libraries
    assert bf16.fp8_recipe == ""
