"""Settings of a training that do not fit each other, its model or the hardware; all raise InputError."""

from __future__ import annotations

from collections.abc import Iterator

from twinrun.foundation.errors import InputError
from twinrun.manifests.recipe import LoadedRecipe
from twinrun.protocol.models import AnyShape
from twinrun.protocol.training import COMPOSER, FP8_RECIPE, PLAIN, Training
from twinrun.workloads.training.manifest import TrainingTables
from twinrun.workloads.workload import Hardware, PlanRequest

# The recipe that carries the kernel which `attention = "triton"` runs, and the head sizes of that kernel.
ATTENTION_KERNELS, HEAD_SIZES = "flash-attention", range(8, 257, 8)
FP8_PACKAGE = "torchao"


def refuse_fp8(request: PlanRequest[TrainingTables], training: Training, *, layouts: bool) -> None:
    """Raise InputError where fp8 is asked for and model, trainer, stack or GPU has none."""
    if training.precision != "fp8":
        if training.fp8_recipe != FP8_RECIPE:
            place, hint = "--set fp8_recipe", "--set precision=fp8 multiplies by that recipe"
            raise InputError("nothing is in fp8", place=place, found=training.fp8_recipe, hint=hint)
        return
    for place, found, allowed in _missing_for_fp8(request, training, layouts=layouts):
        raise InputError(
            f"fp8 is computed by torchao's recipe `{training.fp8_recipe}`, which does not run here",
            place=place,
            found=found,
            allowed=allowed,
            hint="--set precision=bf16 runs everywhere; published rows in fp8 stand beside it as references",
        )


def _missing_for_fp8(
    request: PlanRequest[TrainingTables], training: Training, *, layouts: bool
) -> Iterator[tuple[str, str, str]]:
    hardware, stack = request.hardware, request.stack
    if layouts:
        yield "--set precision", "fp8 with layouts", "fp32, bf16, fp16"
    if not request.recipe.tables.models[training.model].fp8:
        yield "--set precision", f"fp8 with {training.model}", "bf16, fp32: recipes replace modules alone"
    if FP8_PACKAGE not in stack.packages:
        others = ", ".join(request.recipe.recipe.stacks.also) or "none"
        allowed = f"{FP8_PACKAGE}; further stacks of the recipe, for --stack: {others}"
        yield f"{stack.folder}/requirements.lock", f"no {FP8_PACKAGE}", allowed
    if hardware.gpu is None and hardware.device_memory_bytes is not None:
        yield "images/gpus.toml", "no row for this GPU", "a row with `fp8 = true`"
    if hardware.gpu is not None and not hardware.gpu.fp8:
        yield f"images/gpus.toml:{hardware.gpu.id}.fp8", "false", "a GPU whose matrix units multiply fp8"


def refuse_precision(training: Training) -> None:
    """Raise InputError for what only the trainer of layouts has."""
    if training.precision == "fp16":
        allowed = "fp32, bf16; DeepSpeed scales the loss, the other trainers do not"
        raise InputError("fp16 needs a scaled loss", place="--set precision", found="fp16", allowed=allowed)
    if training.trainer not in (COMPOSER, PLAIN):
        raise InputError(
            "this scale has no layouts",
            place="--set trainer",
            found=training.trainer,
            allowed=[COMPOSER, PLAIN],
        )


def refuse_foreign(shape: AnyShape, training: Training) -> None:
    """Raise InputError for a setting that the model's family does not have."""
    for name, allowed in shape.fixed.items():
        if (found := getattr(training, name)) != allowed:
            raise InputError(
                f"the family `{shape.family}` has no such setting",
                place=f"--set {name}",
                found=found,
                allowed=allowed or "none",
                hint=f"leave it out, or choose a model of another family than {training.model}'s",
            )


def refuse_attention(
    recipe: LoadedRecipe[TrainingTables], shape: AnyShape, training: Training, hardware: Hardware
) -> None:
    """Raise InputError where our own kernel of attention is asked for and cannot be had."""
    if training.attention != "triton":
        return
    for place, found, allowed in _missing_for_attention(recipe, shape, training, hardware):
        raise InputError(
            "the kernel of attention does not fit",
            place=place,
            found=found,
            allowed=allowed,
            hint="--set attention=sdpa takes a kernel of PyTorch",
        )


def _missing_for_attention(
    recipe: LoadedRecipe[TrainingTables], shape: AnyShape, training: Training, hardware: Hardware
) -> Iterator[tuple[str, str, str]]:
    if not shape.attention_heads():
        yield "--set attention", f"triton, and {training.model} has no attention", "sdpa, which it ignores"
    elif shape.head_size() not in HEAD_SIZES:
        yield "--set attention", f"triton with heads of {shape.head_size()}", "multiples of 8 up to 256"
    if ATTENTION_KERNELS not in recipe.recipe.kernels:
        named = ", ".join(recipe.recipe.kernels) or "none"
        yield f"{recipe.manifest}:kernels", named, f"{ATTENTION_KERNELS}, which has the kernel"
    # Triton's interpreter computes in fp32, whatever goes in and out.
    if hardware.device_memory_bytes is not None and training.precision == "fp32":
        yield "--set precision", "fp32 with attention=triton", "bf16, fp16"
