"""Records that give the restatement of a claim a value, as runs make them: what holds, and what fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.records import PROJECT, finished, judge, judge_between, plan, training_record, with_derived
from tests.settings import keys_of, table_of, written
from twinrun.manifests.claims import Claim, ClaimSide, RecordClaim
from twinrun.planning.plan import Plan
from twinrun.protocol.measurements import Series, sampled
from twinrun.results.configuration import configuration_of_plan, published_of
from twinrun.results.record import Record
from twinrun.results.verdicts import RestatementVerdict
from twinrun.workloads.workload import PointRecord

# Neither the published GPU of any claim, nor its vendor's.
GPU = "h200"
# A GPU of each vendor.
VENDORS = {"rocm": "mi300x", "cuda": "h100-80gb"}
# A rate of both sides, or of the first size, in TFLOP/s of a device.
RATE = 400.0
LOSSES = tuple(4.0 - 0.02 * step for step in range(120))
# Keys of `--set` for fields of a fingerprint that have another name.
KEYS = {"schedule.end_steps": "optimizer.decay_steps", "schedule.warmup_steps": "optimizer.warmup_steps"}
# Relative distances of control runs from the run that they repeat.
ROUNDING = tuple(1e-6 * (1 + number / 10) for number in range(10))


def configured(
    recipe: str,
    claim: Claim | RecordClaim,
    *,
    scale: str = "paper",
    value: str | None = None,
    side: ClaimSide | None = None,
) -> tuple[str, ...]:
    """Return the settings with which a plan is of what a claim is about.

    Args:
        value: which of the values of a claim between records, for example the model.
        side: which side of such a claim.
    """
    loaded = PROJECT.recipe(recipe)
    stated = published_of(claim, loaded.published, value=value, side=side)
    if (repository := stated.get("model.repository")) is not None:
        return (f"model={repository}@{'0' * 40}",)
    inner = "training." if loaded.workload == "evaluation" else ""
    asked = [f"{inner}model={stated['model']}"] if isinstance(stated.get("model"), str) else []
    if claim.kind != "between records" and (claim.point or "").startswith("devices="):
        asked.append(str(claim.point))
    if side and side.settings:
        asked.append(side.point or str(claim.point))
    made = plan(recipe, gpu=GPU, scale=scale, settings=tuple(asked))
    found = configuration_of_plan(
        made, made.points, claim, recipe=loaded, metrics=PROJECT.metrics, value=value, side=side
    )
    keys = dict(keys_of(table_of(loaded).model_dump(mode="json")))
    for one in found.differences:
        if one.stated and (key := f"{inner}{KEYS.get(one.field, one.field)}") in keys:
            asked.append(f"{key}={written(one.published)}")
    return tuple(asked)


def restated_at(recipe: str, claim: Claim | RecordClaim, value: float) -> RestatementVerdict:
    """Return the judge's verdict on a record that gives the restatement of `claim` this value."""
    assert claim.here
    if isinstance(claim, RecordClaim):
        records = sides(recipe, claim, value)
        verdict = next(one for one in judge_between(records, PROJECT) if one.claim == claim.id)
    else:
        record = MADE.get(claim.here.metric, _as_measured)(recipe, claim, value)
        verdict = next(one for one in _judged(record).verdicts if one.claim == claim.id)
    assert verdict.here, verdict.reason
    return verdict.here


def _judged(record: Record) -> Record:
    published = PROJECT.recipe(record.plan.recipe).published
    return record.model_copy(update={"verdicts": judge(record, published, PROJECT)})


def _sweep(recipe: str, rates: Mapping[int, float], **options: Any) -> Record:
    """Return a training whose plan has these devices alone, each with its TFLOP/s."""
    named = {f"devices={count}": rate for count, rate in rates.items()}
    made = training_record(named, recipe=recipe, gpu=GPU, scale="node", **options)
    kept = tuple(point for point in made.plan.points if point.id in named)
    return made.model_copy(update={"plan": made.plan.model_copy(update={"points": kept})})


def _as_measured(recipe: str, claim: Claim, value: float) -> Record:
    """Return a run of another GPU whose points all have this value, of what no formula gives."""
    assert claim.here
    made, name = plan(recipe, gpu=GPU, scale="node"), claim.here.measurement or claim.here.metric
    metric = PROJECT.metrics[claim.here.metric]
    unit, per = claim.here.unit or metric.unit, metric.per[0]
    points = [
        PointRecord(
            id=one.id,
            nodes=one.nodes,
            devices=one.world_size,
            hosts=("node-0",),
            part=one.part,
            measurements=(sampled(name, [value], metric=metric.id, unit=unit, per=per),),
            facts={"device name": "a device"},
        )
        for one in made.points
    ]
    return finished(made, points, PROJECT.gpus[GPU])


