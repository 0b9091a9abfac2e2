"""What a training point must have: every step once, and the model and layout that were planned."""

from __future__ import annotations

from collections.abc import Iterator

from twinrun.foundation.text import GIB
from twinrun.protocol.layout import Layout
from twinrun.protocol.models import ModelShape
from twinrun.protocol.training import Training, TrainingResult
from twinrun.workloads.training.layouts import trained
from twinrun.workloads.training.manifest import TrainingPlan, TrainingPoint, TrainingTables
from twinrun.workloads.workload import Finding, MeasuredPoint, held

# Parameters, their gradients and two moments of Adam, each of the type that parameters are kept in.
COPIES = 4
WIDTHS = {"fp32": 4, "bf16": 2}
# How PyTorch's own trainers say that ranks share the work.
SHARING = {"none": ("single", "ddp", "replicated"), "full": ("fsdp1", "fsdp2")}


def rules(
    _tables: TrainingTables, part: TrainingPlan, point: MeasuredPoint[TrainingPoint, TrainingResult]
) -> Iterator[Finding]:
    """Yield where a point is not the planned one."""
    planned, result = point.part, point.result
    training, leg = trained(part.training, planned.layout), planned.leg
    begin, end = (leg.begin, leg.end) if leg else (0, training.steps)
    yield from of_training(training, planned.shape or part.shape, result, begin=begin, end=end)
    tried = len(point.attempts)
    fitting = planned.microbatches[tried] if tried < len(planned.microbatches) else None
    yield from held("the microbatch", result.microbatch, fitting)
    layout, sharding = planned.layout, planned.sharding or part.training.sharding
    if layout is None or layout.framework == "torch":
        sharding = layout.sharding if layout else sharding
        ways = SHARING[sharding] if point.devices > 1 else (*SHARING["none"], *SHARING[sharding])
        if result.parallelism not in ways:
            yield Finding(what="the parallelism", found=result.parallelism, allowed=ways)
        yield from _memory(training, planned.shape or part.shape, point, layout, sharded=sharding == "full")
    yield from held("the number of control runs", len(result.controls), planned.controls)
    yield from held("the steps of each control run", {len(one) for one in result.controls} or {end}, {end})


def of_training(
    training: Training, shape: ModelShape, result: TrainingResult, *, begin: int, end: int
) -> Iterator[Finding]:
    """Yield where steps or parameters are not the planned ones; a run that was resumed warms up again."""
    yield from held("the number of parameters", result.parameters, shape.parameters())
    yield from held("steps", [one.step for one in result.steps], [*range(1, end + 1)])
    timed = [one.step for one in result.steps if one.timed and one.step > begin]
    if not timed or min(timed) <= begin + training.warmup_steps:
        allowed = f"from {begin + training.warmup_steps + 1} to {end}"
        yield Finding(what="the first timed step", found=min(timed, default=None), allowed=allowed)


def _memory(
    training: Training, shape: ModelShape, point: MeasuredPoint, layout: Layout | None, *, sharded: bool
) -> Iterator[Finding]:
    """Yield memory that does not hold what a step of AdamW needs of the parameters alone."""
    copies = shape.parameters() * COPIES * WIDTHS[training.parameter_type]
    least = copies / (point.devices if sharded else layout.replicas if layout else 1)
    if point.result.peak_memory_bytes < least:
        found = f"{point.result.peak_memory_bytes / GIB:.3g} GiB"
        allowed = f"{least / GIB:.3g} GiB or more, for parameters, gradients and moments"
        yield Finding(kind="bounds", what="the peak memory", found=found, allowed=allowed)
