"""From what the ranks of a training point report to the numbers of its record.

What ZeRO leaves a rank to hold and lets it send is by its paper (arXiv:1910.02054, sections 5 and 7). Both
are for each parameter that the first rank's part of the model has: P that are no experts' over N ranks,
experts over those ranks that have the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from twinrun.foundation.errors import RunError
from twinrun.foundation.text import GIB, MIB, TERA
from twinrun.manifests.vendor import Gpu
from twinrun.protocol.layout import DEEPSPEED, Layout
from twinrun.protocol.measurements import Fact, Measurement, Numbers, Series, rate, sampled, scaled
from twinrun.protocol.models import ModelShape
from twinrun.protocol.power import PowerSource
from twinrun.protocol.training import Reduction, SharedWork, StepMetrics, TrainingResult
from twinrun.workloads.training.layouts import trained
from twinrun.workloads.training.manifest import TrainingPlan, TrainingPoint
from twinrun.workloads.workload import Point, PointRecord, Progress

# Master weights and the two moments of Adam, always in fp32.
OPTIMIZER_BYTES = 12
# Series with the losses of control runs.
CONTROL = "control-"
# Facts that the formulas of ZeRO need.
COUNTED = (
    "first rank's parameters",
    "first rank's expert parameters",
    "first rank's data ranks",
    "first rank's expert ranks",
)
WEIGHTS_FACT = "initial weights hash"
SOURCE_FACT = "power source"
VALIDATION = "validation-loss"
SERVER_FACT = "data fetched from"
SAVES_FACT = "training waited for"


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


def measured(part: TrainingPlan, planned: Point[TrainingPoint], result: TrainingResult) -> Numbers:
    """Return step time, memory and losses; raises RunError where the ranks trained another model.

    Steps that another leg has done are in the curve, and not timed here.
    """
    point = planned.part
    shape, begin = point.shape or part.shape, point.leg.begin if point.leg else 0
    expected = shape.parameters()
    if result.parameters != expected:
        raise RunError(
            "the ranks trained another model than was planned",
            place=result.point,
            found=f"{result.parameters:,} parameters",
            allowed=f"{expected:,} by the closed form of `{shape.family}`",
        )
    steps = [step for step in result.steps if step.timed and step.step > begin]
    timed = [step.seconds for step in steps]
    curves = {"loss": tuple(step.loss for step in result.steps)}
    curves |= {f"{CONTROL}{number}": curve for number, curve in enumerate(result.controls, start=1)}
    memory = result.peak_memory_bytes / GIB
    return Numbers(
        measurements=(
            sampled("step-time", timed, metric="step-time", unit="s", per="run"),
            sampled("peak-memory", [memory], metric="peak-memory", unit="GiB", per="device"),
            *(_shared(result.shared) if result.shared else ()),
            *_power(steps),
            *_validated(result.validation),
            *result.reported,
        ),
        series=tuple(
            Series(id=name, metric="loss", unit="nats/token", per="run", values=values)
            for name, values in curves.items()
        ),
        facts={
            "microbatch": result.microbatch,
            "parameters": result.parameters,
            "parallelism": result.parallelism,
            "attention backend": result.attention_backend,
            "device name": result.device_name,
            "warm-up steps": len(result.steps) - begin - len(timed),
            "data hash": result.data_hash,
            **({SERVER_FACT: result.data_server} if result.data_server else {}),
            "order hash": result.order_hash,
            **({"fp8 recipe": result.fp8_recipe} if result.fp8_recipe else {}),
            **_power_facts(result.power, steps),
            **({SAVES_FACT: _saves(result.blocked_seconds)} if result.blocked_seconds else {}),
            **(_facts(result.shared) if result.shared else {}),
            **({WEIGHTS_FACT: result.weights_hash} if result.weights_hash else {}),
            **{f"changes to {framework}": change for framework, change in result.changes.items()},
        },
    )


def _shared(shared: SharedWork) -> Iterator[Measurement]:
    """Yield what the first rank of a layout holds and sends, for each parameter that it has."""
    count = shared.parameters + shared.expert_parameters
    state, host = shared.state_bytes / count, shared.host_state_bytes / count
    unit, sent = "B/parameter", shared.sent_elements / count
    yield sampled("state-memory", [state], metric="state-memory", unit=unit, per="device")
    yield sampled("state-on-host", [host], metric="state-memory", unit=unit, per="device")
    yield sampled("traffic", [sent], metric="traffic", unit="number/parameter", per="device")
    mib = shared.sent_bytes / MIB
    yield sampled("traffic-bytes", [mib], metric="traffic-bytes", unit="MiB", per="device")


def _validated(losses: Sequence[tuple[int, float]]) -> Iterator[Measurement]:
    """Yield each validation loss, called by the step that it was taken after."""
    for step, loss in losses:
        yield sampled(f"{VALIDATION}@{step}", [loss], metric=VALIDATION, unit="nats/token", per="run")


def _saves(seconds: Sequence[float]) -> str:
    return f"{len(seconds)} saves, {max(seconds):.3g} s the longest, {sum(seconds):.3g} s in all"


def _power(steps: Sequence[StepMetrics]) -> Iterator[Measurement]:
    """Yield the mean power of a device over the timed steps that have one, longer steps counting more."""
    read = [(step.watts, step.seconds) for step in steps if step.watts is not None]
    if read:
        mean = sum(watts * seconds for watts, seconds in read) / sum(seconds for _, seconds in read)
        yield sampled("power", [mean], metric="power", unit="W", per="device")


def _power_facts(source: PowerSource, steps: Sequence[StepMetrics]) -> dict[str, Fact]:
    """Return where the power comes from and how often it was sampled, or why there is none."""
    if source.sensor is None:
        return {SOURCE_FACT: f"none: {source.reason}"}
    if all(step.watts is None for step in steps):
        return {SOURCE_FACT: f"none: {source.sensor} did not say anything for every device"}
    return {SOURCE_FACT: source.sensor, "power samples per second": source.samples_per_second}


def _facts(shared: SharedWork) -> dict[str, Fact]:
    """Return what the formulas need, and the messages behind a number."""
    named = ("parameters", "expert_parameters", "data_ranks", "expert_ranks")
    counts: dict[str, Fact] = {
        f"first rank's {name.replace('_', ' ')}": getattr(shared, name) for name in named
    }
    sent = (f"{name} {count:,.0f}" for name, count in sorted(shared.sent_by_operation.items()))
    return {**counts, "numbers sent by operation": ", ".join(sent)}


def count_of(facts: Mapping[str, Fact], *names: str) -> int | None:
    """Return the sum of facts that are counts; None where one is absent or none."""
    found = [facts.get(name) for name in names]
    counts = [one for one in found if isinstance(one, int) and not isinstance(one, bool) and one >= 0]
    return sum(counts) if len(counts) == len(names) else None


def derived(
    part: TrainingPlan, point: PointRecord[TrainingPoint], gpu: Gpu | None
) -> tuple[Measurement, ...]:
    """Return rates, MFU and last loss of a point.

    The tokens of a step are those of the global batch; a rate is that number over the step's wall
    time and over the devices, so a slower rank slows every device.
    """
    found: list[Measurement] = []
    shape = point.part.shape or part.shape
    if step_time := point.measurement("step-time"):
        tokens = part.training.global_batch * shape.sequence / point.devices
        name = "tokens-per-second"
        tokens_rate = rate(step_time, tokens, name=name, metric=name, unit="tokens/s", per="device")
        found += [tokens_rate, *flops_of(tokens_rate, part, point, gpu)]
        if power := point.measurement("power"):
            found.append(_per_watt(tokens_rate, power))
    found += of_formulas(part, point)
    if (losses := point.one_series("loss")) and losses.values:
        found.append(sampled("loss", losses.values[-1:], metric="loss", unit="nats/token", per="run"))
    return tuple(found)


def _per_watt(tokens_rate: Measurement, power: Measurement) -> Measurement:
    name = "tokens-per-second-per-watt"
    return scaled(tokens_rate, 1 / power.median, name=name, metric=name, unit="tokens/s/W", per="device")


def of_formulas(part: TrainingPlan, point: PointRecord[TrainingPoint]) -> Iterator[Measurement]:
    """Yield what the first rank of a layout holds and sends, over the formulas' values."""
    planned = point.part
    if planned.layout is None or point.measurement("state-memory") is None:
        return
    precision = trained(part.training, planned.layout).precision
    # The account says whatever a record lacks.
    if any(count_of(point.facts, name) is None for name in (*COUNTED, "microbatch")):
        return
    microbatch = count_of(point.facts, "microbatch") or 1
    microbatches = -(-part.training.global_batch * planned.layout.replicas // point.devices // microbatch)
    sent = traffic(planned.layout, point.facts, microbatches=microbatches, reduction=part.training.reduction)
    formulas = (
        ("state-memory", "state-of-formula", state_bytes(planned.layout, point.facts, precision)),
        ("traffic", "traffic-of-formula", sent),
    )
    for name, metric, value in formulas:
        base = point.measurement(name)
        if base and value:
            yield scaled(base, 1 / value, name=metric, metric=metric, unit="ratio", per="device")


def flops_of(
    tokens_rate: Measurement, part: TrainingPlan, point: PointRecord[TrainingPoint], gpu: Gpu | None
) -> list[Measurement]:
    """Return model FLOP/s by each formula of the family and, where the dense peak is known, MFU."""
    shape = point.part.shape or part.shape
    precision = trained(part.training, point.part.layout).precision
    found = []
    for formula, flops in shape.flops_by_formula().items():
        done = _by_formula(tokens_rate, flops / TERA, shape, formula, metric="model-flops", unit="TFLOP/s")
        found.append(done)
        # The dense peak of the table is of 16 bits.
        if gpu is not None and precision not in ("fp32", "fp8"):
            share = TERA / gpu.device_peak_flops
            found.append(_by_formula(done, share, shape, formula, metric="model-flops-share", unit="ratio"))
    return found


def _by_formula(
    base: Measurement, factor: float, shape: ModelShape, formula: str, *, metric: str, unit: str
) -> Measurement:
    """Return a multiple of `base`; of the formula that models are compared by it has the metric's name."""
    name = metric if formula == shape.formula else f"{metric}@{formula.partition('/')[2]}"
    return scaled(base, factor, name=name, metric=metric, unit=unit, per="device", formula=formula)


def state_bytes(layout: Layout, facts: Mapping[str, Fact], precision: str) -> float | None:
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

    return _mean(facts, per_parameter)


def traffic(
    layout: Layout, facts: Mapping[str, Fact], *, microbatches: int, reduction: Reduction = "microbatch"
) -> float | None:
    """Return the numbers that a rank sends in a step for each parameter; None where activations are sent too.

    An all-reduce is 2 (N - 1) / N of its message, a gather or a reduce-scatter half of that. Without ZeRO
    gradients are all-reduced once a step; ZeRO-1 reduces them to their owners once and gathers the new
    parameters, ZeRO-2 reduces after each microbatch; ZeRO-3 also gathers parameters in each pass, two of a
    microbatch, and none afterwards. So does FSDP2, which with the reduction `step` gathers and reduces once.
    """
    if layout.replicas > 1 or layout.experts is not None or facts.get("first rank's expert parameters"):
        return None
    if layout.sharding == "full":
        messages = 2 if reduction == "step" else 3 * microbatches
    else:
        messages = {0: 2, 1: 2, 2: microbatches + 1, 3: 3 * microbatches}[layout.zero]
    ranks = int(facts["first rank's data ranks"] or 1)
    return messages * (ranks - 1) / ranks


def _mean(facts: Mapping[str, Fact], per_parameter: Callable[[int], float]) -> float:
    """Return the mean over parameters that are no experts' and those of experts, each over their ranks."""
    total = weighted = 0.0
    for kind, group in (("parameters", "data ranks"), ("expert parameters", "expert ranks")):
        count = int(facts[f"first rank's {kind}"] or 0)
        total += count
        weighted += count * per_parameter(int(facts[f"first rank's {group}"] or 1))
    return weighted / total if total else 0.0
