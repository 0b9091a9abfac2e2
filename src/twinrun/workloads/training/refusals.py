"""Settings of a training that do not fit each other, its model, its layout, the stack or the hardware."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from twinrun.foundation.errors import InputError, require_known
from twinrun.protocol.layout import Layout
from twinrun.protocol.models import AnyShape
from twinrun.protocol.training import COMPOSER, FP8_RECIPE, PLAIN, Training
from twinrun.workloads.workload import Demand, Hardware, PlanRequest

# The recipe that carries the kernel which `attention = "triton"` runs, and the head sizes of that kernel.
ATTENTION_KERNELS, HEAD_SIZES = "flash-attention", range(8, 257, 8)
FP8_PACKAGE = "torchao"

# So many names of measurements are told where another is asked for.
MAX_NAMES = 8

Refusal = tuple[str, str, object, object, str | None]
"""A message, its place, what is found, what may be there, and a hint."""


def raise_first(*groups: Iterable[Refusal]) -> None:
    """Raise InputError for the first thing that does not fit."""
    for group in groups:
        for message, place, found, allowed, hint in group:
            raise InputError(message, place=place, found=found, allowed=allowed, hint=hint)


Names = tuple[str, Iterable[str], Iterable[str]]
"""A key, the names that stand there, and those that there are."""


def demand_known(place: str, *named: Names) -> None:
    """Raise InputError for the first name that there is not; its place begins with `place`."""
    for key, names, known in named:
        for name in names:
            require_known(name, sorted(known), "no such name", place=f"{place}{key}")


def missing_from(given: Mapping[str, Sequence[str]], who: str) -> Callable[[Demand], str | None]:
    """Return what says why a number is not among the measurements `given` of each metric, or None."""

    def missing(asked: Demand) -> str | None:
        if asked.metric not in given:
            return f"{who} measures {', '.join(given)}"
        names, name = given[asked.metric], asked.measurement or asked.metric
        called = f"a measurement of {asked.metric} is called {', '.join(names[-MAX_NAMES:])}"
        return None if name in names else called

    return missing


def of_training(
    request: PlanRequest, training: Training, *, layouts: bool = False, table: str = ""
) -> Iterator[Refusal]:
    """Yield what does not fit a training, whatever its points are.

    Args:
        layouts: the scale sweeps over layouts, which their own trainer trains.
        table: of the settings that the training's are part of, with a dot.
    """
    key = f"--set {table}"
    trainers = (request.recipe.tables.engines or (PLAIN,)) if layouts else (COMPOSER, PLAIN)
    if training.precision == "fp16" and not layouts:
        allowed = "fp32, bf16; an engine of layouts may scale the loss, these trainers do not"
        yield "fp16 needs a scaled loss", f"{key}precision", "fp16", allowed, None
    if training.trainer not in trainers:
        yield "this scale has another trainer", f"{key}trainer", training.trainer, trainers, None
    yield from _of_family(request, training, key)
    yield from _of_fp8(request, training, key, layouts=layouts)
    yield from _of_attention(request, training, key)
    if not layouts:
        yield from of_composer(training, request.hardware, table=table)


def of_composer(training: Training, hardware: Hardware, *, table: str = "") -> Iterator[Refusal]:
    """Yield a precision that Composer does not have on a processor."""
    alone = hardware.gpu is None and hardware.device_memory_bytes is None and not hardware.devices
    if training.trainer == COMPOSER and training.precision != "fp32" and alone:
        hint = f"--set {table}trainer=plain computes in bf16 and fp8 there too"
        message, place = "Composer computes in fp32 on a CPU", f"--set {table}precision"
        yield message, place, training.precision, "fp32", hint


def of_sizes(training: Training, worlds: Iterable[int], *, table: str = "") -> Iterator[Refusal]:
    """Yield numbers of devices over which the global batch does not divide."""
    message, batch = "the global batch does not divide over the devices", training.global_batch
    for world in (one for one in worlds if batch % one):
        yield message, f"--set {table}global_batch", batch, f"a multiple of {world}", None


def _of_family(request: PlanRequest, training: Training, key: str) -> Iterator[Refusal]:
    shape = request.recipe.tables.models[training.model]
    message = f"the family `{shape.family}` has no such setting"
    hint = f"leave it out, or choose a model of another family than {training.model}'s"
    for name, allowed in shape.fixed.items():
        if (found := getattr(training, name)) != allowed:
            yield message, f"{key}{name}", found, allowed or "none", hint


def _of_fp8(request: PlanRequest, training: Training, key: str, *, layouts: bool) -> Iterator[Refusal]:
    """Yield where fp8 is asked for and model, trainer, stack or GPU has none."""
    if training.precision != "fp8":
        if training.fp8_recipe != FP8_RECIPE:
            hint = "--set precision=fp8 multiplies by that recipe"
            yield "nothing is in fp8", f"{key}fp8_recipe", training.fp8_recipe, None, hint
        return
    stack, gpu, precision = request.stack, request.hardware.gpu, f"{key}precision"
    message = f"fp8 is computed by torchao's recipe `{training.fp8_recipe}`, which does not run here"
    hint = "--set precision=bf16 runs everywhere; published rows in fp8 stand beside it as references"
    if layouts:
        yield message, precision, "fp8 with layouts", "fp32, bf16, fp16", hint
    if not request.recipe.tables.models[training.model].fp8:
        yield message, precision, f"fp8 with {training.model}", "bf16, fp32: modules alone have fp8", hint
    if FP8_PACKAGE not in stack.packages:
        others = ", ".join(request.recipe.recipe.stacks.also) or "none"
        allowed = f"{FP8_PACKAGE}; further stacks of the recipe, for --stack: {others}"
        yield message, f"{stack.folder}/requirements.lock", f"no {FP8_PACKAGE}", allowed, hint
    if gpu is None and request.hardware.device_memory_bytes is not None:
        yield message, "images/gpus.toml", "no row for this GPU", "a row with `fp8 = true`", hint
    if gpu and not gpu.fp8:
        allowed = "a GPU whose matrix units multiply fp8"
        yield message, f"images/gpus.toml:{gpu.id}.fp8", "false", allowed, hint


def _of_attention(request: PlanRequest, training: Training, key: str) -> Iterator[Refusal]:
    """Yield where our own kernel of attention is asked for and cannot be had."""
    if training.attention != "triton":
        return
    message, hint = "the kernel of attention does not fit", "--set attention=sdpa takes a kernel of PyTorch"
    recipe, shape = request.recipe, request.recipe.tables.models[training.model]
    if not shape.attention_heads():
        yield message, f"{key}attention", f"triton, and {training.model} has none", "sdpa, ignored", hint
    elif shape.head_size() not in HEAD_SIZES:
        found, allowed = f"triton with heads of {shape.head_size()}", "multiples of 8 up to 256"
        yield message, f"{key}attention", found, allowed, hint
    if ATTENTION_KERNELS not in recipe.recipe.kernels:
        found = ", ".join(recipe.recipe.kernels) or "none"
        yield message, f"{recipe.manifest}:kernels", found, f"{ATTENTION_KERNELS}, which has the kernel", hint
    # Triton's interpreter computes in fp32, whatever goes in and out.
    if request.hardware.device_memory_bytes is not None and training.precision == "fp32":
        yield message, f"{key}precision", "fp32 with attention=triton", "bf16, fp16", hint


def of_layout(
    layout: Layout, shape: AnyShape, training: Training, *, gpu: bool, place: str
) -> Iterator[Refusal]:
    """Yield what does not fit a layout, whatever its number of ranks; `gpu`: it is not for a processor."""
    own, plain = layout.framework == "torch", Layout()
    for key in ("zero", "offload", "storage", "pipeline", "tensor", "experts", "settings"):
        if own and (found := getattr(layout, key)) != getattr(plain, key):
            message = "PyTorch's own data parallelism has no such setting"
            yield message, f"{place}.{key}", found, "nothing", None
    if training.compile and getattr(shape, "experts", None):
        message, allowed = "experts get other numbers of tokens in each step", "no experts with compile"
        yield message, f"{place}.variant", layout.variant, allowed, None
    if training.validation and not own:
        message, allowed = "a framework's own engine has no validation here", "torch with training.validation"
        yield message, f"{place}.framework", layout.framework, allowed, None
    if training.precision == "fp16" and not gpu:
        yield "no fp16 on a processor", f"{place}.precision", "fp16", "fp32, bf16", None
    if training.precision == "fp16" and own and layout.sharding == "full":
        message = "gradients of fp16 need a scaled loss, which FSDP2 has not here"
        yield message, f"{place}.precision", "fp16", "fp32, bf16", None


def of_ranks(layout: Layout, training: Training, world: int, *, place: str) -> Iterator[Refusal]:
    """Yield where so many ranks, or the global batch over them, do not fit a layout."""
    least, batch = layout.least_devices(), training.global_batch
    if world % least:
        message, allowed = "a replica of the model has all its ranks", f"a multiple of {least}"
        yield message, f"{place}.devices", world, allowed, None
        return
    share, rest = divmod(batch, world // layout.replicas)
    if rest:
        message, allowed = "every replica trains as much", f"a divisor of the global batch, {batch}"
        yield message, f"{place}.devices", world, allowed, None
    elif training.microbatch != "auto" and share % training.microbatch:
        message, allowed = "microbatches are equal", f"a divisor of {share}, the sequences of a replica"
        yield message, f"{place}.microbatch", training.microbatch, allowed, None
