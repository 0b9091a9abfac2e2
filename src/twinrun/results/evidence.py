"""The evidence for a verdict: the numbers that a claim is about, and the rules that they must meet."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from twinrun.foundation.manifest import Frozen
from twinrun.foundation.text import plural
from twinrun.manifests.claims import Claim, RecordClaim
from twinrun.manifests.metrics import Metric, Reach
from twinrun.manifests.recipe import LoadedRecipe
from twinrun.manifests.restatements import Restatement
from twinrun.manifests.vendor import Gpu
from twinrun.protocol.measurements import Measurement, Per
from twinrun.results.interval import Interval, interval_of, quotient
from twinrun.workloads.workload import PointRecord

# A measurement and the point that has it.
Located = tuple[PointRecord, Measurement]
DEVICE = "device name"


class JudgeContext(Frozen):
    """What claims are judged by beside the record."""

    metrics: dict[str, Metric]
    gpus: dict[str, Gpu]
    recipe: LoadedRecipe
    """With the published numbers."""


def found_of(
    asked: Claim | RecordClaim | Restatement, point: PointRecord, formula: str | None = None
) -> Measurement | None:
    """Return the measurement of a point that a claim, or its restatement, is about.

    Args:
        formula: that of the claim, where a restatement names none.
    """
    found = [one for one in point.measurements if one.metric == asked.metric]
    if asked.measurement:
        return next((one for one in found if one.id == asked.measurement), None)
    wanted = asked.formula or formula
    return next((one for one in found if one.formula == wanted), found[0] if found else None)


def counted(point: PointRecord, found: Measurement, metric: Metric, gpu: Gpu | None, *, per: Per) -> Interval:
    """Return a measurement in its metric's unit, summed over the devices of what `per` names."""
    found_one = interval_of(found).times(metric.canonical(1.0, found.unit))
    if not metric.additive or found.per != "device":
        return found_one
    cards = gpu.devices_per_card if gpu else 1
    sums = {"card": cards, "node": point.devices / point.nodes, "run": point.devices}
    return found_one.times(sums.get(per, 1))


def kept_per_doubling(smaller: Located, larger: Located) -> Interval:
    """Return what a device keeps of its rate from a point to a larger one, for a doubling of the devices."""
    (few, under), (many, over) = smaller, larger
    power = 1 / math.log2(many.devices / few.devices)
    return quotient(interval_of(over), interval_of(under), power=power)


def doubt_of(
    found: Sequence[Located], metrics: Mapping[str, Metric], *, per: Per | None = None
) -> str | None:
    """Return why measured numbers are none that a claim could be about, or None.

    Args:
        per: what the claim counts; None where it takes the numbers as they are measured.
    """
    for _, one in found:
        metric = metrics[one.metric]
        sums = ("card", "node", "run") if metric.additive else ("card",)
        if per and one.per != per and not (one.per == "device" and per in sums):
            return f"{one.id} is measured per {one.per}, the claim is per {per}"
        if not math.isfinite(one.median) or one.median < 0 or (metric.repeated and not one.median):
            return f"{one.id} is {one.median:g}, no number to judge"
    return None


def few_steps(found: Sequence[Located], metrics: Mapping[str, Metric]) -> str:
    """Return the words that belong beside a number of too few timed steps; empty where there are enough."""
    least = [(one.count, metrics[one.metric].evidence.steps) for _, one in found]
    short = [pair for pair in least if pair[0] < pair[1]]
    return f"few steps: {min(short)[0]} of {min(short)[1]}" if short else ""


def standard_error(found: Sequence[Located]) -> str:
    """Return the words that belong beside a score, its error; empty for what is none."""
    errors = [error for point, one in found if (error := point.measurement(f"{one.id}/error"))]
    return f"standard error {max(error.median for error in errors):.3f}" if errors else ""


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


def names_of(points: Sequence[PointRecord]) -> str:
    return ", ".join(point.id for point in points)
