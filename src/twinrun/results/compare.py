"""Two records side by side: what differs, what each difference is likely to do, how far each number moved."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from fnmatch import fnmatchcase

from twinrun.foundation.errors import InputError
from twinrun.foundation.manifest import Frozen
from twinrun.foundation.text import plain
from twinrun.manifests.metrics import Metric
from twinrun.protocol.measurements import Measurement, Per
from twinrun.results.judged import Judged, gpus_of
from twinrun.workloads.settings import Factor, Fingerprint, Grade
from twinrun.workloads.workload import MeasuredPoint

# A sentence names no more reasons than this; the table has all.
MAX_REASONS = 3
# Metrics in which one run is faster than another.
SPEED = {"step-time", "tokens-per-second", "model-flops", "time"}
ABSENT = "absent"
# In the order of likely effect on speed; those of the workload stand between.
HARDWARE = (
    Factor("GPU model", "large", "small", "peak arithmetic and memory bandwidth; sums in another order"),
    Factor("processor", "large", "small", "without a GPU the processor does the arithmetic"),
    Factor("devices", "large", "small", "less work for each device, more communication"),
    Factor("nodes", "large", "small", "communication leaves the node"),
    Factor("recipe version", "some", "large", "a version is raised by every change that may move a number"),
)
SOFTWARE = (
    Factor("library torch", "some", "small", "kernels, compiler and their choice"),
    Factor("library triton", "some", "small", "code of the compiled kernels"),
    Factor("stack", "some", "small", "toolkit, framework and compiler together"),
    Factor("image", "some", "small", "other packages, or other kernels, than the lock says"),
    Factor("library collectives", "some", "none", "algorithms and protocols of the collectives"),
    Factor("library *", "small", "small", "another version"),
    Factor("driver", "some", "none", "clocks, power limits and launch overhead"),
    Factor("lock*", "small", "small", "other versions of packages"),
    Factor("installed *", "small", "small", "a package that is not the locked one"),
    Factor("engine", "small", "none", "a container may limit shared memory, devices or cores"),
    Factor("launcher", "small", "none", "placement of ranks"),
    Factor("scheduler", "small", "none", "who else uses the nodes"),
    Factor("variable *", "small", "small", "steers the framework, its kernels or the collectives"),
    Factor("python", "small", "none", "overhead on the host; it also is the text of the built-in corpus"),
    Factor("processors*", "small", "none", "feeds the devices"),
    Factor("*commit*", "small", "small", "the project's own code"),
    Factor("*", "none", "none", "not known to matter"),
)


class SettingChange(Frozen):
    """Something in which two records differ."""

    name: str
    a: str
    b: str
    speed: Grade
    numerics: Grade
    because: str


class Gain(Frozen):
    """How many times as good B is as A, in the metric's direction."""

    times: float
    low: float
    high: float
    """What the extremes of the samples allow."""


class MeasurementPair(Frozen):
    """One measurement in both records."""

    point_a: str
    point_b: str
    measurement: str
    metric: str
    unit: str
    per: Per
    formula: str | None
    a: float
    b: float
    """Medians."""
    gain: Gain | None
    """None where nothing is so many times as good: a loss, and runs of two experiments."""
    difference: float | None
    """B less A, for the metric of a curve."""
    obstacles: tuple[str, ...]
    """Fields of the fingerprint that the metric depends on and in which the runs differ, with both sides."""
    within_spread: bool
    """Whether the samples of both have values in common."""


class Comparison(Frozen):
    """Two records of one recipe."""

    recipe: str
    run_a: str
    run_b: str
    sha256_a: str
    sha256_b: str
    summary: str
    pairing: str
    """Which points are compared, and why these."""
    pairs: tuple[MeasurementPair, ...]
    differences: tuple[SettingChange, ...]
    """Largest likely effect on speed first."""


