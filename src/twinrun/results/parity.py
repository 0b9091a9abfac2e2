"""Curves held against each other: those of one record, and those of two records of one site or of two."""

from __future__ import annotations

import math
from collections.abc import Sequence

from twinrun.foundation.errors import InputError
from twinrun.foundation.manifest import Frozen
from twinrun.manifests.claims import Claim
from twinrun.results.record import Record, hardware
from twinrun.results.verdicts import NotAskedError
from twinrun.workloads.curve_distance import LEAST_CONTROLS, ORDER, WEIGHTS, Parity, origins_apart, parity
from twinrun.workloads.workload import ControlledCurve, PointRecord

METRIC = "loss"
# Worst first: one curve that differs decides for all.
SEVERITY = ("start", "outside", "other-run", "no-envelope", "inside")


class CurveParity(Frozen):
    """Two curves, and what became of holding them against each other."""

    a: ControlledCurve
    b: ControlledCurve
    parity: Parity


def curves_of(claim: Claim, record: Record) -> tuple[PointRecord, ...]:
    """Return the points whose curves a claim holds against each other."""
    if claim.between is None:
        return record.whole
    return tuple(point for name in claim.between if (point := record.point(name)))


def held_within(claim: Claim, record: Record) -> tuple[Parity, ...]:
    """Hold the curves of a claim against the first of them, worst first; raises NotAskedError."""
    points = curves_of(claim, record)
    if len(points) < 2:
        names = ", ".join(point.id for point in points) or "none"
        raise NotAskedError(
            f"needs two whole curves, this run has {names}; `invoke compare --parity A B` holds two records"
        )
    asked = (record.terms(point).curves.get(claim.metric) for point in points)
    traced = [one for one in asked if one]
    if len(traced) < len(points):
        raise NotAskedError(f"a point has no {claim.metric}")
    first, *others = traced
    if (bound := claim.bounds.get(first.arithmetic)) is None:
        raise NotAskedError(f"the claim has no bound in {first.arithmetic}")
    found = (parity(first, other, bound=bound) for other in others)
    return tuple(sorted(found, key=lambda one: SEVERITY.index(one.outcome)))


def held_between(
    a: Record,
    b: Record,
    *,
    points: Sequence[str] = (),
    controls: Record | None = None,
    claims: Sequence[Claim] = (),
) -> tuple[CurveParity, ...]:
    """Hold the whole curves of two records against each other.

    Args:
        points: one of A and one of B; all that have one name where empty, else the last of each.
        controls: a record with further control runs; those of A and B always count, of whichever point.
        claims: those of the recipe, whose narrowest bound holds here too.

    Raises:
        InputError: no such point, a record without curves, or control runs of another configuration.
    """
    found = []
    for one, other in _pairs(a, b, points):
        first, second = _traced(a, one, "A"), _traced(b, other, "B")
        further = (
            *_repeated(a, first, but=one)[0],
            *_repeated(b, first, but=other)[0],
            *(_controls(controls, first) if controls else ()),
        )
        bounds = [claim.bounds.get(first.arithmetic, math.inf) for claim in claims if claim.metric == METRIC]
        held = parity(first, second, further=further, bound=min(bounds, default=math.inf))
        found.append(CurveParity(a=first, b=second, parity=held))
    return tuple(found)


def _pairs(a: Record, b: Record, points: Sequence[str]) -> list[tuple[PointRecord, PointRecord]]:
    if points:
        if len(points) != 2:
            raise InputError(
                "expected two points", place="--points", found=points, allowed="one of A, one of B"
            )
        return [(_named(a, points[0]), _named(b, points[1]))]
    whole_a, whole_b = (record.whole or record.points for record in (a, b))
    same = [(one, other) for one in whole_a for other in whole_b if one.id == other.id]
    if same or not (whole_a and whole_b):
        return same
    return [(whole_a[-1], whole_b[-1])]


def _named(record: Record, name: str) -> PointRecord:
    point = record.point(name)
    if point is None:
        known = [point.id for point in record.points]
        raise InputError("no such point", place=record.run, found=name, allowed=known)
    return point


def _traced(record: Record, point: PointRecord, side: str) -> ControlledCurve:
    found = record.terms(point).curves.get(METRIC)
    if found is None:
        raise InputError(f"the record has no {METRIC} by step", place=record.run, found=point.id)
    return found.model_copy(update={"name": f"{side}: {point.id}, {hardware(record)}"})


def _controls(record: Record, run: ControlledCurve) -> tuple[ControlledCurve, ...]:
    """Return the curves of `record` that have control runs, which must be of the same experiment as `run`."""
    found, others = _repeated(record, run)
    if others:
        raise InputError(
            "control runs of another experiment",
            place=record.run,
            found=others[0],
            allowed=f"that of {run.name}",
        )
    if not found:
        raise InputError(
            "the record has no control runs",
            place=record.run,
            hint=f"run it with --set controls={LEAST_CONTROLS}",
        )
    return found


def _repeated(
    record: Record, run: ControlledCurve, *, but: PointRecord | None = None
) -> tuple[tuple[ControlledCurve, ...], tuple[str, ...]]:
    """Return the curves of `record` with control runs that repeat `run`, and how others differ from it."""
    points = [point for point in record.points if point is not but]
    every = (record.terms(point).curves.get(METRIC) for point in points)
    found: list[ControlledCurve] = []
    others: list[str] = []
    for one in every:
        if one is None or not one.controls:
            continue
        differs = origins_apart(run, one)
        if differs.keys() - {WEIGHTS, ORDER}:
            others.append("; ".join(f"{name} {sides}" for name, sides in differs.items()))
        else:
            found.append(one)
    return tuple(found), tuple(others)
