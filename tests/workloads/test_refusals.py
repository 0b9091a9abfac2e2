"""What a plan refuses: settings that do not fit each other, the recipe, the model or the hardware."""

from __future__ import annotations

from typing import Any

import pytest

from tests.records import BENCH, plan
from twinrun.foundation.errors import InputError

FP8 = "fp8 is computed by torchao's recipe `tensorwise`"
CPU_FP32 = "Composer computes in fp32 on a CPU"
FAMILY = "the family `mpt` has no such setting"
GIVEN = f"model=cerebras/Cerebras-GPT-1.3B@{'0' * 40}"
SMOKE: dict[str, Any] = {"scale": "smoke", "gpu": None, "devices": 0}
ONE: dict[str, Any] = {"scale": "node", "gpu": "h200", "devices": 1}
NODE: dict[str, Any] = {"scale": "node"}
LLAMA: dict[str, Any] = {"scale": "paper"}
OLD = LLAMA | {"gpu": "mi300x", "stack": "rocm6.1-torch2.4"}
A100 = LLAMA | {"gpu": "a100-80gb", "stack": "cuda13.0-torch2.11"}
NO_NUMBERS = ("many", "1.5", "true")
COMPOSER = "training.trainer=composer"
MPT, LAYOUTS, RING, SCORED = "mpt7b-scaling", "deepspeed-pretrain", "ring-allreduce", "mpt-chinchilla"


