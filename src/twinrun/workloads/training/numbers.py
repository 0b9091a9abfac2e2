"""From what the ranks of a training point report to its numbers, what it must have to be whole, and all that
decides whether two points are one experiment."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from twinrun.foundation.text import GIB, TERA
from twinrun.manifests.vendor import Gpu
from twinrun.predict.calibration import SOFTWARE, Subject, calibration
from twinrun.predict.calibration import Run as TimedRun
from twinrun.predict.parallel_layout import Machines
from twinrun.protocol.measurements import Measurement, Numbers, Series, over_time, single
from twinrun.protocol.training import COMPOSER, PLAIN, Step, StepMetrics, TrainingResult
from twinrun.workloads.curve_distance import DATA, ORDER, WEIGHTS
from twinrun.workloads.settings import Factor, Fingerprint, as_fingerprint, flat
from twinrun.workloads.training.manifest import TrainingPlan, TrainingPoint
from twinrun.workloads.training.points import BYTES, parallel_layout
from twinrun.workloads.workload import (
    ComparisonTerms,
    ControlledCurve,
    Finding,
    MeasuredPoint,
    Point,
    Progress,
    held,
)

TrainedPoint = MeasuredPoint[TrainingPoint, TrainingResult]
METRICS = (
    *("step-time", "tokens-per-second", "model-flops", "model-flops-share"),
    *("power", "tokens-per-second-per-watt"),
    *("loss", "peak-memory", "sample-order", "envelope-share"),
)
# Series with the losses of control runs.
CONTROL = "control-"
VALIDATION = "validation-loss"
NATS = "nats/token"
# Parameters, their gradients and two moments of Adam, each of the type that parameters are kept in.
COPIES = 4
# How PyTorch's own trainers say that ranks share the work.
SHARING = {"none": ("single", "ddp", "replicated"), "full": ("fsdp1", "fsdp2")}
# The built-in corpus has these in place of a repository and a tokenizer.
BUILT_IN = {
    "data.repository": "the interpreter's standard library",
    "data.revision": "that of the interpreter",
    "data.tokenizer": "bytes",
}
# Largest difference of two kinds of hardware at the first step: 1, 2 and 4 H200s are by up to 3e-4 in bf16.
ROUNDING = {"fp32": 1e-6, "bf16": 1e-3}
# How a step is computed, not what: rounding aside, these leave the loss as it is.
ROUNDING_ONLY = {
    *("microbatch", "sharding", "attention", "activation_checkpointing", "compile", "warmup_steps"),
    *("reduction", "kernels", "layout", "controls"),
}
FACTORS = (
    Factor("model", "large", "large", "arithmetic for each token, and the size of its matrices"),
    Factor("shape.*", "some", "large", "part of the model"),
    Factor("training.precision", "large", "some", "16 bits are several times faster and round more"),
    Factor("training.global_batch", "some", "large", "work between optimizer steps; another optimisation"),
    Factor("training.activation_checkpointing", "large", "none", "a third more arithmetic"),
    Factor("training.attention", "large", "small", "another kernel; `math` keeps the whole matrix"),
    Factor("training.kernels", "large", "small", "another scan and convolution"),
    Factor("training.parameter_type", "some", "large", "updates below 16 bits are lost"),
    Factor("training.trainer", "large", "small", "another training loop around the same model"),
    Factor("training.compile", "large", "small", "compiled blocks fuse kernels"),
    Factor("training.sharding", "some", "small", "gathers of parameters in every step"),
    Factor("training.seed", "none", "large", "another initialisation and another order of the data"),
    Factor("training.optimizer.*", "none", "large", "another optimisation"),
    Factor("training.data", "none", "large", "other text"),
    Factor("*microbatch", "some", "small", "size of one forward pass"),
    Factor("training.*", "small", "small", "length of the run, or another setting of the training"),
    Factor("attention backend", "some", "small", "another kernel for attention"),
    Factor("layout.*", "large", "small", "another way to share the work"),
    Factor("parallelism", "some", "small", "another exchange of gradients and parameters"),
    Factor("* hash", "none", "large", "other tokens, or other samples in a step"),
    Factor("data.*", "none", "large", "another source of tokens"),
)


def progress(line: bytes) -> Progress:
    """Read the line that a step writes; of a control run only the losses count, which the record has."""
    step = StepMetrics.model_validate_json(line)
    which = f"control run {step.control}  " if step.control else ""
    told = {"step-time": step.seconds} | ({} if step.watts is None else {"power": step.watts})
    status = f"{which}loss {step.loss:.4f}  {step.seconds:.3f} s/step"
    return Progress(done=step.step, status=status, values={} if step.control else told)


def numbers(
    part: TrainingPlan, planned: Point[TrainingPoint], result: TrainingResult, gpu: Gpu | None
) -> Numbers:
    """Return times, memory, losses and rates of a point.

    Steps that another leg has done are in the curve, and not timed here.
    """
    timed = [step for step in result.steps if step.timed and step.step > planned.part.begin]
    curves = {"loss": tuple(step.loss for step in result.steps)}
    curves |= {f"{CONTROL}{number}": curve for number, curve in enumerate(result.controls, start=1)}
    named, reported = part.training.reports, result.reported
    digests = {DATA: result.data_hash, ORDER: result.order_hash, WEIGHTS: result.weights_hash}
    return Numbers(
        measurements=(
            *_of_steps(part.at(planned.part), timed, gpu, devices=planned.world_size),
            single("peak-memory", result.peak_memory_bytes / GIB, "GiB", per="device"),
            *(single(f"{VALIDATION}@{step}", loss, NATS) for step, loss in result.validation),
            *(single(one.metric, one.value, named.get(one.metric, ""), per=one.per) for one in reported),
            *(single("loss", loss, NATS) for loss in curves["loss"][-1:]),
        ),
        series=tuple(
            Series(id=name, metric="loss", unit=NATS, per="run", values=values)
            for name, values in curves.items()
        ),
        digests={name: value for name, value in digests.items() if value},
    )


def _of_steps(
    own: TrainingPlan, timed: Sequence[Step], gpu: Gpu | None, *, devices: int
) -> Iterator[Measurement]:
    """Yield what follows from the timed steps.

    The tokens of a step are those of the global batch; a rate is that number over the step's wall time and
    over the devices, so a slower rank slows every device.
    """
    if not timed:
        return
    seconds = tuple(step.seconds for step in timed)
    time = Measurement(id="step-time", metric="step-time", unit="s", per="run", samples=seconds)
    tokens = own.training.global_batch * own.shape.sequence / devices
    name = "tokens-per-second"
    tokens_rate = over_time(tokens, time, id=name, metric=name, unit="tokens/s", per="device")
    yield from (time, tokens_rate)
    for formula, flops in own.shape.flops_by_formula().items():
        # Of the formula that models are compared by it has the metric's name.
        end = "" if formula == own.shape.formula else f"@{formula.partition('/')[2]}"
        of = {"metric": "model-flops", "unit": "TFLOP/s", "formula": formula}
        done = tokens_rate.times(flops / TERA, id=f"model-flops{end}", **of)
        yield done
        # The dense peak of the table is of 16 bits.
        if gpu is not None and own.training.precision not in ("fp32", "fp8"):
            of = {"metric": "model-flops-share", "unit": "ratio"}
            yield done.times(TERA / gpu.device_peak_flops, id=f"model-flops-share{end}", **of)
    read = [(step.watts, step.seconds) for step in timed if step.watts is not None]
    if read:
        # The mean power of a device; longer steps count more.
        watts = math.fsum(one * took for one, took in read) / math.fsum(took for _, took in read)
        yield single("power", watts, "W", per="device")
        name = "tokens-per-second-per-watt"
        yield tokens_rate.times(1 / watts, id=name, metric=name, unit="tokens/s/W")


def rules(part: TrainingPlan, point: TrainedPoint) -> Iterator[Finding]:
    """Yield where a point is not the planned one; a run that was resumed warms up again."""
    planned, result = point.part, point.result
    own, layout, tried = part.at(planned), planned.layout, len(point.sent.attempts)
    shape, training, begin, end = own.shape, own.training, planned.begin, own.training.steps
    yield from held("the number of parameters", result.parameters, shape.parameters())
    yield from held("steps", [one.step for one in result.steps], [*range(1, end + 1)])
    timed = [one.step for one in result.steps if one.timed and one.step > begin]
    if not timed or min(timed) <= begin + training.warmup_steps:
        allowed = f"from {begin + training.warmup_steps + 1} to {end}"
        yield Finding(what="the first timed step", found=min(timed, default=None), allowed=allowed)
    fitting = planned.microbatches[tried] if tried < len(planned.microbatches) else None
    yield from held("the microbatch", result.microbatch, fitting)
    if layout is None or layout.framework == "torch":
        sharding = planned.sharding
        ways = SHARING[sharding] if point.devices > 1 else (*SHARING["none"], *SHARING[sharding])
        if result.parallelism not in ways:
            yield Finding(what="the parallelism", found=result.parallelism, allowed=ways)
        # What a step of AdamW needs of the parameters alone.
        copies = shape.parameters() * COPIES * BYTES[training.parameter_type]
        least = copies / (point.devices if sharding == "full" else 1)
        if result.peak_memory_bytes < least:
            found = f"{result.peak_memory_bytes / GIB:.3g} GiB"
            allowed = f"{least / GIB:.3g} GiB or more, for parameters, gradients and moments"
            yield Finding(kind="bounds", what="the peak memory", found=found, allowed=allowed)
    yield from held("the number of control runs", len(result.controls), planned.controls)
    yield from held("the steps of each control run", {len(one) for one in result.controls} or {end}, {end})


def fingerprint(part: TrainingPlan) -> Fingerprint:
    """Return the fields that decide whether two runs are the same experiment.

    Those that publications state have their words; every other field of the tables has its own name, so that
    what a table gains counts as well.
    """
    shape, training, (beta1, beta2) = part.shape, part.training, part.training.optimizer.betas
    # Each without what stands below in other words, and who calls the data the published.
    without: dict[str, Any] = {"data": True, "seed": True, "optimizer": {"betas"}}
    named = ("vocabulary", "sequence", "dropout")
    found = as_fingerprint(training.model_dump(mode="json", exclude=without))
    found |= as_fingerprint(shape.model_dump(mode="json", exclude={*named}), "model.")
    found |= as_fingerprint(part.data.model_dump(mode="json", exclude={"source"}), "data.")
    weighting = training.position_weighting
    weighted = f", weighted by position over {weighting:g}" if weighting else ""
    return {
        "parameters": shape.parameters(),
        "tokens_per_step": training.global_batch * shape.sequence,
        "loss_function": "cross-entropy" + weighted,
        **{name: getattr(shape, name) for name in named},
        **found,
        **(BUILT_IN if part.data.kind == "standard-library" else {}),
        "data.order_seed": training.seed,
        "optimizer.name": "adamw",
        "optimizer.beta1": beta1,
        "optimizer.beta2": beta2,
    }


def terms(part: TrainingPlan, point: TrainedPoint) -> ComparisonTerms:
    """Return what a training point is compared by."""
    losses, result, layout = loss_of(part, point), point.result, point.part.layout
    settings = {
        "microbatch": str(result.microbatch),
        "attention backend": result.attention_backend,
        "parallelism": result.parallelism,
        "data hash": result.data_hash,
        ORDER: result.order_hash,
        **asked(part),
        **(flat(layout, "layout.") if layout else {}),
    }
    curves = {"loss": losses} if losses else {}
    return ComparisonTerms(settings=settings, curves=curves, timed=partial(_run, part, point))


def asked(part: TrainingPlan) -> dict[str, str]:
    """Return all settings of a training by name."""
    found = flat(part.shape, "shape.") | flat(part.training, "training.") | flat(part.data, "data.")
    return {"model": found.pop("training.model"), **found}


def _run(part: TrainingPlan, one: TrainedPoint, gpu: Gpu, speed: float | None) -> TimedRun | None:
    """Return a point as a prediction learns from it; None of nodes whose network has no known speed."""
    own, place, time = part.at(one.part), one.planned, one.measurement("step-time")
    training = own.training.model_copy(update={"sharding": one.part.sharding})
    if time is None or training.trainer not in (COMPOSER, PLAIN) or (place.nodes > 1 and not speed):
        return None
    layout = parallel_layout(training, one.part.layout, microbatch=one.result.microbatch)
    machines = Machines(gpu, place.devices_per_node, place.nodes, speed)
    return TimedRun(Subject(own.shape, machines, layout, calibration().of(SOFTWARE)), time.median)


def loss_of(part: TrainingPlan, point: TrainedPoint) -> ControlledCurve | None:
    """Return the losses of a point with all that decides them; None where it has none that can be judged."""
    found, precision = point.one_series("loss"), part.training.precision
    if found is None or not found.values or precision == "fp8" or precision not in ROUNDING:
        return None
    # Settings that decide the loss, rounding aside.
    mathematics = {name: one for name, one in flat(part.training).items() if name not in ROUNDING_ONLY}
    return ControlledCurve(
        name=point.id,
        values=found.values,
        controls=tuple(one.values for one in point.series if one.id.startswith(CONTROL)),
        configuration=mathematics | flat(part.shape, "shape."),
        origins=dict(point.digests),
        arithmetic=precision,
        rounding=ROUNDING[precision],
    )