def _at_share_of_peak(recipe: str, claim: Claim, value: float) -> Record:
    assert claim.here
    rate = value * PROJECT.gpus[GPU].device_peak_flops / 1e12
    settings = configured(recipe, claim, scale="node") if claim.configuration else ()
    # The model that a plan takes by itself may need more devices than the claim.
    sizes = (one.world_size for one in plan(recipe, gpu=GPU, scale="node", settings=settings).points)
    least = min(size for size in sizes if size >= claim.here.least_devices)
    return _sweep(recipe, {least: rate}, settings=settings)


def _at_kept(recipe: str, claim: Claim, value: float) -> Record:
    assert claim.here
    first = claim.here.least_devices
    return _sweep(recipe, {first: RATE, 2 * first: RATE * value})


def _at_share_of_envelope(recipe: str, claim: Claim, value: float) -> Record:
    """Return a training whose second curve leaves the first by a share of what its control runs allow."""
    made = training_record({}, recipe=recipe, gpu=GPU, scale="node")
    rates = {point.id: RATE for point in made.plan.points}
    # A leg has the curve up to its end.
    ends = {point.id: point.part.leg.end if point.part.leg else None for point in made.plan.points}
    curves = {name: LOSSES[:end] for name, end in ends.items()}
    made = training_record(rates, recipe=recipe, gpu=GPU, scale="node", losses=curves)
    controls = tuple(
        _losses(f"control-{number}", 1 + apart) for number, apart in enumerate(ROUNDING, start=1)
    )
    first, *others = made.points
    first = first.model_copy(update={"series": (*first.series, *controls)})
    made = made.model_copy(update={"points": (first, *others)})
    # Of a curve that is a hair apart the judge says which share of the envelope that is.
    share = next(one.here for one in _judged(_apart(made, 1e-6)).verdicts if one.here)
    assert share.measured, share.reason
    return _apart(made, 1e-6 * value / share.measured)


def _apart(record: Record, distance: float) -> Record:
    """Return the record with every curve but the first apart from it."""
    first, *others = record.points
    moved = [
        one.model_copy(update={"series": (_losses("loss", 1 + distance, end=len(one.series[0].values)),)})
        for one in others
    ]
    return record.model_copy(update={"points": (first, *moved)})


def _losses(name: str, factor: float, *, end: int | None = None) -> Series:
    """Return the losses up to a step, apart by a factor from the second step on."""
    values = (LOSSES[0], *(value * factor for value in LOSSES[1:end]))
    return Series(id=name, metric="loss", unit="nats/token", per="run", values=values)


def _at_share_of_roofline(recipe: str, claim: Claim | RecordClaim, value: float, gpu: str = GPU) -> Record:
    """Return a benchmark whose call takes its roofline bound, 1 ms, over `value`."""
    assert claim.here
    assert claim.here.measurement
    call = claim.here.measurement.partition("/")[0]
    made, row = plan(recipe, scale="paper", gpu=gpu), PROJECT.gpus[gpu]
    placed = next(one for one in made.points if one.id == claim.point)
    rate = row.device_bandwidth_bytes_s
    peak = sampled(
        "peak-rate@copy",
        [rate],
        metric="peak-rate",
        unit="B/s",
        per="device",
        labels={"resource": "copy"},
    )
    labels = {"call": call, "implementation": "ours"}
    time = sampled(call, [1 / value] * 30, metric="time", unit="ms", per="device", labels=labels)
    point = PointRecord(
        id=placed.id,
        nodes=1,
        devices=1,
        hosts=("node-0",),
        part=placed.part,
        measurements=(peak, time),
        facts={"device name": "a device", f"{call} work copy": rate / 1e3},
    )
    whole = finished(made, [with_derived(point, made, row)], row)
    return whole.model_copy(update={"plan": made.model_copy(update={"points": (placed,)})})


