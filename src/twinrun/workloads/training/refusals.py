"""Settings of a training that do not fit each other, its model, the stack or the hardware."""

from __future__ import annotations

from collections.abc import Iterator

from twinrun.foundation.errors import InputError
from twinrun.protocol.training import COMPOSER, FP8_RECIPE, PLAIN, Training
from twinrun.workloads.training.manifest import TrainingTables
from twinrun.workloads.workload import Hardware, PlanRequest

# The recipe that carries the kernel which `attention = "triton"` runs, and the head sizes of that kernel.
ATTENTION_KERNELS, HEAD_SIZES = "flash-attention", range(8, 257, 8)
FP8_PACKAGE = "torchao"

Refusal = tuple[str, str, object, object, str | None]
"""A message, its place, what is found, what may be there, and a hint."""


def refuse(request: PlanRequest[TrainingTables], training: Training, *, layouts: bool) -> None:
    """Raise InputError for the first setting that does not fit.

    Args:
        layouts: the scale sweeps over layouts, which their own trainer trains.
    """
    for message, place, found, allowed, hint in (
        *(() if layouts else _of_sizes(training)),
        *_of_family(request, training),
        *_of_fp8(request, training, layouts=layouts),
        *_of_attention(request, training),
    ):
        raise InputError(message, place=place, found=found, allowed=allowed, hint=hint)
    if not layouts:
        refuse_composer(training, request.hardware)


def refuse_composer(training: Training, hardware: Hardware, *, table: str = "") -> None:
    """Raise InputError for a precision that Composer does not have on a processor.

    Args:
        table: of the settings that the training's are part of, with a dot.
    """
    if training.trainer == COMPOSER and training.precision != "fp32" and hardware.processor_alone:
        raise InputError(
            "Composer computes in fp32 on a CPU",
            place=f"--set {table}precision",
            found=training.precision,
            allowed="fp32",
            hint=f"--set {table}trainer=plain computes in bf16 and fp8 there too",
        )


def _of_sizes(training: Training) -> Iterator[Refusal]:
    """Yield what only the trainer of layouts has."""
    if training.precision == "fp16":
        allowed = "fp32, bf16; an engine of layouts may scale the loss, these trainers do not"
        yield "fp16 needs a scaled loss", "--set precision", "fp16", allowed, None
    if training.trainer not in (COMPOSER, PLAIN):
        yield "this scale has no layouts", "--set trainer", training.trainer, [COMPOSER, PLAIN], None


def _of_family(request: PlanRequest[TrainingTables], training: Training) -> Iterator[Refusal]:
    shape = request.recipe.tables.models[training.model]
    hint = f"leave it out, or choose a model of another family than {training.model}'s"
    for name, allowed in shape.fixed.items():
        if (found := getattr(training, name)) != allowed:
            message = f"the family `{shape.family}` has no such setting"
            yield message, f"--set {name}", found, allowed or "none", hint


def _of_fp8(request: PlanRequest[TrainingTables], training: Training, *, layouts: bool) -> Iterator[Refusal]:
    """Yield where fp8 is asked for and model, trainer, stack or GPU has none."""
    if training.precision != "fp8":
        if training.fp8_recipe != FP8_RECIPE:
            hint = "--set precision=fp8 multiplies by that recipe"
            yield "nothing is in fp8", "--set fp8_recipe", training.fp8_recipe, None, hint
        return
    message = f"fp8 is computed by torchao's recipe `{training.fp8_recipe}`, which does not run here"
    hint = "--set precision=bf16 runs everywhere; published rows in fp8 stand beside it as references"
    stack, gpu, model = request.stack, request.hardware.gpu, training.model
    if layouts:
        yield message, "--set precision", "fp8 with layouts", "fp32, bf16, fp16", hint
    if not request.recipe.tables.models[model].fp8:
        allowed = "bf16, fp32: recipes replace modules alone"
        yield message, "--set precision", f"fp8 with {model}", allowed, hint
    if FP8_PACKAGE not in stack.packages:
        others = ", ".join(request.recipe.recipe.stacks.also) or "none"
        allowed = f"{FP8_PACKAGE}; further stacks of the recipe, for --stack: {others}"
        yield message, f"{stack.folder}/requirements.lock", f"no {FP8_PACKAGE}", allowed, hint
    if gpu is None and request.hardware.device_memory_bytes is not None:
        yield message, "images/gpus.toml", "no row for this GPU", "a row with `fp8 = true`", hint
    if gpu is not None and not gpu.fp8:
        allowed = "a GPU whose matrix units multiply fp8"
        yield message, f"images/gpus.toml:{gpu.id}.fp8", "false", allowed, hint


def _of_attention(request: PlanRequest[TrainingTables], training: Training) -> Iterator[Refusal]:
    """Yield where our own kernel of attention is asked for and cannot be had."""
    if training.attention != "triton":
        return
    message, hint = "the kernel of attention does not fit", "--set attention=sdpa takes a kernel of PyTorch"
    recipe, shape = request.recipe, request.recipe.tables.models[training.model]
    if not shape.attention_heads():
        found = f"triton, and {training.model} has no attention"
        yield message, "--set attention", found, "sdpa, which it ignores", hint
    elif shape.head_size() not in HEAD_SIZES:
        found = f"triton with heads of {shape.head_size()}"
        yield message, "--set attention", found, "multiples of 8 up to 256", hint
    if ATTENTION_KERNELS not in recipe.recipe.kernels:
        found = ", ".join(recipe.recipe.kernels) or "none"
        yield message, f"{recipe.manifest}:kernels", found, f"{ATTENTION_KERNELS}, which has the kernel", hint
    # Triton's interpreter computes in fp32, whatever goes in and out.
    if request.hardware.device_memory_bytes is not None and training.precision == "fp32":
        yield message, "--set precision", "fp32 with attention=triton", "bf16, fp16", hint
