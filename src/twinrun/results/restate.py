"""The claims about one record, judged as restated: in a neutral metric, on other hardware or scale."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from twinrun.foundation.text import plain, plural
from twinrun.manifests.claims import Claim
from twinrun.manifests.metrics import Metric, named_by
from twinrun.manifests.restatements import Restatement
from twinrun.results.curves import demand_trained, nothing_behind
from twinrun.results.evidence import (
    JudgeContext,
    beyond,
    differences_of,
    doubt_of,
    few_steps,
    found_of,
    kept_per_doubling,
    standard_error,
    unspanned,
)
from twinrun.results.parity import curves_of, held_within
from twinrun.results.published_run import demand_hosts, miscounted
from twinrun.results.record import Record
from twinrun.results.verdicts import FoundValue, NotAskedError, RestatementVerdict, judge_restatement
from twinrun.workloads.settings import Difference
from twinrun.workloads.workload import PointRecord


def restated(claim: Claim, here: Restatement, record: Record, terms: JudgeContext) -> RestatementVerdict:
    """Judge the restatement of a claim; the worst of its points decides."""
    metric = terms.metrics[here.metric]
    points = _points(claim, here, record)
    differences = _distinct(differences_of(record, [point], terms) for point in points)
    differs = "; ".join(_differs(claim, record, terms, points, differences)) or "as published"
    found: FoundValue | NotAskedError
    try:
        _demand_askable(here, record, metric, points, differences)
        demand_trained(points, terms.metrics)
        demand_hosts(points)
        if lack := unspanned(record.points, claim.reach):
            raise NotAskedError(lack)
        found = _worst(claim, here, record, terms, points)
    except NotAskedError as refusal:
        found = refusal
    return judge_restatement(here, found, metric, run=differs)


def _worst(
    claim: Claim, here: Restatement, record: Record, terms: JudgeContext, points: Sequence[PointRecord]
) -> FoundValue:
    """Return the value that is worst for the claim; raises NotAskedError where one cannot be judged."""
    metric = terms.metrics[here.metric]
    values = list(
        _parities(claim, record, terms) if metric.between_curves else _values(claim, here, metric, points)
    )
    _demand_no_doubt(here, record, terms, values)
    worst = max(values, key=lambda one: _badness(one.value, here, metric))
    behind = [pair for one in values for pair in one.behind]
    note = few_steps(behind, terms.metrics, record.gpu) or standard_error(behind)
    several = f", the worst of {len(values)}" if len(values) > 1 else ""
    return worst._replace(place=f"{worst.place}{several}", note=note)


def _badness(value: float, here: Restatement, metric: Metric) -> float:
    """Return what grows as a value gets worse for the claim."""
    apart = value - metric.canonical(here.value, here.unit or metric.unit)
    return {"higher": -apart, "lower": apart, "equal": abs(apart)}[here.direction(metric)]


def _points(claim: Claim, here: Restatement, record: Record) -> list[PointRecord]:
    """Return the claim's own points where the run has them, else all, as far as they are large enough."""
    named = claim.between or ((claim.point,) if claim.point else ())
    own = [point for name in named if (point := record.point(name))]
    if named and len(own) == len(named):
        return [point for point in own if point.devices >= here.least_devices]
    large = [point for point in record.points if point.devices >= here.least_devices]
    return sorted(large, key=lambda point: point.devices)


def _distinct(found: Iterator[tuple[Difference, ...]]) -> list[Difference]:
    return list({one.field: one for differences in found for one in differences}.values())


def _differs(
    claim: Claim,
    record: Record,
    terms: JudgeContext,
    points: Sequence[PointRecord],
    differences: Sequence[Difference],
) -> Iterator[str]:
    """Yield what differs from the published run: GPU, points, fields."""
    published = claim.hardware and terms.gpus[claim.hardware.gpu]
    if published and (record.gpu is None or record.gpu.id != published.id):
        yield f"GPU {_gpus(record)}, published {published.name}"
    named = claim.between or ((claim.point,) if claim.point else ())
    ids = [point.id for point in points]
    if named and set(ids) != set(named):
        yield f"points {', '.join(ids) or 'none'}, published {' and '.join(named)}"
    elif claim.hardware and (other := miscounted([claim.hardware], points, terms)):
        yield other
    yield from (f"{one.field} {plain(one.found)}, published {plain(one.published)}" for one in differences)


def _gpus(record: Record) -> str:
    names = dict.fromkeys(device.name for device in record.machine.devices)
    return record.gpu.name if record.gpu else ", ".join(names) or "none"


