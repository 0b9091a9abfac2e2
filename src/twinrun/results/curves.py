"""The curves of a record that a parity claim is about, held against each other."""

from __future__ import annotations

from twinrun.manifests.claims import Claim
from twinrun.results.record import Record
from twinrun.workloads.parity import Parity, parity

# Worst first: one curve that differs decides for all.
SEVERITY = ("start", "outside", "other-run", "no-envelope", "inside")


def held(claim: Claim, record: Record) -> tuple[Parity, ...] | str:
    """Hold the curves of a claim against the first of them, worst first; or say why that cannot be."""
    points = record.workload.whole(record.points)
    if claim.between:
        points = tuple(point for name in claim.between if (point := record.point(name)))
    if len(points) < 2:
        names = ", ".join(point.id for point in points) or "none"
        return (
            f"needs two whole curves, this run has {names}; `invoke compare --parity A B` holds two records"
        )
    asked = (record.workload.traced(record.plan.part, point, claim.metric) for point in points)
    traced = [one for one in asked if one]
    if len(traced) < len(points):
        return f"a point has no {claim.metric}"
    first, *others = traced
    found = (parity(first, other, widest=claim.tolerance) for other in others)
    return tuple(sorted(found, key=lambda one: SEVERITY.index(one.outcome)))
