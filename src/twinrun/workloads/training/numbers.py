"""From what the ranks of a training point report to its numbers, and what it must have to be whole."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from twinrun.foundation.text import GIB, TERA
from twinrun.manifests.vendor import Gpu
from twinrun.protocol.measurements import Measurement, Numbers, Series, over_time, single
from twinrun.protocol.models import ModelShape
from twinrun.protocol.training import Step, StepMetrics, Training, TrainingResult
from twinrun.workloads.curve_distance import DATA, ORDER, WEIGHTS
from twinrun.workloads.training.manifest import TrainingPlan, TrainingPoint, TrainingTables
from twinrun.workloads.training.points import trained
from twinrun.workloads.workload import Finding, MeasuredPoint, Point, Progress, held

# Series with the losses of control runs.
CONTROL = "control-"
VALIDATION = "validation-loss"
# Parameters, their gradients and two moments of Adam, each of the type that parameters are kept in.
COPIES = 4
WIDTHS = {"fp32": 4, "bf16": 2}
# How PyTorch's own trainers say that ranks share the work.
SHARING = {"none": ("single", "ddp", "replicated"), "full": ("fsdp1", "fsdp2")}


def progress(line: bytes) -> Progress:
    """Read the line that a step writes."""
    step = StepMetrics.model_validate_json(line)
    which = f"control run {step.control}  " if step.control else ""
    power = {} if step.watts is None else {"power": step.watts}
    return Progress(
        done=step.step,
        status=f"{which}loss {step.loss:.4f}  {step.seconds:.3f} s/step",
        # Of a control run only the losses count, which the record has.
        values={} if step.control else {"step-time": step.seconds, **power},
    )


def numbers(
    part: TrainingPlan, planned: Point[TrainingPoint], result: TrainingResult, gpu: Gpu | None
) -> Numbers:
    """Return times, memory, losses and rates of a point.

    Steps that another leg has done are in the curve, and not timed here.
    """
    point, begin = planned.part, planned.part.leg.begin if planned.part.leg else 0
    timed = [step for step in result.steps if step.timed and step.step > begin]
    curves = {"loss": tuple(step.loss for step in result.steps)}
    curves |= {f"{CONTROL}{number}": curve for number, curve in enumerate(result.controls, start=1)}
    training, shape, units = (
        trained(part.training, point.layout),
        point.shape or part.shape,
        part.training.reports,
    )
    return Numbers(
        measurements=(
            *of_training(training, shape, timed, gpu, devices=planned.world_size),
            single("peak-memory", result.peak_memory_bytes / GIB, "GiB", per="device"),
            *(single(f"{VALIDATION}@{step}", loss, "nats/token") for step, loss in result.validation),
            *(
                single(one.metric, one.value, units.get(one.metric, "ratio"), per=one.per)
                for one in result.reported
            ),
            *(single("loss", loss, "nats/token") for loss in curves["loss"][-1:]),
        ),
        series=tuple(
            Series(id=name, metric="loss", unit="nats/token", per="run", values=values)
            for name, values in curves.items()
        ),
        digests=digests_of(result),
    )


def digests_of(result: TrainingResult) -> dict[str, str]:
    """Return what two trainings of one experiment have in common."""
    found = {DATA: result.data_hash, ORDER: result.order_hash, WEIGHTS: result.weights_hash}
    return {name: value for name, value in found.items() if value}


def of_training(
    training: Training, shape: ModelShape, timed: Sequence[Step], gpu: Gpu | None, *, devices: int
) -> Iterator[Measurement]:
    """Yield what follows from the timed steps.

    The tokens of a step are those of the global batch; a rate is that number over the step's wall time and
    over the devices, so a slower rank slows every device.
    """
    if not timed:
        return
    seconds = tuple(step.seconds for step in timed)
    time = Measurement(id="step-time", metric="step-time", unit="s", per="run", samples=seconds)
    tokens = training.global_batch * shape.sequence / devices
    name = "tokens-per-second"
    tokens_rate = over_time(tokens, time, id=name, metric=name, unit="tokens/s", per="device")
    yield from (time, tokens_rate)
    for formula, flops in shape.flops_by_formula().items():
        # Of the formula that models are compared by it has the metric's name.
        end = "" if formula == shape.formula else f"@{formula.partition('/')[2]}"
        of = {"metric": "model-flops", "unit": "TFLOP/s", "formula": formula}
        done = tokens_rate.times(flops / TERA, id=f"model-flops{end}", **of)
        yield done
        # The dense peak of the table is of 16 bits.
        if gpu is not None and training.precision not in ("fp32", "fp8"):
            of = {"metric": "model-flops-share", "unit": "ratio"}
            yield done.times(TERA / gpu.device_peak_flops, id=f"model-flops-share{end}", **of)
    read = [(step.watts, step.seconds) for step in timed if step.watts is not None]
    if read:
        # The mean power of a device; longer steps count more.
        watts = math.fsum(one * took for one, took in read) / math.fsum(took for _, took in read)
        yield single("power", watts, "W", per="device")
        name = "tokens-per-second-per-watt"
        yield tokens_rate.times(1 / watts, id=name, metric=name, unit="tokens/s/W")


def rules(
    _tables: TrainingTables, part: TrainingPlan, point: MeasuredPoint[TrainingPoint, TrainingResult]
) -> Iterator[Finding]:
    """Yield where a point is not the planned one."""
    planned, result = point.part, point.result
    layout, leg, shape = planned.layout, planned.leg, planned.shape or part.shape
    training = trained(part.training, layout)
    begin, end = (leg.begin, leg.end) if leg else (0, training.steps)
    yield from whole_training(training, shape, result, begin=begin, end=end)
    tried = len(point.sent.attempts)
    fitting = planned.microbatches[tried] if tried < len(planned.microbatches) else None
    yield from held("the microbatch", result.microbatch, fitting)
    if layout is None or layout.framework == "torch":
        sharding = layout.sharding if layout else planned.sharding
        ways = SHARING[sharding] if point.devices > 1 else (*SHARING["none"], *SHARING[sharding])
        if result.parallelism not in ways:
            yield Finding(what="the parallelism", found=result.parallelism, allowed=ways)
        # What a step of AdamW needs of the parameters alone.
        copies = shape.parameters() * COPIES * WIDTHS[training.parameter_type]
        least = copies / (point.devices if sharding == "full" else 1)
        if result.peak_memory_bytes < least:
            found = f"{result.peak_memory_bytes / GIB:.3g} GiB"
            allowed = f"{least / GIB:.3g} GiB or more, for parameters, gradients and moments"
            yield Finding(kind="bounds", what="the peak memory", found=found, allowed=allowed)
    yield from held("the number of control runs", len(result.controls), planned.controls)
    yield from held("the steps of each control run", {len(one) for one in result.controls} or {end}, {end})


def whole_training(
    training: Training, shape: ModelShape, result: TrainingResult, *, begin: int, end: int
) -> Iterator[Finding]:
    """Yield where steps or parameters are not the planned ones; a run that was resumed warms up again."""
    yield from held("the number of parameters", result.parameters, shape.parameters())
    yield from held("steps", [one.step for one in result.steps], [*range(1, end + 1)])
    timed = [one.step for one in result.steps if one.timed and one.step > begin]
    if not timed or min(timed) <= begin + training.warmup_steps:
        allowed = f"from {begin + training.warmup_steps + 1} to {end}"
        yield Finding(what="the first timed step", found=min(timed, default=None), allowed=allowed)
