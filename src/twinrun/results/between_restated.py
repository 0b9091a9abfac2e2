"""Claims between records on other GPUs: one side of each vendor that the publication compares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from twinrun.foundation.text import plain
from twinrun.manifests.claims import RecordClaim
from twinrun.manifests.metrics import RATIO, Metric
from twinrun.manifests.restatements import Restatement
from twinrun.planning.project import Project
from twinrun.protocol.measurements import Measurement
from twinrun.results.evidence import doubt_of
from twinrun.results.record import AsRestated, Record, RestatementVerdict, hardware
from twinrun.workloads.workload import PointRecord

# Fewer settings in common, such as models, are no mean.
LEAST_SETTINGS = 2


class _NotAskedError(Exception):
    """Why a restatement cannot be judged on these records."""


class _Found(NamedTuple):
    """What one record gives to a side."""

    record: Record
    point: PointRecord
    measurement: Measurement


def restated_between(
    claim: RecordClaim, here: Restatement, records: Sequence[Record], project: Project
) -> RestatementVerdict:
    """Judge the restatement of a claim between records, over the settings that both sides have."""
    metric = project.metrics[here.metric]
    try:
        vendors = [project.gpus[side.gpu].vendor for side in (claim.over, claim.under)]
        sides = [_side(claim, here, records, vendor, metric) for vendor in vendors]
        common = [name for name in claim.values if all(name in side for side in sides)]
        if len(common) < LEAST_SETTINGS:
            raise _NotAskedError(
                f"the sides have {claim.setting} {', '.join(common) or 'none'} in common,"
                f" and {LEAST_SETTINGS} make a mean"
            )
    except _NotAskedError as obstacle:
        return _restated(here, metric, "not-comparable", f"Not asked, because {obstacle}.")
    ratios = {name: _ratio(sides[0][name], sides[1][name], metric) for name in common}
    mean = sum(ratios.values()) / len(ratios)
    change = mean / here.value - 1
    worse = -change if metric.better == "higher" else change
    each = ", ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items())
    differs = "; ".join(_differs(claim, sides, common))
    reason = (
        f"Here {mean:.3f}, the mean of {each}; published {here.value:g} = {here.derivation}, {here.basis}."
        f" {abs(change):.1%} {'above' if change >= 0 else 'below'}; {metric.better} is better,"
        f" {here.tolerance:.1%} worse is allowed because {here.because}. Run: {differs}."
    )
    return _restated(here, metric, "holds-here" if worse <= here.tolerance else "fails-here", reason, mean)


def _side(
    claim: RecordClaim, here: Restatement, records: Sequence[Record], vendor: str, metric: Metric
) -> dict[str, _Found]:
    """Return what one side gives by the setting that the mean is over; raises _NotAskedError."""
    found: dict[str, _Found] = {}
    for record in records:
        if record.gpu is None or record.plan.vendor != vendor or not record.points:
            continue
        point = max(record.points, key=lambda one: one.devices)
        name = record.workload.settings(record.plan.part, point)[claim.setting]
        if name not in claim.values:
            continue
        if name in found:
            raise _NotAskedError(f"more than one record of {vendor} is of {claim.setting} {name}")
        found[name] = _Found(record, point, _measured(here, record, point, metric))
    if not found:
        values = ", ".join(claim.values)
        raise _NotAskedError(f"no record of a {vendor} GPU is of {claim.setting} {values}")
    if len(named := sorted({hardware(one.record) for one in found.values()})) > 1:
        raise _NotAskedError(f"the records of {vendor} are of several machines: {', '.join(named)}")
    return found


def _measured(here: Restatement, record: Record, point: PointRecord, metric: Metric) -> Measurement:
    """Return the number of a record; raises _NotAskedError where nothing stands behind it."""
    place = f"{record.run} at {point.id}"
    if metric.repeated and record.plan.scale == "smoke":
        raise _NotAskedError(f"{place} is a smoke run, and its speed says nothing")
    if held := [one for one in record.plan.differences if one.field not in here.free]:
        fields = "; ".join(f"{one.field} {plain(one.found)}" for one in held)
        raise _NotAskedError(f"{place} is not the published configuration: {fields}")
    found = next((one for one in point.measurements if one.metric == here.metric), None)
    if found is None:
        raise _NotAskedError(f"{place} has no {here.metric}")
    if doubt := doubt_of([found], metric, record.gpu, per=found.per, tolerance=here.tolerance):
        raise _NotAskedError(f"{place}: {doubt}")
    return found


def _ratio(over: _Found, under: _Found, metric: Metric) -> float:
    a, b = (metric.canonical(one.measurement.median, one.measurement.unit) for one in (over, under))
    return a / b


def _differs(claim: RecordClaim, sides: Sequence[dict[str, _Found]], common: Sequence[str]) -> Iterator[str]:
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


def _restated(
    here: Restatement, metric: Metric, outcome: AsRestated, reason: str, measured: float | None = None
) -> RestatementVerdict:
    weaker = f" Weaker than published: {here.weaker}." if here.weaker else ""
    return RestatementVerdict(
        statement=here.statement,
        outcome=outcome,
        reason=reason + weaker,
        published=here.value,
        measured=measured,
        metric=here.metric,
        title=f"of the other side's {metric.title}",
        unit=RATIO,
    )
