"""Honest records under which the claims of every recipe hold, and what can be done to a record to deceive."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

from tests.counterexamples import MADE, at_multiple_of_ours, configured, sides
from tests.records import PROJECT, finished, plan, training_record, with_derived
from twinrun.manifests.claims import Claim, RecordClaim
from twinrun.protocol.measurements import Check, Measurement, Series, sampled
from twinrun.results.record import Record
from twinrun.workloads.workload import PointRecord

# Relative distances of control runs from the run that they repeat.
ROUNDING = tuple(1e-6 * (1 + number / 10) for number in range(10))
FALL = tuple(4.0 * 0.97**step for step in range(300))
TRAINING_SPEEDS = ("tokens-per-second", "model-flops", "model-flops-share")
SPEEDS = (*TRAINING_SPEEDS, "roofline-share", "speedup", "bandwidth", "bus-bandwidth")
TIMES = ("step-time", "time")
REFERENCES = ("state-of-formula", "traffic-of-formula", "link-traffic")
Altered = Callable[[Record, Claim], Record]


class Alteration(NamedTuple):
    """One way to alter a record, the claims that it deceives, and the verdicts that it must not get."""

    alter: Altered
    about: Callable[[Claim], bool]
    never: tuple[str, ...] = ("reproduced", "holds-here")


def honest() -> Iterator[tuple[str, Claim, Record]]:
    """Yield every claim about one record, with a record under which it holds."""
    for recipe in PROJECT.recipes():
        for claim in PROJECT.recipe(recipe).published.claim:
            yield recipe, claim, _honest(recipe, claim)


def honest_between() -> Iterator[tuple[str, RecordClaim, list[Record]]]:
    """Yield every claim between records that has a restatement, with records under which that holds."""
    for recipe in PROJECT.recipes():
        for claim in PROJECT.recipe(recipe).published.between_records:
            if claim.here:
                yield recipe, claim, sides(recipe, claim, claim.here.value)


def _honest(recipe: str, claim: Claim) -> Record:
    if claim.id == "same-samples-at-every-size":
        return _trained(recipe, gpu=None, scale="smoke")
    if recipe in ("mpt1b-convergence", "mamba-convergence"):
        return _trained(recipe, gpu="h200", scale="node")
    if recipe == "deepspeed-pretrain":
        settings = ("optimizer.warmup_steps=10", "precision=bf16")
        return _trained(recipe, gpu="mi210", scale="paper", settings=settings)
    if recipe == "mpt-chinchilla":
        return MADE[claim.metric](recipe, claim, claim.value)
    if recipe == "ring-allreduce":
        return _ring()
    if recipe == "cluster-acceptance":
        return _accepted()
    if recipe in ("mamba-kernels", "flash-attention"):
        return _timed(recipe, claim)
    if claim.configuration and (asked := configured(recipe, claim, scale="node")):
        shape = plan(recipe, gpu="mi250", scale="node", settings=asked).part.shape
        rate = claim.value * shape.flops_per_token() / 1e12
        return _trained(recipe, gpu="mi250", scale="node", settings=asked, rate=rate)
    return _trained(recipe, gpu="mi250", scale="paper")


@cache
def _trained(
    recipe: str, *, gpu: str | None, scale: str, settings: tuple[str, ...] = (), rate: float = 47.9
) -> Record:
    """Return a training at the published rates, whose curve every point and its control runs have."""
    made = plan(recipe, gpu=gpu, scale=scale, settings=settings)
    rates = {point.id: 79.5 if point.nodes > 1 else 83.0 for point in made.points}
    if recipe.startswith("mamba"):
        rates = dict.fromkeys(rates, rate)
    record = training_record(rates, recipe=recipe, gpu=gpu, scale=scale, settings=settings, losses=FALL)
    formulas = tuple(
        sampled(name, [1.001], metric=name, unit="ratio", per="device") for name in REFERENCES[:2]
    )
    curves = [_losses("loss", 0.0), *(_losses(f"control-{n}", one) for n, one in enumerate(ROUNDING, 1))]
    return _each(
        record,
        lambda point: {"series": tuple(curves), "measurements": (*point.measurements, *formulas)},
    )


def _losses(name: str, apart: float) -> Series:
    values = (FALL[0], *(value * (1 + apart) for value in FALL[1:]))
    return Series(id=name, metric="loss", unit="nats/token", per="run", values=values)


@cache
def _ring() -> Record:
    made, row = plan("ring-allreduce"), PROJECT.gpus["mi250"]
    points = []
    for placed in made.points:
        found = [sampled("ring-fp32", [90.0] * 20, metric="time", unit="ms", per="device", labels=OURS)]
        for name, value, per in (
            ("ring-fp32/link-traffic", 1.0, "link"),
            ("naive-fp32/link-traffic", 1.0, "link"),
            ("ring-int32/error", 0.0, "device"),
        ):
            metric = name.partition("/")[2]
            found.append(sampled(name, [value], metric=metric, unit="ratio", per=per))  # type: ignore[arg-type]
        facts = {"device name": "a device", "ring-fp32 bus bytes": 49e9}
        points.append(with_derived(_point(placed, tuple(found), facts), made, row))
    return finished(made, points, row)


OURS = {"call": "ring-fp32", "implementation": "ours"}


@cache
def _accepted() -> Record:
    made, row = plan("cluster-acceptance"), PROJECT.gpus["mi250"]
    checks = tuple(Check(id=one.id, outcome="pass", place="a", reason="x") for one in made.part.checks)
    points = [
        with_derived(
            _point(placed, (), {"device name": "a device"}).model_copy(update={"checks": checks}), made, row
        )
        for placed in made.points
    ]
    return finished(made, points, row)


def _timed(recipe: str, claim: Claim) -> Record:
    """Return a benchmark on the published GPU with the published time, at half of the roofline bound."""
    assert claim.hardware
    assert claim.measurement
    if claim.metric != "time":
        return at_multiple_of_ours(recipe, claim, claim.value, claim.hardware.gpu)
    made, row = plan(recipe, gpu=claim.hardware.gpu), PROJECT.gpus[claim.hardware.gpu]
    placed = next(one for one in made.points if one.id == claim.point)
    labels = {"call": claim.measurement, "implementation": "ours"}
    times = [claim.value] * 20
    time = sampled(claim.measurement, times, metric="time", unit="ms", per="device", labels=labels)
    rate = row.device_bandwidth_bytes_s
    peak = sampled("peak-rate@copy", [rate], metric="peak-rate", unit="B/s", per="device")
    peak = peak.model_copy(update={"labels": {"resource": "copy"}})
    work = {f"{claim.measurement} work copy": rate * claim.value / 2e3, "device name": "a device"}
    return finished(made, [with_derived(_point(placed, (peak, time), work), made, row)], row)


def _point(placed: Any, measurements: tuple[Measurement, ...], facts: dict[str, Any]) -> PointRecord:
    return PointRecord(
        id=placed.id,
        nodes=placed.nodes,
        devices=placed.world_size,
        hosts=tuple(f"node-{number}" for number in range(placed.nodes)),
        part=placed.part,
        measurements=measurements,
        facts=facts,
    )


def _each(record: Record, change: Callable[[PointRecord], dict[str, Any]]) -> Record:
    points = tuple(point.model_copy(update=change(point)) for point in record.points)
    return record.model_copy(update={"points": points})


def _measured(record: Record, change: Callable[[PointRecord, Measurement], dict[str, Any]]) -> Record:
    def changed(point: PointRecord) -> dict[str, Any]:
        found = (one.model_copy(update=change(point, one)) for one in point.measurements)
        return {"measurements": tuple(found)}

    return _each(record, changed)


def first_side(alter: Altered) -> Callable[[list[Record], RecordClaim], list[Record]]:
    """Return what alters the records of the first of two sides, which are of one GPU."""

    def altered(records: list[Record], claim: RecordClaim) -> list[Record]:
        first = records[0].plan.gpu
        # What alters one record asks a claim for no more than claims of both kinds have.
        return [alter(one, claim) if one.plan.gpu == first else one for one in records]  # type: ignore[arg-type]

    return altered


def _scaled(speed: float, *, reference: float = 1.0) -> Altered:
    """Return what makes every speed so many times what it was, and every other number of a claim."""

    def alter(record: Record, claim: Claim) -> Record:
        def change(point: PointRecord, one: Measurement) -> dict[str, Any]:
            factor = {**dict.fromkeys(SPEEDS, speed), **dict.fromkeys(TIMES, 1 / speed)}
            by = factor.get(one.metric, reference if one.metric == claim.metric else 1.0)
            # A ratio is wrong where its larger point alone is.
            if claim.kind == "ratio" and claim.between and point.id == claim.between[1] and speed < 1:
                by = 1.0
            base = 0.5 if one.metric == "error" and reference != 1.0 else 0.0
            return {name: getattr(one, name) * by + base for name in ("median", "low", "high")}

        return _measured(record, change)

    return alter


def _valued(value: float) -> Altered:
    """Return what gives every number of the claim, and what goes with it, one value that is none."""
    return lambda record, claim: _measured(
        record, lambda _, one: dict.fromkeys(("median", "low", "high"), value)
    )


def _curved(losses: tuple[float, ...]) -> Altered:
    def alter(record: Record, _claim: Claim) -> Record:
        def change(point: PointRecord) -> dict[str, Any]:
            return {"series": tuple(one.model_copy(update={"values": losses}) for one in point.series)}

        return _each(record, change)

    return alter


def _slow_start(record: Record, _claim: Claim) -> Record:
    """Make the smallest point slow, so that the larger ones seem to gain."""
    least = min(point.devices for point in record.points)
    return _measured(
        record,
        lambda point, one: (
            {name: getattr(one, name) * 0.3 for name in ("median", "low", "high")}
            if point.devices == least and one.metric in SPEEDS
            else {}
        ),
    )


def _apart(record: Record, claim: Claim) -> Record:
    """Take the curve, or the fact, of the last point that a claim is about away from the others."""
    last = claim.between[-1] if claim.between else record.whole[-1].id

    def change(point: PointRecord) -> dict[str, Any]:
        if point.id != last:
            return {}
        curve = tuple(value * (1 + 0.1 * step / 300) for step, value in enumerate(FALL))
        moved = tuple(
            one.model_copy(update={"values": curve}) if one.id == "loss" else one for one in point.series
        )
        facts = {"order hash": "f" * 64} if claim.metric == "sample-order" else {}
        return {"series": moved, "facts": point.facts | facts}

    return _each(record, change)


def _on(devices: int, nodes: int, *, names: str | None = None) -> Altered:
    """Return what leaves the names of points and places all of them on these devices, of one kind."""
    return lambda record, _claim: _each(
        record,
        lambda point: {
            "devices": devices,
            "nodes": nodes,
            "hosts": ("node-0",),
            "facts": point.facts | ({"device name": names} if names else {}),
        },
    )


def _elsewhere(record: Record, _claim: Claim) -> Record:
    other = "h100-80gb" if record.gpu and record.gpu.id != "h100-80gb" else "h200"
    return record.model_copy(update={"gpu": PROJECT.gpus[other]})


def _small(record: Record, _claim: Claim) -> Record:
    return record.model_copy(update={"plan": record.plan.model_copy(update={"scale": "smoke"})})


def _one_check(record: Record, _claim: Claim) -> Record:
    made = plan("cluster-acceptance", settings=('only=["enumerate-gpus"]',))
    points = tuple(one.model_copy(update={"checks": one.checks[:1]}) for one in record.points)
    return record.model_copy(update={"plan": made, "points": points})


def _of_training(claim: Claim) -> bool:
    return claim.metric in (*TRAINING_SPEEDS, "loss", "sample-order", *REFERENCES[:2])


def _of_speed(claim: Claim) -> bool:
    return claim.metric in (*SPEEDS, *TIMES)


def _of_several(claim: Claim) -> bool:
    reach = claim.reach.with_that_of(PROJECT.metrics[claim.metric].evidence)
    return max(reach.devices, reach.world_sizes, reach.hardware_kinds) > 1


def _of_curves(claim: Claim) -> bool:
    return claim.metric == "loss"


def _of_numbers(claim: Claim) -> bool:
    return claim.metric not in ("loss", "sample-order", "checks-passed")


def _of_values(claim: Claim) -> bool:
    return claim.is_distance and _of_numbers(claim)


def _every(_claim: Claim) -> bool:
    return True


NOT_AS_PUBLISHED = ("reproduced",)
ALTERATIONS: dict[str, Alteration] = {
    "half as fast": Alteration(_scaled(0.5), _of_speed),
    "2.5 times the formula everywhere": Alteration(_scaled(1.0, reference=2.5), _of_values),
    "four times the formula everywhere": Alteration(_scaled(1.0, reference=4.0), _of_values),
    "a tenth of the formula everywhere": Alteration(_scaled(1.0, reference=0.1), _of_values),
    "a hundred times as fast": Alteration(_scaled(100.0), lambda one: _of_speed(one) and one.kind != "ratio"),
    "the smallest point is slow": Alteration(_slow_start, lambda one: one.kind == "ratio"),
    "infinite": Alteration(_valued(math.inf), _of_numbers),
    "not a number": Alteration(_valued(math.nan), _of_numbers),
    "negative": Alteration(_valued(-1.0), _of_numbers),
    "exploded": Alteration(_curved((*FALL[:-1], 1e4)), _of_training),
    "fell and rose again": Alteration(
        _curved((*FALL[:200], *(4.0 + 0.01 * step for step in range(100)))), _of_training
    ),
    "nothing learned": Alteration(_curved((4.0,) * 300), _of_training),
    "fell and lost most of it": Alteration(_curved((*FALL[:299], 3.9)), _of_curves),
    "eight steps of warm-up": Alteration(_curved(FALL[:8]), _of_curves),
    "not finite": Alteration(_curved((*FALL[:299], math.nan)), _of_training),
    "one point is apart": Alteration(_apart, lambda one: one.metric in ("loss", "sample-order")),
    "one device": Alteration(_on(1, 1, names="a device"), _of_several),
    "another number of cards": Alteration(_on(3, 1), _every, NOT_AS_PUBLISHED),
    "many nodes on one host": Alteration(_on(256, 32), _every),
    "another GPU": Alteration(_elsewhere, _every, NOT_AS_PUBLISHED),
    "smoke scale": Alteration(_small, _every, NOT_AS_PUBLISHED),
    "one sample": Alteration(lambda record, _: _measured(record, lambda *_: {"count": 1}), _of_speed),
    "scattered samples": Alteration(
        lambda record, _: _measured(record, lambda _, one: {"high": 3 * abs(one.high)}), _of_speed
    ),
    "one check of eighteen": Alteration(_one_check, lambda one: one.metric == "checks-passed"),
}
# Alterations of one side of a claim between records.
BETWEEN = (
    *("half as fast", "a hundred times as fast", "infinite", "not a number", "negative"),
    *("exploded", "fell and rose again", "nothing learned", "smoke scale"),
    *("one sample", "scattered samples"),
)
