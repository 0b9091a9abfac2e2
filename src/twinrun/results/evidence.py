"""The evidence for a verdict: the numbers that a claim is about, and the rules that they must meet."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from twinrun.foundation.manifest import Frozen
from twinrun.foundation.text import percent, plural
from twinrun.manifests.claims import Claim, RecordClaim
from twinrun.manifests.metrics import Metric, Reach
from twinrun.manifests.published import Accepted, PublishedClaims
from twinrun.manifests.restatements import Restatement
from twinrun.manifests.vendor import Gpu
from twinrun.protocol.measurements import Measurement, Per
from twinrun.results.record import Record
from twinrun.workloads.settings import Difference, differences
from twinrun.workloads.workload import PointRecord

# A measurement and the point that has it.
Located = tuple[PointRecord, Measurement]
DEVICE = "device name"


class JudgeContext(Frozen):
    """What claims are judged by beside the record."""

    metrics: dict[str, Metric]
    gpus: dict[str, Gpu]
    fingerprint: Mapping[str, Accepted]
    configuration: str | None = None
    """Name of the configuration whose fingerprint it is; None for the recipe's own."""

    def about(self, claim: Claim, published: PublishedClaims) -> JudgeContext:
        """Return the context of a claim, which may be about another configuration than the recipe's."""
        if claim.configuration is None:
            return self
        found = published.fingerprint_of(claim)
        return self.model_copy(update={"fingerprint": found, "configuration": claim.configuration})


def found_of(asked: Claim | RecordClaim | Restatement, point: PointRecord) -> Measurement | None:
    """Return the measurement of a point that a claim, or its restatement, is about."""
    if asked.measurement:
        return point.measurement(asked.measurement)
    found = [one for one in point.measurements if one.metric == asked.metric]
    return next((one for one in found if one.formula == asked.formula), found[0] if found else None)


def value_of(claim: Claim, point: PointRecord, found: Measurement, metric: Metric, gpu: Gpu | None) -> float:
    """Return a measurement of a point in the claim's unit, and per what the claim counts."""
    value = counted(point, found, metric, gpu, per=claim.per)
    return value if claim.kind == "ratio" else metric.in_unit(value, claim.unit)


def counted(point: PointRecord, found: Measurement, metric: Metric, gpu: Gpu | None, *, per: Per) -> float:
    """Return a measurement in its metric's unit, summed over the devices of what `per` names."""
    value = metric.canonical(found.median, found.unit)
    if not metric.additive or found.per != "device":
        return value
    cards = gpu.devices_per_card if gpu else 1
    return value * {"card": cards, "node": point.devices / point.nodes, "run": point.devices}.get(per, 1)


def kept_per_doubling(smaller: Located, larger: Located) -> float:
    """Return what a device keeps of its rate from a point to a larger one, for a doubling of the devices."""
    (few, under), (many, over) = smaller, larger
    return float((over.median / under.median) ** (1 / math.log2(many.devices / few.devices)))


def doubt_of(
    found: Sequence[Located], metrics: Mapping[str, Metric], gpu: Gpu | None, *, per: Per, tolerance: float
) -> str | None:
    """Return why measured numbers cannot carry a verdict, or None."""
    for point, one in found:
        metric = metrics[one.metric]
        sums = ("card", "node", "run") if metric.additive else ("card",)
        if one.per != per and not (one.per == "device" and per in sums):
            return f"{one.id} is measured per {one.per}, the claim is per {per}"
        if not math.isfinite(one.median) or one.median < 0 or (metric.repeated and not one.median):
            return f"{one.id} is {one.median:g}, no number to judge"
        if metric.repeated and one.count < 2:
            return f"{one.id} rests on a single sample"
        if metric.repeated and one.spread > tolerance:
            return f"the samples of {one.id} spread by ±{percent(one.spread)}, more than the tolerance"
        if over := _impossible(point, one, metrics, gpu):
            return over
    return None


def few_steps(found: Sequence[Located], metrics: Mapping[str, Metric], gpu: Gpu | None) -> str:
    """Return the words that belong beside a number of too few timed steps; empty where there are enough."""
    least = [(one.count, metrics[one.metric].evidence.steps) for _, one in found]
    short = [pair for pair in least if pair[0] < pair[1]]
    return f"few steps: {min(short)[0]} of {min(short)[1]}" if gpu and short else ""


def standard_error(found: Sequence[Located]) -> str:
    """Return the words that belong beside a score, its error; empty for what is none."""
    errors = [error for point, one in found if (error := point.measurement(f"{one.id}/error"))]
    return f"standard error {max(error.median for error in errors):.3f}" if errors else ""


def _impossible(
    point: PointRecord, found: Measurement, metrics: Mapping[str, Metric], gpu: Gpu | None
) -> str | None:
    """Return that a number, or one of the same call that goes with it, is more than possible, or None."""
    call = [found.labels.get(name) for name in ("call", "implementation")]
    for one in (found, *point.measurements):
        if [one.labels.get(name) for name in ("call", "implementation")] == call and one.metric in metrics:
            metric = metrics[one.metric]
            over = beyond(metric.canonical(one.median, one.unit), metric, gpu, per=one.per)
            if over:
                return f"{one.id} is {over}"
    return None


def beyond(value: float, metric: Metric, gpu: Gpu | None, *, per: Per) -> str | None:
    """Return that a value in its metric's unit is more than its evidence allows, or None."""
    most, cards = metric.evidence.most, gpu.devices_per_card if gpu and per == "card" else 1
    if most == "peak":
        most = cards * gpu.device_peak_flops / 1e12 if gpu else None
    elif most == "bandwidth":
        most = cards * gpu.device_bandwidth_bytes_s / 1e9 if gpu else None
    if most is None or value <= most * (1 + metric.evidence.error):
        return None
    what = "the device can do" if isinstance(metric.evidence.most, str) else "there can be"
    return f"{value:.4g} {metric.unit}, more than the {most:.4g} that {what}"


def unspanned(points: Sequence[PointRecord], reach: Reach) -> str | None:
    """Return what a run lacks of the sizes and kinds of hardware that a statement speaks of, or None."""
    sizes = sorted({point.devices for point in points}) or [0]
    kinds = sorted({str(point.facts[DEVICE]) for point in points if point.facts.get(DEVICE)})
    shown = " and ".join(plural(size, "device") for size in sizes)
    if sizes[-1] < reach.devices:
        return f"needs a point of {plural(reach.devices, 'device')}, this run has {shown}"
    if len(sizes) < reach.world_sizes:
        return f"needs {reach.world_sizes} world sizes, this run has {shown} alone"
    if len(kinds) < reach.hardware_kinds:
        return f"needs {reach.hardware_kinds} kinds of hardware, this run has {' and '.join(kinds) or 'one'}"
    return None


def differences_of(
    record: Record, points: Sequence[PointRecord], terms: JudgeContext
) -> tuple[Difference, ...]:
    """Return where the run, or the points that a claim is about, are not the published configuration."""
    described = record.description.points
    of_points = [described[point.id].differences(terms.fingerprint) for point in points]
    if terms.configuration is not None and (not points or None in of_points):
        return differences(record.description.marks(terms.fingerprint), terms.fingerprint)
    if None in of_points:
        return record.plan.differences
    return next((found for found in of_points if found), ())


def mismatches(differences: Sequence[Difference]) -> list[str]:
    """Return in words where a run is not the published configuration."""
    return [f"{one.field} is {one.found}, published {one.published}" for one in differences]


def names_of(points: Sequence[PointRecord]) -> str:
    return ", ".join(point.id for point in points)
