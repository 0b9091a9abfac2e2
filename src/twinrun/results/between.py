"""The claims between records, judged: means over two GPUs, or two stacks, of the same settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from twinrun.foundation.text import plain
from twinrun.manifests.claims import ClaimSide, RecordClaim
from twinrun.manifests.metrics import Metric, named_by
from twinrun.manifests.restatements import Restatement
from twinrun.planning.project import Project
from twinrun.protocol.measurements import Measurement
from twinrun.results.curves import demand_trained
from twinrun.results.evidence import counted, doubt_of, found_of, mismatches
from twinrun.results.record import Record, hardware
from twinrun.results.verdicts import (
    Assessment,
    FoundValue,
    NotAskedError,
    RestatementVerdict,
    Verdict,
    judge_claim,
    judge_restated_ratio,
    margin,
)
from twinrun.workloads.workload import PointRecord

# Fewer settings in common, such as models, are no mean; a claim of one setting is none.
LEAST_SETTINGS = 2


class SideMeasurement(NamedTuple):
    """What one record gives to a side."""

    record: Record
    point: PointRecord
    measurement: Measurement


# What the records of a side give, by the setting that the mean is over.
Side = dict[str, SideMeasurement]


def judge_between(records: Sequence[Record], project: Project) -> tuple[Verdict, ...]:
    """Judge the claims between records of the recipe that `records` are of, in the published order."""
    if not records:
        return ()
    published = project.recipe(records[0].plan.recipe).published
    return tuple(
        judge_claim(
            claim,
            partial(_as_published, claim, records, project),
            partial(_as_restated, claim, records=records, project=project),
        )
        for claim in published.between_records
    )


def _as_published(claim: RecordClaim, records: Sequence[Record], project: Project) -> Assessment:
    over, under = (
        _published_side(claim, side, records, project.metrics) for side in (claim.over, claim.under)
    )
    used = [one.record for side in (over, under) for one in side.values()]
    if apart := sorted({", ".join(mismatches(record.plan.differences)) for record in used} - {""}):
        raise NotAskedError("; ".join(apart), outcome="config-mismatch")
    metric = project.metrics[claim.metric]

    def value(one: SideMeasurement) -> float:
        return counted(one.point, one.measurement, metric, one.record.gpu, per=claim.per)

    ratios = {name: value(over[name]) / value(under[name]) for name in claim.values}
    mean = sum(ratios.values()) / len(ratios)
    stands = margin(mean, claim.value, better=claim.better, tolerance=claim.tolerance)
    reason = f"mean of {_each(ratios)}; published {claim.value:g}, tolerance {claim.tolerance:.0%}"
    return Assessment(mean, stands.holds, reason)


def _published_side(
    claim: RecordClaim, side: ClaimSide, records: Sequence[Record], metrics: Mapping[str, Metric]
) -> Side:
    """Return what the published GPU and stack of a side give; raises NotAskedError where that is no mean."""
    found: dict[str, list[tuple[Record, PointRecord]]] = {}
    for record in records:
        point = record.point(side.point or claim.point)
        if point and record.gpu and (record.gpu.id, record.plan.stack) == (side.gpu, side.stack):
            name = record.terms(point).settings[claim.setting]
            found.setdefault(name, []).append((record, point))
    if absent := [name for name in claim.values if name not in found]:
        raise NotAskedError(
            f"no record at {side.point or claim.point} of {side} for {claim.setting} {', '.join(absent)}"
        )
    found = {name: found[name] for name in claim.values}
    if several := [name for name, those in found.items() if len(those) > 1]:
        raise NotAskedError(f"more than one record of {side} for {claim.setting} {', '.join(several)}")
    return {name: _published_one(claim, side, *those[0], metrics) for name, those in found.items()}


def _published_one(
    claim: RecordClaim, side: ClaimSide, record: Record, point: PointRecord, metrics: Mapping[str, Metric]
) -> SideMeasurement:
    """Return the number of a record; raises NotAskedError where it is not one of the published side."""
    name = record.terms(point).settings[claim.setting]
    one = found_of(claim, point)
    if one is None or one.count < 2:
        raise NotAskedError(f"{side}: {claim.metric} of {name} is not measured over two steps or more")
    if not record.environment.as_locked:
        environment = record.environment
        packages = ", ".join(sorted(environment.lock_differences | environment.changed_files)[:3])
        raise NotAskedError(f"{name} did not run on {side}: other versions of {packages}")
    demand_trained([point], metrics)
    if doubt := doubt_of([(point, one)], metrics, record.gpu, per=claim.per, tolerance=claim.tolerance):
        raise NotAskedError(f"{side}, {name}: {doubt}")
    return SideMeasurement(record, point, one)


def _as_restated(
    claim: RecordClaim, here: Restatement, *, records: Sequence[Record], project: Project
) -> RestatementVerdict:
    """Judge the restatement over the settings that both sides have: one of each vendor that was compared."""
    metric, differs = project.metrics[here.metric], ""
    found: FoundValue | NotAskedError
    try:
        vendors = [project.gpus[side.gpu].vendor for side in (claim.over, claim.under)]
        over, under = (_restated_side(claim, here, records, vendor, project.metrics) for vendor in vendors)
        common = _common(claim, over, under)
        ratios = {name: _canonical(over[name], metric) / _canonical(under[name], metric) for name in common}
        found = FoundValue(sum(ratios.values()) / len(ratios), f"the mean of {_each(ratios)}")
        differs = "; ".join(_differs(claim, (over, under), common))
    except NotAskedError as refusal:
        found = refusal
    return judge_restated_ratio(here, found, metric, run=differs)


def _common(claim: RecordClaim, over: Side, under: Side) -> list[str]:
    """Return the settings that both sides have; raises NotAskedError for fewer than make a mean."""
    common = [name for name in claim.values if name in over and name in under]
    least = min(LEAST_SETTINGS, len(claim.values))
    if len(common) < least:
        raise NotAskedError(
            f"the sides have {claim.setting} {', '.join(common) or 'none'} in common, and {least} make a mean"
        )
    return common


def _restated_side(
    claim: RecordClaim,
    here: Restatement,
    records: Sequence[Record],
    vendor: str,
    metrics: Mapping[str, Metric],
) -> Side:
    """Return what the GPUs of a vendor give; raises NotAskedError."""
    found: Side = {}
    for record in records:
        if record.gpu is None or record.plan.vendor != vendor or not record.points:
            continue
        point = max(record.points, key=lambda one: one.devices)
        name = record.terms(point).settings[claim.setting]
        if name not in claim.values:
            continue
        if name in found:
            raise NotAskedError(f"more than one record of {vendor} is of {claim.setting} {name}")
        found[name] = SideMeasurement(record, point, _restated_one(here, record, point, metrics))
    if not found:
        values = ", ".join(claim.values)
        raise NotAskedError(f"no record of a {vendor} GPU is of {claim.setting} {values}")
    if len(named := sorted({hardware(one.record) for one in found.values()})) > 1:
        raise NotAskedError(f"the records of {vendor} are of several machines: {', '.join(named)}")
    return found


def _restated_one(
    here: Restatement, record: Record, point: PointRecord, metrics: Mapping[str, Metric]
) -> Measurement:
    """Return the number of a record; raises NotAskedError where nothing stands behind it."""
    metric = metrics[here.metric]
    place = f"{record.run} at {point.id}"
    if metric.repeated and record.plan.scale == "smoke":
        raise NotAskedError(f"{place} is a smoke run, and its speed says nothing")
    if held := [one for one in record.plan.differences if not named_by(here.free, one.field)]:
        fields = "; ".join(f"{one.field} {plain(one.found)}" for one in held)
        raise NotAskedError(f"{place} is not the published configuration: {fields}")
    found = found_of(here, point)
    if found is None:
        raise NotAskedError(f"{place} has no {here.metric}")
    demand_trained([point], metrics)
    pairs = [(point, found)]
    if doubt := doubt_of(pairs, metrics, record.gpu, per=found.per, tolerance=here.tolerance):
        raise NotAskedError(f"{place}: {doubt}")
    return found


def _canonical(one: SideMeasurement, metric: Metric) -> float:
    return metric.canonical(one.measurement.median, one.measurement.unit)


def _each(ratios: dict[str, float]) -> str:
    return ", ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items())


def _differs(claim: RecordClaim, sides: Sequence[Side], common: Sequence[str]) -> Iterator[str]:
    """Yield what differs from the published comparison: machines, settings, fields."""
    for side, published in zip(sides, (claim.over, claim.under), strict=True):
        one = side[common[0]].record
        yield f"{hardware(one)} with {one.plan.stack}, published {published}"
    if absent := [name for name in claim.values if name not in common]:
        yield f"without {claim.setting} {', '.join(absent)}"
    apart = {
        one.field: one for side in sides for name in common for one in side[name].record.plan.differences
    }
    yield from (f"{one.field} {plain(one.found)}, published {plain(one.published)}" for one in apart.values())