def compare(a: Judged, b: Judged) -> Comparison:
    """Put two records of one recipe side by side.

    Raises:
        InputError: another recipe, another formula, other units, or nothing that both have measured.
    """
    _demand_equal("the records are of different recipes", a.plan.recipe, b.plan.recipe)
    same = ((one, other) for one in a.points if (other := b.point(one.id)))
    points, pairing = sorted(same, key=lambda pair: pair[0].devices), "those of the same name"
    if not points and a.points and b.points:
        one, other = (max(record.points, key=lambda point: point.devices) for record in (a, b))
        points = [(one, other)]
        pairing = f"none has the same name, so the largest of each: {one.id} of A, {other.id} of B"
    pairs = tuple(pair for one, other in points for pair in _pairs(a, b, one, other))
    if not pairs:
        sides = " and ".join(", ".join(one.id for one in side.points) for side in (a, b))
        message, hint = "nothing was measured in both records", "a run at scale smoke does not time"
        raise InputError(message, place=a.run, found=f"points {sides}", hint=hint)
    found = changed(conditions(a, points[-1][0]), conditions(b, points[-1][1]), a.workload.factors)
    return Comparison(
        recipe=a.plan.recipe,
        run_a=a.run,
        run_b=b.run,
        sha256_a=a.record.sha256,
        sha256_b=b.record.sha256,
        summary=_summary(a, pairs, found),
        pairing=pairing,
        pairs=pairs,
        differences=found,
    )


def _demand_equal(message: str, a: object, b: object) -> None:
    if a != b:
        raise InputError(message, found=f"{a} and {b}", allowed="the same in both records")


def _pairs(a: Judged, b: Judged, one: MeasuredPoint, other: MeasuredPoint) -> list[MeasurementPair]:
    """Return what two points have both measured; raises InputError where that is of two kinds."""
    found, marks = [], (marks_of(a, one), marks_of(b, other))
    for mine in one.measurements:
        if mine.metric == "peak-rate" or (theirs := other.measurement(mine.id)) is None:
            continue
        kinds = [f"{it.metric} in {it.unit} per {it.per}, {it.formula}" for it in (mine, theirs)]
        _demand_equal("measurements are in different units, or by different formulas", *kinds)
        metric = a.project.metrics[mine.metric]
        obstacles = fields_apart(metric, *marks)
        gain = None if obstacles or metric.series else _gain(mine, theirs, metric)
        pair = MeasurementPair(
            point_a=one.id,
            point_b=other.id,
            measurement=mine.id,
            **mine.model_dump(include={"metric", "unit", "per", "formula"}),
            a=mine.median,
            b=theirs.median,
            gain=gain,
            difference=None if obstacles or gain else theirs.median - mine.median,
            obstacles=obstacles,
            within_spread=mine.overlaps(theirs),
        )
        found.append(pair)
    return found


def _gain(mine: Measurement, theirs: Measurement, metric: Metric) -> Gain | None:
    """Return how many times as good B is; None where it is a multiple of nothing, as of a score of 0."""
    good, base = (theirs, mine) if metric.better == "higher" else (mine, theirs)
    high = _over(good.high, base.low)
    times, low = _over(good.median, base.median), _over(good.low, base.high)
    return None if math.isinf(high) else Gain(times=times, low=low, high=high)


def _over(good: float, base: float) -> float:
    return good / base if base else math.inf if good else 1.0


def _summary(record: Judged, pairs: Sequence[MeasurementPair], found: Sequence[SettingChange]) -> str:
    """Say which is faster and by how much, and most likely why; of two experiments, what may be compared."""
    refused = [pair for pair in pairs if pair.obstacles]
    compared = {pair.metric for pair in pairs if pair.gain}
    if not refused:
        return _faster(record, pairs, found)
    titles = ", ".join(dict.fromkeys(record.project.metrics[pair.metric].title for pair in refused))
    why = max((pair.obstacles for pair in refused), key=len)
    more = f" and {len(why) - MAX_REASONS} more" if len(why) > MAX_REASONS else ""
    note = f"Not compared, because the runs differ in {'; '.join(why[:MAX_REASONS])}{more}: {titles}"
    if not compared:
        return f"Two experiments. {note}"
    if compared.isdisjoint(SPEED) and any(pair.metric in SPEED for pair in refused):
        return f"Two experiments. {note}. {_faster(record, pairs, found, better='better')}"
    return f"{_faster(record, pairs, found)}. {note}"


