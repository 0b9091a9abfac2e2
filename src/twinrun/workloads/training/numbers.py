"""From what the ranks of a training point report to the numbers of its record."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from twinrun.foundation.errors import RunError
from twinrun.manifests.vendor import Gpu
from twinrun.protocol.measurements import Fact, Measurement, Numbers, Series, rate, sampled, scaled
from twinrun.protocol.training import SharedWork, TrainingResult
from twinrun.workloads.parity import WEIGHTS
from twinrun.workloads.series import ORDER
from twinrun.workloads.settings import flat
from twinrun.workloads.training.factors import ROUNDING_ONLY
from twinrun.workloads.training.formulas import state_bytes, traffic
from twinrun.workloads.training.layouts import trained
from twinrun.workloads.training.manifest import LegSteps, TrainingPlan, TrainingPoint
from twinrun.workloads.workload import ControlledCurve, PointRecord

TERA = 1e12
GIB, MIB = 1 << 30, 1 << 20
# What the ranks measure; the rest follows from it.
MEASURED = ("step-time", "peak-memory", "state-memory", "state-on-host", "traffic", "traffic-bytes")
# Series with the losses of control runs.
CONTROL = "control-"
WEIGHTS_FACT = "initial weights hash"
# What two kinds of hardware may be apart at the first step: 1, 2 and 4 H200s are by up to 3e-4 in bf16.
ROUNDING = {"fp32": 1e-6, "bf16": 1e-3}


def measured(part: TrainingPlan, point: TrainingPoint, result: TrainingResult) -> Numbers:
    """Return step time, memory and losses; raises RunError where the ranks trained another model.

    Steps that another leg has done are in the curve, and not timed here.
    """
    shape, begin = point.shape or part.shape, point.leg.begin if point.leg else 0
    expected = shape.parameters()
    if result.parameters != expected:
        raise RunError(
            "the ranks trained another model than was planned",
            place=result.point,
            found=f"{result.parameters:,} parameters",
            allowed=f"{expected:,} by the closed form of `{shape.family}`",
        )
    timed = [step.seconds for step in result.steps if step.timed and step.step > begin]
    curves = {"loss": tuple(step.loss for step in result.steps)}
    curves |= {f"{CONTROL}{number}": curve for number, curve in enumerate(result.controls, start=1)}
    memory = result.peak_memory_bytes / GIB
    return Numbers(
        measurements=(
            sampled("step-time", timed, metric="step-time", unit="s", per="run"),
            sampled("peak-memory", [memory], metric="peak-memory", unit="GiB", per="device"),
            *(_shared(result.shared) if result.shared else ()),
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
            "order hash": result.order_hash,
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


def _facts(shared: SharedWork) -> dict[str, Fact]:
    """Return what the formulas need, and the messages behind a number."""
    named = ("parameters", "expert_parameters", "data_ranks", "expert_ranks")
    counts: dict[str, Fact] = {
        f"first rank's {name.replace('_', ' ')}": getattr(shared, name) for name in named
    }
    sent = (f"{name} {count:,.0f}" for name, count in sorted(shared.sent_by_operation.items()))
    return {**counts, "numbers sent by operation": ", ".join(sent)}


def whole(points: Sequence[PointRecord]) -> tuple[PointRecord, ...]:
    """Return the points whose curve reaches to the end of the run, undisturbed ones first."""
    legs = {point.id: leg_of(point) for point in points}
    undisturbed = [point for point in points if legs[point.id] is None]
    return (*undisturbed, *(point for point in points if (leg := legs[point.id]) and leg.last))


def traced(part: TrainingPlan, point: PointRecord, metric: str) -> ControlledCurve | None:
    """Return the curve of a point with all that decides it; None where it has none."""
    found = point.one_series(metric)
    if found is None or not found.values:
        return None
    return ControlledCurve(
        name=point.id,
        values=found.values,
        controls=tuple(one.values for one in point.series if one.id.startswith(CONTROL)),
        configuration=mathematics(part),
        origins=origins(point),
        rounding=ROUNDING[part.training.precision],
    )


def mathematics(part: TrainingPlan) -> dict[str, str]:
    """Return the settings that decide the loss, rounding aside."""
    training = {name: value for name, value in flat(part.training).items() if name not in ROUNDING_ONLY}
    return training | {f"shape.{name}": value for name, value in flat(part.shape).items()}


def origins(point: PointRecord) -> dict[str, str]:
    """Return the digests of what the curve of a point follows from, as far as they were recorded."""
    facts = {WEIGHTS: WEIGHTS_FACT, "data": "data hash", ORDER: ORDER}
    return {name: str(point.facts[fact]) for name, fact in facts.items() if fact in point.facts}


def leg_of(point: PointRecord) -> LegSteps | None:
    """Return the leg that a recorded point is."""
    assert isinstance(point.part, TrainingPoint)
    return point.part.leg


def derived(part: TrainingPlan, point: PointRecord, gpu: Gpu | None) -> tuple[Measurement, ...]:
    """Return rates, MFU and last loss of a point.

    The tokens of a step are those of the global batch; a rate is that number over the step's wall
    time and over the devices, so a slower rank slows every device.
    """
    found: list[Measurement] = []
    shape = _point_of(point).shape or part.shape
    if step_time := point.measurement("step-time"):
        tokens = part.training.global_batch * shape.sequence / point.devices
        name = "tokens-per-second"
        tokens_rate = rate(step_time, tokens, name=name, metric=name, unit="tokens/s", per="device")
        found += [tokens_rate, *flops_of(tokens_rate, part, point, gpu)]
    found += of_formulas(part, point)
    if (losses := point.one_series("loss")) and losses.values:
        found.append(sampled("loss", losses.values[-1:], metric="loss", unit="nats/token", per="run"))
    return tuple(found)


def of_formulas(part: TrainingPlan, point: PointRecord) -> Iterator[Measurement]:
    """Yield what the first rank of a layout holds and sends, over the formulas' values."""
    planned = _point_of(point)
    if planned.layout is None or point.measurement("state-memory") is None:
        return
    precision = trained(part.training, planned.layout).precision
    microbatches = -(
        -part.training.global_batch
        * planned.layout.replicas
        // point.devices
        // int(point.facts["microbatch"] or 1)
    )
    sent = traffic(planned.layout, point.facts, microbatches=microbatches, reduction=part.training.reduction)
    formulas = (
        ("state-memory", "state-of-formula", state_bytes(planned.layout, point.facts, precision)),
        ("traffic", "traffic-of-formula", sent),
    )
    for name, metric, value in formulas:
        base = point.measurement(name)
        if base and value:
            yield scaled(base, 1 / value, name=metric, metric=metric, unit="ratio", per="device")


def _point_of(point: PointRecord) -> TrainingPoint:
    assert isinstance(point.part, TrainingPoint)
    return point.part


def flops_of(
    tokens_rate: Measurement, part: TrainingPlan, point: PointRecord, gpu: Gpu | None
) -> list[Measurement]:
    """Return model FLOP/s and, where the dense peak is known for the precision, MFU."""
    shape = _point_of(point).shape or part.shape
    precision = trained(part.training, _point_of(point).layout).precision
    formula = shape.formula
    flops = scaled(
        tokens_rate,
        shape.flops_per_token() / TERA,
        name="model-flops",
        metric="model-flops",
        unit="TFLOP/s",
        per="device",
        formula=formula,
    )
    if gpu is None or precision == "fp32":
        return [flops]
    share = scaled(
        flops,
        TERA / gpu.device_peak_flops,
        name="model-flops-share",
        metric="model-flops-share",
        unit="ratio",
        per="device",
        formula=formula,
    )
    return [flops, share]
