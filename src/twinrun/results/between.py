"""The claims between records, judged: ratios of two GPUs, or two stacks, of the same settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from twinrun.foundation.text import plain
from twinrun.manifests.claims import ClaimSide, RecordClaim
from twinrun.manifests.metrics import Metric, named_by
from twinrun.manifests.restatements import Restatement
from twinrun.planning.project import Project
from twinrun.protocol.measurements import Measurement
from twinrun.results.curves import demand_trained
from twinrun.results.evidence import JudgeContext, counted, differences_of, doubt_of, found_of, mismatches
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
from twinrun.workloads.settings import Difference
from twinrun.workloads.workload import PointRecord

# Fewer settings in common, such as models, are no mean; a claim of one setting is none.
LEAST_SETTINGS = 2


class SideMeasurement(NamedTuple):
    """What one record gives to a side."""

    record: Record
    point: PointRecord
    measurement: Measurement


# Values of the records of a side, by the setting that the mean is over, or by the point.
Side = dict[str, SideMeasurement]


def judge_between(records: Sequence[Record], project: Project) -> tuple[Verdict, ...]:
    """Judge the claims between records of the recipe that `records` are of, in the published order."""
    if not records:
        return ()
    published = project.recipe(records[0].plan.recipe).published
    terms = JudgeContext(metrics=project.metrics, gpus=project.gpus, fingerprint=published.fingerprint)
    return tuple(
        judge_claim(
            claim,
            partial(_as_published, claim, records, terms),
            partial(_as_restated, claim, records=records, terms=terms),
        )
        for claim in published.between_records
    )


def _as_published(claim: RecordClaim, records: Sequence[Record], terms: JudgeContext) -> Assessment:
    over, under = (_published_side(claim, side, records, terms) for side in (claim.over, claim.under))
    apart = [_differences(one, terms) for side in (over, under) for one in side.values()]
    if named := sorted({", ".join(mismatches(differences)) for differences in apart} - {""}):
        raise NotAskedError("; ".join(named), outcome="config-mismatch")
    metric = terms.metrics[claim.metric]

    def value(one: SideMeasurement) -> float:
        return counted(one.point, one.measurement, metric, one.record.gpu, per=claim.per)

    ratios = {name: value(over[name]) / value(under[name]) for name in claim.values}
    mean = sum(ratios.values()) / len(ratios)
    stands = margin(mean, claim.value, better=claim.better, tolerance=claim.tolerance)
    reason = f"{_each(claim, ratios)}; published {claim.value:g}, tolerance {claim.tolerance:.0%}"
    return Assessment(mean, stands.holds, reason)


def _differences(one: SideMeasurement, terms: JudgeContext) -> tuple[Difference, ...]:
    return differences_of(one.record, [one.point], terms)


def _published_side(
    claim: RecordClaim, side: ClaimSide, records: Sequence[Record], terms: JudgeContext
) -> Side:
    """Return what the published GPU and stack of a side give; raises NotAskedError where that is no mean."""
    found: dict[str, list[tuple[Record, PointRecord]]] = {}
    for record in records:
        point = record.point(side.point or claim.point)
        of_gpu = record.gpu and record.gpu.id == side.gpu
        if point and of_gpu and side.stack in (None, record.plan.stack):
            found.setdefault(_value_of(claim, record, point), []).append((record, point))
    if absent := [name for name in claim.values if name not in found]:
        raise NotAskedError(f"no record at {side.point or claim.point} of {side}{_for(claim, absent)}")
    found = {name: found[name] for name in claim.values}
    if several := [name for name, those in found.items() if len(those) > 1]:
        raise NotAskedError(f"more than one record of {side}{_for(claim, several)}")
    return {name: _published_one(claim, side, *those[0], terms) for name, those in found.items()}


def _value_of(claim: RecordClaim, record: Record, point: PointRecord) -> str:
    """Return which of the claim's values a record is of."""
    return record.terms(point).settings[claim.setting] if claim.setting else claim.point


def _for(claim: RecordClaim, names: Sequence[str]) -> str:
    """Return the words that say which records of a side are meant; none where a side has one."""
    return f" for {claim.setting} {', '.join(names)}" if claim.setting else ""


def _published_one(
    claim: RecordClaim, side: ClaimSide, record: Record, point: PointRecord, terms: JudgeContext
) -> SideMeasurement:
    """Return the number of a record; raises NotAskedError where it is not one of the published side."""
    name = _value_of(claim, record, point)
    one = found_of(claim, point)
    if one is None or one.count < 2:
        raise NotAskedError(f"{side}: {claim.metric} of {name} is not measured over two steps or more")
    if side.stack and not record.environment.as_locked:
        environment = record.environment
        packages = ", ".join(sorted(environment.lock_differences | environment.changed_files)[:3])
        raise NotAskedError(f"{name} did not run on {side}: other versions of {packages}")
    demand_trained([point], terms.metrics)
    if doubt := doubt_of([(point, one)], terms.metrics, record.gpu, per=claim.per, tolerance=claim.tolerance):
        raise NotAskedError(f"{side}, {name}: {doubt}")
    return SideMeasurement(record, point, one)