def _faster(
    record: Judged, pairs: Sequence[MeasurementPair], found: Sequence[SettingChange], *, better: str = ""
) -> str:
    """Say which side is better in the metric that stands for the comparison, and most likely why."""
    metrics, measured = record.project.metrics, {pair.metric for pair in pairs if pair.gain}
    preferred = [*(name for name in record.workload.headline if name != "speedup"), *sorted(measured)]
    headline = next((name for name in preferred if name in measured), None)
    if headline is None:
        return "Neither is faster: what both measured has no ratio"
    of_metric = [pair for pair in pairs if pair.metric == headline]
    # The call of a baseline is somebody else's: it does not count beside ours.
    chosen = [pair for pair in of_metric if "@" not in pair.measurement] or of_metric
    # Times are repeated; scores and losses are not.
    better = better or ("faster" if metrics[headline].repeated else "better")
    gains = [pair.gain for pair in chosen if pair.gain]
    apart = [pair for pair in chosen if not pair.within_spread]
    times = [gain.times for gain in gains]
    middle = statistics.geometric_mean(times) if min(times) > 0 else min(times)
    ends = middle, min(gain.low for gain in gains), max(gain.high for gain in gains)
    sides, first = "BA", chosen[0]
    if apart and middle < 1:
        sides, ends = "AB", (_over(1, middle), _over(1, ends[2]), _over(1, ends[1]))
    where = first.point_a if first.point_a == first.point_b else f"{first.point_b} against {first.point_a}"
    where = f"{len(chosen)} measurements" if len(chosen) > 1 else where
    shown = f"{ends[0]:.2f} times ({ends[1]:.2f} to {ends[2]:.2f}) {sides[1]}"
    shown += f" in {metrics[headline].title} at {where}"
    if not apart:
        return f"Neither is {better}: B is {shown}, within the spread of the samples"
    many = f", {len(apart)} of which differ by more than their spread" if len(chosen) > 1 else ""
    return f"{sides[0]} is {better}: {shown}{many}; {_cause(found)}"


def _cause(found: Sequence[SettingChange]) -> str:
    """Return what has the highest grade of a likely effect on speed."""
    for grade in ("large", "some", "small"):
        if likely := [f"{one.name} {one.a} -> {one.b}" for one in found if one.speed == grade]:
            because = "only small things differ" if grade == "small" else "most likely because"
            return f"{because}: {'; '.join(likely[:MAX_REASONS])}"
    return "nothing recorded explains it"


def conditions(record: Judged, point: MeasuredPoint) -> dict[str, str]:
    """Return by name what may change the numbers of `point`."""
    plan, node, environment = record.plan, record.node, record.environment
    common = {
        "GPU model": gpus_of(record) if record.devices else None,
        "processor": None if record.devices else node.cpu,
        "devices": point.devices,
        "nodes": point.nodes,
        "recipe version": plan.recipe_version,
        "image": environment.image_digest,
        "lock": plan.lock_sha256,
        **plan.model_dump(include={"stack", "engine", "launcher", "scheduler"}),
        **node.model_dump(include={"driver", "kernel"}),
        "python": record.record.libraries.get("python"),
        "processors": node.cores,
        "host": record.record.allocation.nodes[0],
        "commit": record.record.revision.commit,
        "uncommitted changes": record.record.revision.changes_sha256,
    }
    groups = {
        "library ": {name: value for name, value in record.record.libraries.items() if name != "python"},
        "installed ": environment.lock_differences,
        "changed file ": environment.changed_files,
        "variable ": environment.variables,
    }
    found = {name: str(value) for name, value in common.items() if value is not None}
    found |= record.terms(point).settings
    return found | {prefix + name: value for prefix, group in groups.items() for name, value in group.items()}


def changed(a: dict[str, str], b: dict[str, str], factors: tuple[Factor, ...]) -> tuple[SettingChange, ...]:
    """List the names that are not the same in both, largest likely effect first.

    Args:
        factors: those of the workload.
    """
    every = (*HARDWARE, *factors, *SOFTWARE)

    def rank(name: str) -> int:
        return next(place for place, one in enumerate(every) if fnmatchcase(name, one.pattern))

    names = sorted((name for name in dict.fromkeys([*a, *b]) if a.get(name) != b.get(name)), key=rank)
    found = []
    for name in names:
        _, speed, numerics, because = every[rank(name)]
        sides = {"a": a.get(name, ABSENT), "b": b.get(name, ABSENT)}
        found.append(SettingChange(name=name, speed=speed, numerics=numerics, because=because, **sides))
    return tuple(found)


def marks_of(record: Judged, point: MeasuredPoint) -> Fingerprint:
    """Return the fingerprint of a point: its own where each point is a case, else that of the run."""
    case = record.description.points[point.id].case
    return dict(record.description.fingerprint or {} if case is None else case)


def fields_apart(metric: Metric, a: Fingerprint, b: Fingerprint) -> tuple[str, ...]:
    """Return the fields that a metric depends on and in which two fingerprints differ, with both sides."""
    fields = [field for field in dict.fromkeys((*a, *b)) if metric.decides(field)]
    sides = ((field, a.get(field, ABSENT), b.get(field, ABSENT)) for field in fields)
    return tuple(f"{field} {plain(one)} and {plain(other)}" for field, one, other in sides if one != other)