def _demand_askable(
    here: Restatement,
    record: Record,
    metric: Metric,
    points: Sequence[PointRecord],
    differences: Sequence[Difference],
) -> None:
    """Raise NotAskedError where the run cannot answer at all."""
    if metric.repeated and record.plan.scale == "smoke":
        raise NotAskedError("a smoke run checks, and its speed says nothing")
    if metric.repeated and record.gpu is None:
        known = "has no row in images/gpus.toml, so its dense peak is unknown"
        raise NotAskedError(
            f"{_gpus(record)} {known}"
            if record.machine.devices
            else "the run is on a processor, whose speed says nothing of a GPU"
        )
    for names in (
        {device.name for device in record.machine.devices},
        {str(name) for point in record.points if (name := point.facts.get("device name"))},
    ):
        if metric.repeated and len(names) > 1:
            raise NotAskedError(f"the run mixes GPUs: {', '.join(sorted(names))}")
    if lost := [point.id for point in record.plan.points if record.point(point.id) is None]:
        raise NotAskedError(f"{plural(len(lost), 'planned point')} failed: {', '.join(lost)}")
    if held := [one for one in differences if not named_by(here.free, one.field)]:
        raise NotAskedError(
            "; ".join(f"{one.field} must be {plain(one.published)}, is {plain(one.found)}" for one in held)
        )
    if not points:
        raise NotAskedError(f"needs a point of {plural(here.least_devices, 'device')}, the run has none")


def _parities(claim: Claim, record: Record, terms: JudgeContext) -> Iterator[FoundValue]:
    """Yield what part of its envelope each curve is away from the first."""
    try:
        found = held_within(claim, record)
    except NotAskedError as refusal:
        raise NotAskedError(f"the claim {refusal}") from None
    if doubt := nothing_behind(claim, record, curves_of(claim, record), terms.metrics[claim.metric]):
        raise NotAskedError(doubt)
    for one in found:
        if one.outcome in ("other-run", "no-envelope") or one.worst is None:
            raise NotAskedError(one.reason)
        share = one.start / one.start_allowed if one.outcome == "start" else one.worst.share
        yield FoundValue(share, f"{one.b} against {one.a} ({one.reason})")


def _values(
    claim: Claim, here: Restatement, metric: Metric, points: Sequence[PointRecord]
) -> Iterator[FoundValue]:
    if metric.between_points:
        yield from _doublings(claim, points)
        return
    for point in points:
        found = found_of(here, point)
        if found is None:
            raise NotAskedError(f"no {here.measurement or here.metric} at {point.id}")
        if metric.formulas and found.formula != (here.formula or claim.formula):
            raise NotAskedError(f"{found.id} at {point.id} is counted by {found.formula}")
        yield FoundValue(metric.canonical(found.median, found.unit), point.id, ((point, found),))


def _doublings(claim: Claim, points: Sequence[PointRecord]) -> Iterator[FoundValue]:
    """Yield what a device keeps of its throughput from each size to the next, for a doubling."""
    # A point's name starts with its case, up to the @: points of two cases are no two sizes of one.
    ordered = sorted(points, key=lambda point: (point.id.rpartition("@")[0], point.devices))
    pairs = [(a, b) for a, b in pairwise(ordered) if a.id.rpartition("@")[0] == b.id.rpartition("@")[0]]
    steps = [(a, b) for a, b in pairs if b.devices > a.devices]
    if not steps:
        raise NotAskedError("two world sizes are needed and the run has one")
    for smaller, larger in steps:
        under, over = found_of(claim, smaller), found_of(claim, larger)
        if not under or not over or under.median <= 0:
            raise NotAskedError(f"no {claim.metric} at {smaller.id} or {larger.id}")
        behind = ((smaller, under), (larger, over))
        yield FoundValue(kept_per_doubling(*behind), f"{smaller.id} to {larger.id}", behind)


def _demand_no_doubt(
    here: Restatement, record: Record, terms: JudgeContext, values: Sequence[FoundValue]
) -> None:
    """Raise NotAskedError where nothing stands behind a value."""
    for one in values:
        for pair in one.behind:
            doubt = doubt_of([pair], terms.metrics, record.gpu, per=pair[1].per, tolerance=here.tolerance)
            if doubt:
                raise NotAskedError(f"at {one.place} {doubt}")
        if over := beyond(one.value, terms.metrics[here.metric], record.gpu, per="device"):
            raise NotAskedError(f"at {one.place} it is {over}")
