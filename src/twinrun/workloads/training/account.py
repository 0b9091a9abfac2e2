"""What a training point must have: every step once, and what follows from its layout."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from twinrun.foundation.text import GIB, MIB
from twinrun.protocol.layout import Layout
from twinrun.workloads.account import (
    HASH,
    TEXT,
    Allowed,
    facts_held,
    held,
    measurements_held,
    series_held,
    shown,
)
from twinrun.workloads.sweep import KEYS
from twinrun.workloads.training.layouts import trained
from twinrun.workloads.training.manifest import TrainingPlan, TrainingPoint, TrainingTables
from twinrun.workloads.training.numbers import (
    CONTROL,
    SAVES_FACT,
    SERVER_FACT,
    SOURCE_FACT,
    VALIDATION,
    WEIGHTS_FACT,
    count_of,
)
from twinrun.workloads.workload import Account, Gap, Point, PointRecord

SHARED = ("state-memory", "state-on-host", "traffic", "traffic-bytes")
# Bytes of a number that is sent: 16 bits, or 32.
NUMBER_BYTES = (2, 4)
ROUNDED = 1e-6
# Facts that only some runs have, and why there is no power.
OPTIONAL: dict[str, Allowed] = {
    SOURCE_FACT: re.compile("none: .+"),
    SERVER_FACT: re.compile("https?://.+"),
    SAVES_FACT: re.compile("[0-9]+ saves, .+ s in all"),
    **{f"changes to {name}": TEXT for name in ("composer", "deepspeed", "streaming", "torch")},
}
MEASURED = {
    "step-time": re.compile("step-time"),
    "peak-memory": re.compile("peak-memory"),
    "power": re.compile("power"),
    "state-memory": re.compile("state-memory|state-on-host"),
    "traffic": re.compile("traffic"),
    "traffic-bytes": re.compile("traffic-bytes"),
    VALIDATION: re.compile(f"{VALIDATION}@[0-9]+"),
}


def as_planned(
    part: TrainingPlan, planned: Point[TrainingPoint], point: PointRecord[TrainingPoint]
) -> Iterator[Gap]:
    """Yield where a point is not the planned one."""
    training, leg = trained(part.training, planned.part.layout), planned.part.leg
    begin, end = (leg.begin, leg.end) if leg else (0, training.steps)
    curves = {"loss": end, **{f"{CONTROL}{n}": end for n in range(1, planned.part.controls + 1)}}
    yield from series_held(point, curves)
    timed = {"step-time": end - begin - training.warmup_steps, "peak-memory": 1}
    shared = dict.fromkeys(SHARED, 1) if planned.part.layout else {}
    given = dict.fromkeys(training.reports, 1)
    if validation := training.validation:
        due = (step for step in range(begin + 1, end + 1) if validation.due(step, steps=training.steps))
        given |= {f"{VALIDATION}@{step}": 1 for step in due}
    power = {"power": 1} if str(point.facts.get(SOURCE_FACT, "none")).partition(":")[0] != "none" else {}
    planned_ones = {**timed, **shared, **power, **given}
    yield from measurements_held(point, planned_ones)
    for one in point.measurements:
        if ACCOUNT.measures(one.id, one.metric) and one.id not in planned_ones:
            yield Gap(path=f"measurements.{one.id}", found="there", allowed="absent, as plan and facts say")
    yield from facts_held(point, _required(part, planned, point), optional=OPTIONAL)
    yield from _attempts(planned, point)
    yield from _sent(point)


def _required(
    part: TrainingPlan, planned: Point[TrainingPoint], point: PointRecord[TrainingPoint]
) -> dict[str, Allowed]:
    training, layout = trained(part.training, planned.part.layout), planned.part.layout
    shape = planned.part.shape or part.shape
    found: dict[str, Allowed] = {
        "microbatch": planned.part.microbatches,
        "parameters": (shape.parameters(),),
        "parallelism": parallelism(part, planned),
        "attention backend": TEXT,
        "device name": TEXT,
        "warm-up steps": (training.warmup_steps,),
        "data hash": HASH,
        "order hash": HASH,
        WEIGHTS_FACT: HASH,
    }
    if training.precision == "fp8":
        found["fp8 recipe"] = TEXT
    if point.measurement("power"):
        found |= {SOURCE_FACT: re.compile("(?!none).+"), "power samples per second": float}
    if layout is None:
        return found
    ranks = planned.world_size // layout.replicas
    whole = layout.replicas == 1 and layout.experts is None
    return found | {
        "first rank's parameters": (shape.parameters(),) if whole else int,
        "first rank's expert parameters": int if layout.experts else (0,),
        "first rank's data ranks": (ranks,),
        "first rank's expert ranks": (ranks // layout.experts,)
        if layout.experts
        else tuple(range(1, planned.world_size + 1)),
        "numbers sent by operation": re.compile(r"(\w+ [0-9,]+(, \w+ [0-9,]+)*)?"),
    }


def parallelism(part: TrainingPlan, planned: Point[TrainingPoint]) -> tuple[str, ...]:
    """Return how the ranks of a point can share its work, as they call it."""
    layout = planned.part.layout
    if layout is not None:
        return (_of_layout(layout),)
    if part.training.summation == "canonical":
        return ("replicated", "single") if planned.world_size == 1 else ("replicated",)
    sharding = planned.part.sharding
    if sharding is None:
        # Records from before the plan said it: one device of a sweep may shard nothing.
        return ("single", "ddp", "fsdp1", "fsdp2")
    if sharding == "full":
        return ("fsdp2", "fsdp1")
    return ("single",) if planned.world_size == 1 else ("ddp",)


def _of_layout(layout: Layout) -> str:
    if layout.framework != "deepspeed":
        return "fsdp2" if layout.sharding == "full" else "ddp"
    return ", ".join(layout.features) or "ZeRO-0"


def _attempts(planned: Point[TrainingPoint], point: PointRecord[TrainingPoint]) -> Iterator[Gap]:
    """Hold what was tried against the microbatch that ran."""
    sizes = planned.part.microbatches
    if point.facts.get("microbatch") in sizes:
        before = len(sizes[: sizes.index(int(str(point.facts["microbatch"])))])
        yield from held("attempts", len(point.attempts), before, "each size that did not fit is an attempt")


def _sent(point: PointRecord[TrainingPoint]) -> Iterator[Gap]:
    """Hold what a layout holds and sends against its counts by operation, and against the memory in use."""
    traffic, sent = point.measurement("traffic"), point.measurement("traffic-bytes")
    state, host = point.measurement("state-memory"), point.measurement("state-on-host")
    memory, count = point.measurement("peak-memory"), parameters_of(point)
    if not (traffic and sent and state and host and memory and count):
        return
    numbers = traffic.median * count
    written = re.findall(r"_? ([0-9,]+)", str(point.facts.get("numbers sent by operation")))
    by_operation = sum(int(one.replace(",", "")) for one in written)
    if abs(by_operation - numbers) > max(len(written), 1e-6 * numbers):
        yield Gap(
            path="measurements.traffic",
            found=f"{numbers:.0f} numbers",
            allowed=f"{by_operation}, by operation",
        )
    least, most = (width * numbers / MIB for width in NUMBER_BYTES)
    if not least * (1 - ROUNDED) <= sent.median <= most * (1 + ROUNDED):
        allowed = f"from {least:.4g} to {most:.4g} MiB, for {numbers:.0f} numbers"
        yield Gap(path="measurements.traffic-bytes", found=f"{sent.median:.4g}", allowed=allowed)
    if host.median > state.median:
        allowed = f"up to the state, {state.median:.4g}"
        yield Gap(path="measurements.state-on-host", found=f"{host.median:.4g}", allowed=allowed)
    held_there = (state.median - host.median) * count / GIB
    if held_there > memory.median:
        allowed = f"at least the state, {held_there:.4g} GiB"
        yield Gap(path="measurements.peak-memory", found=f"{memory.median:.4g}", allowed=allowed)


def parameters_of(point: PointRecord[TrainingPoint]) -> int | None:
    """Return the parameters that the first rank has; None where the facts do not say it."""
    return count_of(point.facts, "first rank's parameters", "first rank's expert parameters")


def of_recipe(
    tables: TrainingTables, part: TrainingPlan, points: Sequence[Point[TrainingPoint]]
) -> Iterator[Gap]:
    """Yield where model, data, layouts or control runs are not those that the recipe has by their names."""
    training = part.training
    yield from held("plan.part.shape", part.shape, tables.models.get(training.model))
    yield from held("plan.part.data", part.data, tables.data.get(training.data))
    for point in points:
        path, layout = f"plan.points.{point.id}.part", point.part.layout
        if layout is None:
            yield from held(f"{path}.shape", point.part.shape, None)
            continue
        yield from held(f"{path}.layout", layout, tables.layouts.get(point.id))
        model = trained(training, layout).model
        yield from held(f"{path}.shape", point.part.shape, tables.models.get(model))
    # The first point, and every layout that others are held against, has all control runs.
    first = next((point.id for point in points if point.part.layout is None and point.part.leg is None), None)
    for point in points:
        layout, world = point.part.layout, point.world_size
        repeated = layout.plain if layout else point.id == first
        yield from held(
            f"plan.points.{point.id}.part.controls", point.part.controls, training.controls * repeated
        )
        batch, over = divmod(training.global_batch * (layout.replicas if layout else 1), world)
        sizes, asked = point.part.microbatches, trained(training, layout).microbatch
        fixed = asked != "auto" and point.part.leg is None
        if over or any(batch % size for size in sizes) or (fixed and sizes != (asked,)):
            allowed = f"{asked}, of {batch} sequences of a device"
            yield Gap(path=f"plan.points.{point.id}.part.microbatches", found=shown(sizes), allowed=allowed)
        if layout is None and point.part.sharding is not None and world > 1:
            yield from held(f"plan.points.{point.id}.part.sharding", point.part.sharding, training.sharding)
        if layout is None and point.part.leg is None and point.id.partition("=")[0] not in KEYS:
            yield Gap(path=f"plan.points.{point.id}.id", found=point.id, allowed=f"{' or '.join(KEYS)}=COUNT")


ACCOUNT = Account(measured=MEASURED, as_planned=as_planned, of_recipe=of_recipe)
