"""Where a run is not the published one: GPU, number of cards and nodes, scale, fields of the fingerprint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from twinrun.foundation.text import plain, plural
from twinrun.manifests.claims import Claim, PublishedHardware
from twinrun.manifests.metrics import Metric
from twinrun.manifests.published import PublishedClaims
from twinrun.manifests.vendor import Gpu
from twinrun.results.evidence import JudgeContext, Located, differences_of, mismatches, value_of
from twinrun.results.record import Record
from twinrun.results.verdicts import NotAskedError
from twinrun.workloads.workload import PointRecord


def points_of(claim: Claim, record: Record) -> tuple[PointRecord, ...]:
    """Return those points of the run that a claim names, all where it names none."""
    named = claim.between or ((claim.point,) if claim.point else ())
    return tuple(point for point in record.points if not named or point.id in named)


def elsewhere(claim: Claim, record: Record, published: PublishedClaims, terms: JudgeContext) -> Iterator[str]:
    """Yield in what a run is not the published one; a claim without hardware has that of all claims."""
    hardware = [one.hardware for one in (claim,) if one.hardware] or [
        one.hardware for one in published.claim if one.hardware
    ]
    if claim.kind == "score":
        # A score belongs to weights, whatever computes it.
        hardware = []
    gpus = {one.gpu for one in hardware}
    if gpus and (record.gpu is None or record.gpu.id not in gpus):
        names = " or ".join(sorted(terms.gpus[name].name for name in gpus))
        yield f"GPU {record.gpu.name if record.gpu else 'none'}, published {names}"
    elif other := miscounted(hardware, points_of(claim, record), terms):
        yield other
    if record.plan.scale == "smoke":
        yield "smoke scale"
    for one in differences_of(record, (), terms) if claim.kind == "score" else ():
        yield f"{one.field} {plain(one.found)}, published {plain(one.published)}"


def demand_hosts(points: Sequence[PointRecord]) -> None:
    """Raise NotAskedError where the ranks of a point reported fewer hosts than it has nodes."""
    for point in points:
        if point.hosts and len(set(point.hosts)) < point.nodes:
            found = plural(len(set(point.hosts)), "host")
            raise NotAskedError(f"{point.id} is {plural(point.nodes, 'node')} and ran on {found}")


def demand_hardware(
    claim: Claim,
    record: Record,
    terms: JudgeContext,
    found: Located | None,
    *,
    also: str = "",
    measured: float | None = None,
) -> None:
    """Raise NotAskedError where the run is not on the published hardware, with what it gives here."""
    published_gpu = claim.hardware and terms.gpus[claim.hardware.gpu]
    if published_gpu and (record.gpu is None or record.gpu.id != published_gpu.id):
        why = _other_hardware(claim, record, published_gpu, found, terms.metrics[claim.metric])
        raise NotAskedError(why + also, measured=measured)
    if claim.hardware and found and (other := miscounted([claim.hardware], [found[0]], terms)):
        raise NotAskedError(other + also, measured=measured)


def demand_published(
    record: Record, points: Sequence[PointRecord], terms: JudgeContext, value: float
) -> None:
    """Raise NotAskedError where the points are not of the published configuration."""
    if apart := differences_of(record, points, terms):
        reason = f"not the published configuration: {'; '.join(mismatches(apart))}"
        raise NotAskedError(reason, outcome="config-mismatch", measured=value)


def miscounted(
    hardware: Sequence[PublishedHardware], points: Sequence[PointRecord], terms: JudgeContext
) -> str | None:
    """Return how points are not on the published devices and nodes, whatever they are called, or None."""
    counts = {
        (one.devices or one.cards * terms.gpus[one.gpu].devices_per_card, one.nodes) for one in hardware
    }
    per_node = {devices / nodes for devices, nodes in counts}
    found = dict.fromkeys((point.devices, point.nodes) for point in points)
    lacking = {nodes for _, nodes in counts} - {nodes for _, nodes in found}
    as_published = not lacking and all(devices / nodes in per_node for devices, nodes in found)
    if as_published or not counts or not found:
        return None
    return f"{_counted(found)}, published {_counted(sorted(counts))}"


def _counted(counts: Iterable[tuple[int, int]]) -> str:
    return " and ".join(
        f"{plural(devices, 'device')} on {plural(nodes, 'node')}" for devices, nodes in counts
    )


def _other_hardware(
    claim: Claim, record: Record, published_gpu: Gpu, measured: Located | None, metric: Metric
) -> str:
    here = record.gpu.name if record.gpu else f"{record.machine.vendor}, no GPU in images/gpus.toml"
    reason = f"published on {published_gpu.name}, this run is on {here}"
    if metric.evidence.most == "peak":
        peak = published_gpu.peak_bf16_tflops / (1 if claim.per == "card" else published_gpu.devices_per_card)
        shares = [
            f"{share.median:.1%} at {point.id}"
            for point in record.points
            if (share := point.measurement(f"{claim.metric}-share"))
        ]
        return (
            f"{reason}; MFU {metric.canonical(claim.value, claim.unit) / peak:.1%} published,"
            f" {', '.join(shares) or 'unknown'} here ({claim.formula}, dense bf16 peaks)"
        )
    if measured is None:
        return reason
    return f"{reason}; {value_of(claim, *measured, metric, record.gpu):.3g} {claim.unit} here"