def _as_restated(
    claim: RecordClaim, here: Restatement, *, records: Sequence[Record], terms: JudgeContext
) -> RestatementVerdict:
    """Judge the restatement over the settings that both sides have: one of each vendor that was compared."""
    metric, differs = terms.metrics[here.metric], ""
    found: FoundValue | NotAskedError
    try:
        vendors = [terms.gpus[side.gpu].vendor for side in (claim.over, claim.under)]
        over, under = (_restated_side(claim, here, records, vendor, terms) for vendor in vendors)
        common = _common(claim, over, under)
        ratios = {name: _canonical(over[name], metric) / _canonical(under[name], metric) for name in common}
        found = FoundValue(sum(ratios.values()) / len(ratios), _each(claim, ratios))
        differs = "; ".join(_differs(claim, (over, under), common, terms))
    except NotAskedError as refusal:
        found = refusal
    return judge_restated_ratio(here, found, metric, run=differs)


def _common(claim: RecordClaim, over: Side, under: Side) -> list[str]:
    """Return the settings that both sides have; raises NotAskedError for fewer than make a mean."""
    common = [name for name in claim.values if name in over and name in under]
    least = min(LEAST_SETTINGS, len(claim.values))
    if len(common) < least:
        shared = ", ".join(common) or "none"
        raise NotAskedError(f"the sides have {claim.setting} {shared} in common, and {least} make a mean")
    return common


def _restated_side(
    claim: RecordClaim,
    here: Restatement,
    records: Sequence[Record],
    vendor: str,
    terms: JudgeContext,
) -> Side:
    """Return what the GPUs of a vendor give; raises NotAskedError."""
    found: Side = {}
    for record in records:
        point = _restated_point(claim, record)
        if record.gpu is None or record.plan.vendor != vendor or point is None:
            continue
        name = _value_of(claim, record, point)
        if name not in claim.values:
            continue
        if name in found:
            raise NotAskedError(f"more than one record of {vendor}{_for(claim, [name])}")
        found[name] = SideMeasurement(record, point, _restated_one(here, record, point, terms))
    if not found:
        raise NotAskedError(f"no record of a {vendor} GPU at {claim.point}{_for(claim, claim.values)}")
    if len(named := sorted({hardware(one.record) for one in found.values()})) > 1:
        raise NotAskedError(f"the records of {vendor} are of several machines: {', '.join(named)}")
    return found


def _restated_point(claim: RecordClaim, record: Record) -> PointRecord | None:
    """Return the point that has the claim's measurement; a claim that names none is about the largest."""
    if claim.measurement:
        return record.point(claim.point)
    return max(record.points, key=lambda one: one.devices, default=None)


def _restated_one(here: Restatement, record: Record, point: PointRecord, terms: JudgeContext) -> Measurement:
    """Return the number of a record; raises NotAskedError where nothing stands behind it."""
    metric = terms.metrics[here.metric]
    place = f"{record.run} at {point.id}"
    if metric.repeated and record.plan.scale == "smoke":
        raise NotAskedError(f"{place} is a smoke run, and its speed says nothing")
    differences = differences_of(record, [point], terms)
    if held := [one for one in differences if not named_by(here.free, one.field)]:
        fields = "; ".join(f"{one.field} {plain(one.found)}" for one in held)
        raise NotAskedError(f"{place} is not the published configuration: {fields}")
    found = found_of(here, point)
    if found is None:
        raise NotAskedError(f"{place} has no {here.measurement or here.metric}")
    demand_trained([point], terms.metrics)
    pairs = [(point, found)]
    if doubt := doubt_of(pairs, terms.metrics, record.gpu, per=found.per, tolerance=here.tolerance):
        raise NotAskedError(f"{place}: {doubt}")
    return found


def _canonical(one: SideMeasurement, metric: Metric) -> float:
    return metric.canonical(one.measurement.median, one.measurement.unit)


def _each(claim: RecordClaim, ratios: dict[str, float]) -> str:
    each = ", ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items())
    return f"the mean of {each}" if claim.setting else each


def _differs(
    claim: RecordClaim, sides: Sequence[Side], common: Sequence[str], terms: JudgeContext
) -> Iterator[str]:
    """Yield what differs from the published comparison: machines, settings, fields."""
    for side, published in zip(sides, (claim.over, claim.under), strict=True):
        one = side[common[0]].record
        yield f"{hardware(one)} with {one.plan.stack}, published {published}"
    if absent := [name for name in claim.values if name not in common]:
        yield f"without {claim.setting} {', '.join(absent)}"
    apart = {one.field: one for side in sides for name in common for one in _differences(side[name], terms)}
    yield from (f"{one.field} {plain(one.found)}, published {plain(one.published)}" for one in apart.values())