@pytest.mark.parametrize(
    ("recipe", "choices", "settings", "place", "says"),
    [
        ("llama-throughput", OLD, ["precision=fp8"], "rocm6.1-torch2.4/requirements.lock", FP8),
        ("llama-throughput", A100, ["precision=fp8"], "gpus.toml:a100-80gb.fp8", "whose matrix units"),
        (LAYOUTS, {"gpu": "mi250"}, ["precision=fp8"], "precision", FP8),
        ("mamba-throughput", SMOKE, ["precision=fp8"], "precision", FP8),
        (MPT, SMOKE, ["trainer=composer", "precision=bf16"], "precision", CPU_FP32),
        ("mpt1b-convergence", ONE, ["trainer=composer", "precision=bf16"], "precision", CPU_FP32),
        (SCORED, SMOKE, ["training.precision=bf16", COMPOSER], "training.precision", CPU_FP32),
        (MPT, SMOKE, ["kernels=ours"], "kernels", FAMILY),
        (MPT, SMOKE, ["layout=token-major"], "layout", FAMILY),
        (MPT, SMOKE, ["position_weighting=9"], "position_weighting", FAMILY),
        (MPT, SMOKE, ["parameter_type=bf16"], "parameter_type", FAMILY),
        (MPT, ONE, ["attention=triton", "precision=fp32"], "precision", "bf16, fp16"),
        ("mpt-throughput", ONE, ["attention=triton", "model=mpt-1b-one-head"], "attention", "multiples of 8"),
        (LAYOUTS, ONE, ["attention=triton", "model=gpt3-125m"], "kernels", "flash-attention"),
        (MPT, SMOKE, ["trainer=deepspeed"], "trainer", "no such name"),
        (MPT, SMOKE, ["precision=fp16"], "precision", "a scaled loss"),
        (MPT, SMOKE, ["warmup_steps=99"], "warmup_steps", "no step would be timed"),
        (LAYOUTS, SMOKE, ["global_batch=3"], "ddp.devices", "divisor of the global batch"),
        (LAYOUTS, SMOKE, ["microbatch=3"], "ddp.microbatch", "divisor of 8"),
        (LAYOUTS, SMOKE, ["precision=fp16"], "precision", "no fp16 on a processor"),
        (LAYOUTS, SMOKE, ["layouts=zero-4"], "layouts", "no such name"),
        (LAYOUTS, SMOKE, ["trainer=composer"], "trainer", "another trainer"),
        (LAYOUTS, SMOKE, ["devices=none"], "devices", "count of devices"),
        (LAYOUTS, ONE, ["layouts=fsdp2", "precision=fp16"], "precision", "a scaled loss"),
        (RING, SMOKE, ['options.compressions=["int9"]'], "compressions", "int8"),
        (RING, SMOKE, ["options.in_flight=0"], "in_flight", "1 or more"),
        (RING, SMOKE, ["options.bucket_kib=-1"], "bucket_kib", "0 or more"),
        (SCORED, NODE, [GIVEN, "training.steps=5"], "training.steps", "nothing is trained"),
        (SCORED, NODE, [GIVEN, "every=10"], "every", "nothing is trained"),
        (SCORED, NODE, ["documents=./wsc273.jsonl"], "documents", "no documents"),
        (SCORED, NODE, [f"documents=./wsc273.csv@{'0' * 64}"], "documents", "no documents"),
        (SCORED, NODE, [f"documents=./boolq.jsonl@{'0' * 64}"], "documents", "no task reads"),
        (SCORED, SMOKE, ["model=small"], "model", "small"),
        (SCORED, SMOKE, ["model=runs/step-00000120"], "model", "runs/step"),
        (MPT, SMOKE, ["step=8"], "step", "did you mean `steps`"),
        (MPT, SMOKE, ["optimizer.epsilo=1"], "optimizer.epsilo", "did you mean `optimizer.epsilon`"),
        (MPT, SMOKE, ["model.x=1"], "model.x", "no such field"),
        (MPT, SMOKE, ["model=mpt-1"], "model", "did you mean `mpt-1b`"),
        (MPT, SMOKE, ["data=standard-libary"], "data", "did you mean `standard-library`"),
        (MPT, SMOKE, ["steps=many"], "steps", ""),
        (MPT, SMOKE, ["steps=0"], "steps", ""),
        (MPT, SMOKE, ["optimizer.betas=[1]"], "optimizer.betas.0", ""),
        (MPT, SMOKE, ["devices=0"], "devices", ""),
        (MPT, SMOKE, ["devices="], "devices", ""),
        (BENCH, SMOKE, ["cases=2x1"], "cases", "no such name"),
        (BENCH, SMOKE, ["repeat=7"], "repeat", "did you mean `repeats`"),
        (BENCH, SMOKE, ["repeats=-1"], "repeats", "greater than or equal to 0"),
        (BENCH, SMOKE, ["options.group=1"], "options.group", "did you mean `options.groups`"),
        *((BENCH, SMOKE, [f"options.groups={one}"], "groups", "a whole number") for one in NO_NUMBERS),
        (BENCH, SMOKE, ["model=mpt-1b"], "model", "no such field"),
        (BENCH, SMOKE, ["devices=2"], "devices", "one device"),
    ],
)
def test_a_setting_that_does_not_fit_is_refused(
    recipe: str, choices: dict[str, Any], settings: list[str], place: str, says: str
) -> None:
    with pytest.raises(InputError) as refused:
        plan(recipe, settings=tuple(settings), **choices)
    assert str(refused.value.place).endswith(place)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("gpu", "stack"), [("h100-80gb", "cuda13.0-torch2.11"), ("mi300x", "rocm7.1-torch2.10"), (None, "cpu")]
)
def test_fp8_is_planned_where_stack_and_gpu_have_it(gpu: str | None, stack: str) -> None:
    chosen = ("precision=fp8", "trainer=plain")
    made = plan("llama-throughput", gpu=gpu, stack=stack, scale="smoke", settings=chosen)
    assert made.part.training.precision == "fp8"


def test_what_composer_refuses_on_a_processor_is_planned_for_gpus_and_the_plain_loop() -> None:
    assert plan(MPT, settings=("precision=bf16", "trainer=composer"), gpu="h200", scale="node").points
    assert plan("mpt1b-convergence", settings=("precision=bf16", "trainer=plain"), **ONE).points
