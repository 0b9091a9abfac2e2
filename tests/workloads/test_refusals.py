"""Settings of a training that a plan refuses, since they do not fit each other, the model or the hardware."""

from __future__ import annotations

from typing import Any

import pytest

from tests.records import plan
from twinrun.foundation.errors import InputError


@pytest.mark.parametrize(
    ("choices", "place", "allowed"),
    [
        (
            {"gpu": "mi300x", "stack": "rocm6.1-torch2.4"},
            "images/stacks/rocm6.1-torch2.4/requirements.lock",
            "torchao; further stacks of the recipe, for --stack: cuda13.0-torch2.11, rocm7.1-torch2.10",
        ),
        (
            {"gpu": "a100-80gb", "stack": "cuda13.0-torch2.11"},
            "images/gpus.toml:a100-80gb.fp8",
            "a GPU whose",
        ),
        ({"recipe": "deepspeed-pretrain", "gpu": "mi250"}, "--set precision", "fp32, bf16, fp16"),
        ({"recipe": "mamba-throughput", "gpu": None, "scale": "smoke"}, "--set precision", "bf16, fp32"),
    ],
)
def test_fp8_is_refused_where_a_part_of_the_run_has_none(
    choices: dict[str, Any], place: str, allowed: str
) -> None:
    with pytest.raises(InputError, match="fp8 is computed by torchao's recipe `tensorwise`") as refused:
        plan(**{"recipe": "llama-throughput", "settings": ("precision=fp8",)} | choices)
    assert refused.value.place == place
    assert str(refused.value.allowed).startswith(allowed)


@pytest.mark.parametrize(
    ("gpu", "stack"), [("h100-80gb", "cuda13.0-torch2.11"), ("mi300x", "rocm7.1-torch2.10"), (None, "cpu")]
)
def test_fp8_is_planned_where_stack_and_gpu_have_it(gpu: str | None, stack: str) -> None:
    chosen = ("precision=fp8", "trainer=plain")
    made = plan("llama-throughput", gpu=gpu, stack=stack, scale="smoke", settings=chosen)
    assert made.part.training.precision == "fp8"


@pytest.mark.parametrize(
    ("recipe", "table", "precision"),
    [
        ("mpt7b-scaling", "", "bf16"),
        ("llama-throughput", "", "fp8"),
        ("mpt-chinchilla", "training.", "bf16"),
        ("mpt-chinchilla", "training.", "fp8"),
    ],
)
def test_composer_is_refused_in_another_precision_on_a_processor(
    recipe: str, table: str, precision: str
) -> None:
    chosen = (f"{table}precision={precision}", f"{table}trainer=composer")
    with pytest.raises(InputError, match="Composer computes in fp32 on a CPU") as refused:
        plan(recipe, stack="cpu", gpu=None, scale="smoke", settings=chosen)
    assert (refused.value.place, refused.value.found) == (f"--set {table}precision", precision)
    assert (refused.value.allowed, refused.value.hint is not None) == ("fp32", True)
    # A plan for GPUs needs none to be printed.
    assert plan(recipe, stack="cuda13.0-torch2.11", gpu="h100-80gb", scale="paper", settings=chosen).points


def test_a_leg_on_a_processor_is_refused_where_composer_cannot_compute_it() -> None:
    chosen: dict[str, Any] = {"recipe": "mpt1b-convergence", "gpu": "h200", "devices": 1, "scale": "node"}
    with pytest.raises(InputError, match="Composer computes in fp32 on a CPU"):
        plan(**chosen, settings=("precision=bf16", "trainer=composer"))
    assert plan(**chosen, settings=("precision=bf16", "trainer=plain")).points


@pytest.mark.parametrize(
    "setting", ["kernels=ours", "layout=token-major", "position_weighting=9", "parameter_type=bf16"]
)
def test_a_setting_of_another_family_is_refused(setting: str) -> None:
    with pytest.raises(InputError, match="the family `mpt` has no such setting"):
        plan(gpu=None, scale="smoke", settings=(setting,))


@pytest.mark.parametrize(
    ("choices", "says"),
    [
        (
            {"scale": "node", "settings": ("attention=triton", "precision=fp32")},
            "--set precision(.|\n)*bf16, fp16",
        ),
        (
            {
                "recipe": "mpt-throughput",
                "scale": "node",
                "settings": ("attention=triton", "model=mpt-1b-one-head"),
            },
            "--set attention(.|\n)*triton with heads of 2048(.|\n)*multiples of 8 up to 256",
        ),
        (
            {
                "recipe": "deepspeed-pretrain",
                "scale": "node",
                "settings": ("attention=triton", "model=gpt3-125m"),
            },
            "kernels(.|\n)*flash-attention",
        ),
    ],
)
def test_our_attention_is_refused_where_it_does_not_fit(choices: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        plan(gpu="h200", devices=1, **choices)