def at_multiple_of_ours(recipe: str, claim: Claim, value: float, gpu: str = GPU) -> Record:
    """Return a benchmark at half of its bound; its baseline takes and keeps `value` times what ours does."""
    assert claim.measurement
    call, _, compared = claim.measurement.partition("/")
    baseline = compared.partition("@")[2]
    made, row = plan(recipe, scale="node", gpu=gpu), PROJECT.gpus[gpu]
    placed = next(one for one in made.points if one.id == claim.point)
    ours = {"call": call, "implementation": "ours"}
    rate = row.device_bandwidth_bytes_s
    peak = sampled("peak-rate@copy", [rate], metric="peak-rate", unit="B/s", per="device")
    measurements = (
        peak.model_copy(update={"labels": {"resource": "copy"}}),
        sampled(call, [1.0] * 20, metric="time", unit="ms", per="device", labels=ours),
        sampled(
            f"{call}@{baseline}",
            [value] * 20,
            metric="time",
            unit="ms",
            per="device",
            labels={"call": call, "implementation": baseline},
        ),
        sampled(
            f"{call}/memory-saving@{baseline}",
            [value],
            metric="memory-saving",
            unit="ratio",
            per="device",
            labels={**ours, "baseline": baseline},
        ),
    )
    point = PointRecord(
        id=placed.id,
        nodes=1,
        devices=1,
        hosts=("node-0",),
        part=placed.part,
        measurements=measurements,
        facts={"device name": "a device", f"{call} work copy": rate / 2e3},
    )
    alone = made.model_copy(update={"points": (placed,)})
    return finished(alone, [with_derived(point, alone, row)], row)


def sides(recipe: str, claim: RecordClaim, value: float) -> list[Record]:
    """Return what GPUs of both sides give: shares of the peak, or of a call's bound, `value` apart."""
    found = []
    for side, share in ((claim.over, 0.5 * value), (claim.under, 0.5)):
        gpu = VENDORS[PROJECT.gpus[side.gpu].vendor]
        if claim.measurement:
            found.append(_at_share_of_roofline(recipe, claim, share, gpu))
            continue
        rate = share * PROJECT.gpus[gpu].device_peak_flops / 1e12
        for name in claim.values:
            settings = configured(recipe, claim, value=name if claim.setting else None, side=side)
            found.append(training_record({"nodes=1": rate}, recipe=recipe, gpu=gpu, settings=settings))
    return found


def _at_score(recipe: str, claim: Claim, value: float) -> Record:
    assert claim.measurement
    made = plan(recipe, gpu=GPU, settings=configured(recipe, claim))
    return evaluated(made, {claim.measurement: value})


def _at_kept_fall(recipe: str, _claim: Claim, value: float) -> Record:
    """Return a training whose loss falls from 10 to 3, and rises again for its last third, with noise."""
    falling = [10 - 7 * step / 100 for step in range(100)]
    losses = (*falling, *[3.0] * 100, *[10 - 7 * value] * 100)
    return evaluated(
        plan(recipe, gpu=GPU), {}, losses=[loss + step / 1e9 for step, loss in enumerate(losses)]
    )


def evaluated(made: Plan, scores: Mapping[str, float], *, losses: Sequence[float] = LOSSES) -> Record:
    """Return a judged record of an evaluation at one point; a model that is there has no losses."""
    row, (placed,) = PROJECT.gpus[made.gpu or GPU], made.points
    found = [sampled(task, [one], metric="score", unit="ratio", per="run") for task, one in scores.items()]
    curve = Series(id="loss", metric="loss", unit="nats/token", per="run", values=tuple(losses))
    facts = dict.fromkeys(("harness", "tokenizer sha256", "weights sha256", "device name"), "one")
    point = PointRecord(
        id=placed.id,
        nodes=placed.nodes,
        devices=placed.world_size,
        hosts=tuple(f"node-{number}" for number in range(placed.nodes)),
        part=placed.part,
        measurements=tuple(found),
        series=(curve,) if made.part.shape else (),
        facts={**facts, "parameters": made.part.shape.parameters() if made.part.shape else 9},
    )
    return finished(made, [with_derived(point, made, row)], row)


MADE: dict[str, Callable[[str, Claim, float], Record]] = {
    "model-flops-share": _at_share_of_peak,
    "kept-per-doubling": _at_kept,
    "envelope-share": _at_share_of_envelope,
    "roofline-share": _at_share_of_roofline,
    "speedup": at_multiple_of_ours,
    "memory-saving": at_multiple_of_ours,
    "score": _at_score,
    "kept-fall": _at_kept_fall,
}
