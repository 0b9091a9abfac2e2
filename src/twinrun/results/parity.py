"""Curves held against each other: those of one record, and those of two records of one site or of two."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from twinrun.foundation.errors import InputError, require_known
from twinrun.foundation.manifest import Frozen
from twinrun.manifests.claims import Claim
from twinrun.manifests.metrics import Metric
from twinrun.results.bounds import untrained
from twinrun.results.judged import Judged, hardware
from twinrun.results.verdicts import NotAskedError
from twinrun.workloads.curve_distance import DRAWN, LEAST_CONTROLS, Parity, origins_apart, parity, values_of
from twinrun.workloads.workload import ControlledCurve, MeasuredPoint

METRIC = "loss"
# Worst first: one curve that differs decides for all.
SEVERITY = ("start", "outside", "other-run", "no-envelope", "no-evidence", "inside")


class CurveParity(Frozen):
    """Two curves, and what became of holding them against each other."""

    a: ControlledCurve
    b: ControlledCurve
    parity: Parity


def held_within(claim: Claim, record: Judged, points: Sequence[MeasuredPoint]) -> tuple[Parity, ...]:
    """Hold the curves of points against that of the first, worst first; raises NotAskedError."""
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
    a: Judged, b: Judged, *, points: Sequence[str] = (), controls: Sequence[Judged] = ()
) -> tuple[CurveParity, ...]:
    """Hold the whole curves of two records against each other, inside the narrowest bound of their recipe.

    Args:
        points: one of A and one of B; all that have one name where empty, else the last of each.
        controls: records with further control runs; those of A and B always count, of whichever point.

    Raises:
        InputError: no such point, a record without curves, or control runs of another configuration.
    """
    found, metric = [], a.project.metrics[METRIC]
    bounds: list[Mapping[Any, float]] = [metric.evidence.bounds]
    bounds += [claim.bounds for claim in a.recipe.published.claim if claim.metric == METRIC]
    for one, other in _pairs(a, b, points):
        first, second = _traced(a, one, "A"), _traced(b, other, "B")
        further = (
            *_repeated(a, first, but=one),
            *_repeated(b, first, but=other),
            *(curve for record in controls for curve in _repeated(record, first, demanded=True)),
        )
        bound = min(one.get(first.arithmetic, math.inf) for one in bounds)
        held = parity(first, second, further=further, bound=bound)
        if held.outcome == "inside" and (doubt := _doubt((a, one), (b, other), metric)):
            held = held.model_copy(update={"outcome": "no-evidence", "reason": doubt})
        found.append(CurveParity(a=first, b=second, parity=held))
    return tuple(found)


def curves_of(record: Judged) -> list[tuple[str, ControlledCurve]]:
    """Return each whole curve of losses of a record, with the name of its point."""
    asked = ((point.id, record.terms(point).curves.get(METRIC)) for point in record.whole or record.points)
    return [(name, one) for name, one in asked if one]


def _doubt(a: tuple[Judged, MeasuredPoint], b: tuple[Judged, MeasuredPoint], metric: Metric) -> str | None:
    """Return why two curves that coincide show nothing of two runs, or None."""
    (first, one), (second, other) = a, b
    same = one.series == other.series and one.measurements == other.measurements
    if one.id == other.id and (first.run == second.run or same):
        return "a run and itself are one curve, whatever it is"
    for record, point in (a, b):
        values, described = values_of(point, metric.id), record.description.points[point.id]
        if doubt := untrained(values, metric, rising=described.rising_steps, place=point.id):
            return doubt
    return None


def _pairs(a: Judged, b: Judged, points: Sequence[str]) -> list[tuple[MeasuredPoint, MeasuredPoint]]:
    if points:
        if len(points) != 2:
            allowed = "one of A, one of B"
            raise InputError("expected two points", place="--points", found=points, allowed=allowed)
        return [(_named(a, points[0]), _named(b, points[1]))]
    whole_a, whole_b = (record.whole or record.points for record in (a, b))
    same = [(one, other) for one in whole_a for other in whole_b if one.id == other.id]
    return same or ([(whole_a[-1], whole_b[-1])] if whole_a and whole_b else [])


def _named(record: Judged, name: str) -> MeasuredPoint:
    require_known(name, [point.id for point in record.points], "no such point", place=record.run)
    return next(point for point in record.points if point.id == name)


def _traced(record: Judged, point: MeasuredPoint, side: str) -> ControlledCurve:
    found = record.terms(point).curves.get(METRIC)
    if found is None:
        raise InputError(f"the record has no {METRIC} by step", place=record.run, found=point.id)
    return found.model_copy(update={"name": f"{side}: {point.id}, {hardware(record)}"})


def _repeated(
    record: Judged, run: ControlledCurve, *, but: MeasuredPoint | None = None, demanded: bool = False
) -> list[ControlledCurve]:
    """Return the curves of `record` with control runs that repeat `run`; it must have some where demanded."""
    found: list[ControlledCurve] = []
    for point in record.points:
        one = record.terms(point).curves.get(METRIC)
        if point is but or one is None or not one.controls:
            continue
        differs = origins_apart(run, one)
        if not differs.keys() - DRAWN:
            found.append(one)
        elif demanded:
            other, message = "; ".join(map(" ".join, differs.items())), "control runs of another experiment"
            raise InputError(message, place=record.run, found=other, allowed=f"that of {run.name}")
    if demanded and not found:
        hint = f"run it with --controls {LEAST_CONTROLS}"
        raise InputError("the record has no control runs", place=record.run, hint=hint)
    return found
