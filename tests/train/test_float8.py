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

# Of losses between ranks that take the largest value of their own sequences as the scale of gradients.
ROUNDED_APART = 5e-3
LLAMA = members()["llama-smoke"].model_copy(update={"sequence": SHAPE.sequence})


def trained(job: TrainingJob) -> TrainingResult:
    done = launch(TRAINING, job)
    assert done.returncode == 0, done.stderr[-4000:]
    return load_json(Path(job.out) / "result.json", TrainingResult)


@pytest.fixture(scope="module")
def fp8(make_job: MakeJob) -> TrainingResult:
    return trained(make_job(shape=LLAMA, precision="fp8", trainer="plain"))


@pytest.mark.needs("torchao")
def test_fp8_trains_what_bf16_trains_and_rounds_more(make_job: MakeJob, fp8: TrainingResult) -> None:
    bf16 = trained(make_job(shape=LLAMA, precision="bf16", trainer="plain"))
    losses, expected = ([step.loss for step in one.steps] for one in (fp8, bf16))
    assert losses != expected
    assert losses == pytest.approx(expected, rel=2e-2)
    assert losses[-1] < losses[0]
    assert fp8.parameters == bf16.parameters == LLAMA.parameters()
    assert fp8.weights_hash == bf16.weights_hash
    assert fp8.fp8_recipe == "torchao tensorwise, emulated: rounded to fp8, multiplied in fp32"
    assert "torchao" in fp8.libraries
    assert bf16.fp8_recipe == ""


@pytest.mark.needs("torchao")
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_fp8_trains_on_shards_what_it_trains_on_one_device(
    make_job: MakeJob, fp8: TrainingResult, compiled: bool
) -> None:
    """Compiled on two ranks it takes more than a minute of two cores."""
    sharded = trained(make_job(shape=LLAMA, precision="fp8", trainer="plain", world_size=2, compile=compiled))
    assert sharded.parallelism == "fsdp2"
    assert (sharded.weights_hash, sharded.order_hash) == (fp8.weights_hash, fp8.order_hash)
    losses, expected = ([step.loss for step in one.steps] for one in (sharded, fp8))
    assert losses == pytest.approx(expected, rel=ROUNDED_APART)
