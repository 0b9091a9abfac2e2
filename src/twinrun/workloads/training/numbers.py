"""From what the ranks of a training point report to the numbers of its record.

What ZeRO leaves a rank to hold and lets it send is by its paper (arXiv:1910.02054, sections 5 and 7). Both
are for each parameter that the first rank's part of the model has: P that are no experts' over N ranks,
experts over those ranks that have the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from twinrun.foundation.text import GIB, MIB, TERA
from twinrun.manifests.vendor import Gpu
from twinrun.protocol.layout import DEEPSPEED, Layout
from twinrun.protocol.measurements import Measurement, Numbers, Series, over_time, single
from twinrun.protocol.models import ModelShape
from twinrun.protocol.training import Reduction, SharedWork, Step, StepMetrics, Training, TrainingResult
from twinrun.workloads.curve_distance import DATA, ORDER, WEIGHTS
from twinrun.workloads.training.layouts import trained
from twinrun.workloads.training.manifest import TrainingPlan, TrainingPoint
from twinrun.workloads.workload import Point, Progress

# Master weights and the two moments of Adam, always in fp32.
OPTIMIZER_BYTES = 12
# Series with the losses of control runs.
CONTROL = "control-"
VALIDATION = "validation-loss"


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
    training, shape = trained(part.training, point.layout), point.shape or part.shape
    return Numbers(
        measurements=(
            *of_training(training, shape, timed, gpu, devices=planned.world_size),
            single("peak-memory", result.peak_memory_bytes / GIB, "GiB", per="device"),
            *(_shared(result.shared, planned, part.training, result) if result.shared else ()),
            *(single(f"{VALIDATION}@{step}", loss, "nats/token") for step, loss in result.validation),
            *(
                single(one.metric, one.value, training.reports.get(one.metric, "ratio"), per=one.per)
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


def _shared(
    shared: SharedWork, planned: Point[TrainingPoint], training: Training, result: TrainingResult
) -> Iterator[Measurement]:
    """Yield what the first rank of a layout holds and sends, and both over the values of their formulas."""
    layout, count = planned.part.layout, shared.parameters + shared.expert_parameters
    unit, host = "B/parameter", shared.host_state_bytes / count
    state = single("state-memory", shared.state_bytes / count, unit, per="device")
    sent = single("traffic", shared.sent_elements / count, "number/parameter", per="device")
    yield from (state, sent)
    yield state.model_copy(update={"id": "state-on-host", "samples": (host,)})
    yield single("traffic-bytes", shared.sent_bytes / MIB, "MiB", per="device")
    if layout is None:
        return
    microbatches = -(-training.global_batch * layout.replicas // planned.world_size // result.microbatch)
    formulas = (
        (state, "state-of-formula", state_bytes(layout, shared, trained(training, layout).precision)),
        (
            sent,
            "traffic-of-formula",
            traffic(layout, shared, microbatches=microbatches, reduction=training.reduction),
        ),
    )
    for base, metric, value in formulas:
        if value:
            yield base.times(1 / value, id=metric, metric=metric, unit="ratio")


def state_bytes(layout: Layout, shared: SharedWork, precision: str) -> float:
    """Return the bytes of parameters, gradients and optimizer state for each parameter, between two steps.

    With 16-bit parameters 2 + 12 / N and, with parameters and gradients split, 16 / N; fp32 has 4 for
    each 2. Without ZeRO there is no second copy: parameters and moments, and gradients where they are kept;
    FSDP2 splits these and keeps no gradients.
    """
    width = 4 if precision == "fp32" else 2

    def per_parameter(ranks: int) -> float:
        if layout.framework != DEEPSPEED:
            return 12 / ranks if layout.sharding == "full" else 16
        if not layout.zero:
            return 12
        split = (2 * width if layout.zero == 3 else 0) + OPTIMIZER_BYTES
        return (0 if layout.zero == 3 else width) + split / ranks

    return _mean(shared, per_parameter)


def traffic(
    layout: Layout, shared: SharedWork, *, microbatches: int, reduction: Reduction = "microbatch"
) -> float | None:
    """Return the numbers that a rank sends in a step for each parameter; None where activations are sent too.

    An all-reduce is 2 (N - 1) / N of its message, a gather or a reduce-scatter half of that. Without ZeRO
    gradients are all-reduced once a step; ZeRO-1 reduces them to their owners once and gathers the new
    parameters, ZeRO-2 reduces after each microbatch; ZeRO-3 also gathers parameters in each pass, two of a
    microbatch, and none afterwards. So does FSDP2, which with the reduction `step` gathers and reduces once.
    """
    if layout.replicas > 1 or layout.experts is not None or shared.expert_parameters:
        return None
    if layout.sharding == "full":
        messages = 2 if reduction == "step" else 3 * microbatches
    else:
        messages = {0: 2, 1: 2, 2: microbatches + 1, 3: 3 * microbatches}[layout.zero]
    return messages * (shared.data_ranks - 1) / shared.data_ranks


def _mean(shared: SharedWork, per_parameter: Callable[[int], float]) -> float:
    """Return the mean over parameters that are no experts' and those of experts, each over their ranks."""
    own = shared.parameters * per_parameter(shared.data_ranks)
    experts = shared.expert_parameters * per_parameter(shared.expert_ranks)
    return (own + experts) / (shared.parameters + shared.expert_parameters)
