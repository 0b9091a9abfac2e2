"""Series of a recipe's figures over the stacks that they were measured with, and where they changed."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from scipy import stats

from twinrun.foundation.errors import InputError
from twinrun.foundation.files import canonical_json, sha256_of_bytes
from twinrun.foundation.manifest import Frozen
from twinrun.history.path import side_of_record, versions
from twinrun.planning.project import Project
from twinrun.protocol.measurements import Measurement
from twinrun.report.words import standing_for
from twinrun.results.compare import changed, conditions, marks_of
from twinrun.results.judged import Judged, hardware
from twinrun.results.reading import read_record
from twinrun.workloads.workload import MeasuredPoint

# A sentence names no more than this; the JSON has all.
NAMED = 5
# Newest stacks that are looked at together: a small change of several shows in their mean.
NEWEST = 4
# Probability that chance marks a stack; the relative spread between stacks that is expected, and the
# number of stacks that this expectation weighs as much as.
RARE, BETWEEN, EXPECTED = 1e-3, 0.005, 6
# Stacks that say what their spread is where none was run twice.
LEAST = 4


class StackPoint(Frozen):
    """All runs of one stack digest."""

    digest: str
    """Versions of the lock, and those that were installed otherwise."""
    stack: str
    first: str
    """When its first run was recorded, UTC."""
    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Return the mean of the runs."""
        return statistics.fmean(self.values)


class SeriesChange(Frozen):
    """A change of more than the noise, and what differs between its two sides."""

    place: int
    """The first point after it, counted from 0."""
    effect: float
    """Relative to the point before."""
    how: str
    """What it was told from noise by."""
    differs: tuple[str, ...]
    """Largest likely effect first."""

    @property
    def effect_in_words(self) -> str:
        """Return the change in one line."""
        named = "; ".join(self.differs[:NAMED]) or "nothing that a record knows"
        more = f"; and {len(self.differs) - NAMED} more" if len(self.differs) > NAMED else ""
        return f"{self.effect:+.1%} ({self.how}): {named}{more}"


class StackSeries(Frozen):
    """One figure over stacks, in the order of their first runs."""

    name: str
    """What ran, its point, measurement and hardware."""
    metric: str
    unit: str
    points: tuple[StackPoint, ...]
    noise: float | None
    """Relative standard deviation of a run among runs of one stack; null without repeats."""
    changes: tuple[SeriesChange, ...]

    @property
    def noise_in_words(self) -> str:
        """Return the noise in one line."""
        if self.noise is None:
            return "noise: not known, no stack was run twice"
        return f"noise: {self.noise:.2%} a run, among runs of one stack"


StackSample = tuple[Judged, MeasuredPoint, Measurement]


def read_history(project: Project, recipe: str, *, runs: Path) -> list[Judged]:
    """Return the committed records of a recipe and those of this checkout's runs, oldest first."""
    loaded = project.recipe(recipe)
    files = [*project.results(loaded), *sorted((runs / loaded.recipe.name).glob("*/record.json"))]
    records = {record.record.sha256: record for record in (read_record(file, project) for file in files)}
    return sorted(records.values(), key=lambda one: one.created)


def series_of(
    project: Project, records: Sequence[Judged], *, point: str | None = None, metric: str | None = None
) -> list[StackSeries]:
    """Return a series for each point, GPU and figure of the records.

    Args:
        metric: row of metrics.toml; those that stand for the workload when left out.

    Raises:
        InputError: no record has such a point or metric.
    """
    groups: dict[tuple[str, ...], list[StackSample]] = {}
    for record, one in ((judged, one) for judged in records for one in judged.points):
        if point in (None, one.id):
            for name in (metric,) if metric else record.workload.headline:
                for found in standing_for(one, name):
                    marks = sha256_of_bytes(canonical_json(dict(marks_of(record, one))).encode())[:8]
                    key = (one.id, hardware(record), record.description.subject, found.id, marks)
                    groups.setdefault(key, []).append((record, one, found))
    if not groups:
        known = {f"{one.id}: {m.metric}" for r in records for one in r.points for m in one.measurements}
        place = f"{point or ''} {metric or ''}"
        raise InputError("no record has such a figure", place=place, allowed=sorted(known))
    return [_series(project, key, samples) for key, samples in sorted(groups.items())]


def _series(project: Project, key: tuple[str, ...], samples: Sequence[StackSample]) -> StackSeries:
    stacks: dict[str, list[StackSample]] = {}
    for sample in samples:
        stacks.setdefault(stack_digest(sample[0]), []).append(sample)
    points = tuple(
        StackPoint(
            digest=digest,
            stack=found[0][0].plan.stack,
            first=found[0][0].created,
            values=tuple(measured.median for _, _, measured in found),
        )
        for digest, found in stacks.items()
    )
    noise = noise_of([point.values for point in points])
    sides = list(stacks.values())
    changes = [
        SeriesChange(
            place=place,
            effect=points[place].mean / (points[place - 1].mean or math.inf) - 1,
            how=how,
            differs=tuple(_differences(project, sides[place - 1][-1], sides[place][0])),
        )
        for place, how in changed_places([one.values for one in points], noise)
    ]
    point, where, subject, measurement, _ = key
    return StackSeries(
        name=f"{subject}, {point}, {measurement}, {where}",
        metric=samples[0][2].metric,
        unit=samples[0][2].unit,
        points=points,
        noise=noise,
        changes=tuple(changes),
    )


def stack_digest(record: Judged) -> str:
    """Return the digest of the software of a record: its lock, and what was installed otherwise."""
    other = record.environment.lock_differences
    lock = record.plan.lock_sha256
    return sha256_of_bytes(canonical_json([lock, other]).encode()) if other else lock


def noise_of(groups: Iterable[Sequence[float]]) -> float | None:
    """Return the pooled relative standard deviation of runs of one stack; None without repeats."""
    repeated = [runs for runs in groups if len(runs) > 1 and statistics.fmean(runs)]
    freedom = sum(len(runs) - 1 for runs in repeated)
    squares = sum((one / statistics.fmean(runs) - 1) ** 2 for runs in repeated for one in runs)
    return math.sqrt(squares / freedom) if freedom else None


def changed_places(groups: Sequence[Sequence[float]], noise: float | None) -> Iterable[tuple[int, str]]:
    """Yield where a series of stacks changes, and what says so.

    The newest stacks, one to `NEWEST` of them, are held against those since the last change: a change is
    what leaves Student's prediction interval of their mean. Its variance is that between the means of stacks
    which no change parts; the noise of their runs is in it. Where repeats say what noise is, an expectation
    of `BETWEEN` weighs as much as `EXPECTED` stacks; without repeats `LEAST` stacks have to say all of it.

    Args:
        groups: the values of each stack, in the order of their first runs.
        noise: relative standard deviation of runs of one stack; None where no stack was run twice.
    """
    means = [statistics.fmean(runs) for runs in groups]
    begin, settled, degrees = 0, 0.0, 0
    if noise is not None:
        runs = statistics.fmean(map(len, groups))
        settled, degrees = EXPECTED * (BETWEEN**2 + noise**2 / runs), EXPECTED
    for end in range(2, len(means) + 1):
        for newest in range(1, min(NEWEST, end - begin - 1) + 1):
            base, after = means[begin : end - newest], statistics.fmean(means[end - newest : end])
            center, freedom = statistics.fmean(base), degrees + len(base) - 1
            if freedom < LEAST - 1 or not center:
                continue
            squares = settled + sum((one / center - 1) ** 2 for one in base)
            error = math.sqrt(squares / freedom * (1 / len(base) + 1 / newest))
            reach = float(stats.t.isf(RARE / 2 / NEWEST, freedom)) * error
            if abs(after / center - 1) > reach:
                yield end - newest, f"beyond {reach:.1%}, the reach of the stacks before it"
                begin, settled, degrees = end - newest, squares, freedom
                break


def _differences(project: Project, before: StackSample, after: StackSample) -> Iterable[str]:
    """Yield what differs between two records: packages of the locks first, then circumstances."""
    a, b = before[0], after[0]
    # Git may lack a lock that is no longer that of the stack.
    with contextlib.suppress(InputError):
        good, bad = (side_of_record(project, record, record.run).packages for record in (a, b))
        for name in sorted(good.keys() | bad.keys()):
            if good.get(name) != bad.get(name):
                yield f"{name} {versions(good.get(name, {}))} -> {versions(bad.get(name, {}))}"
    found = changed(conditions(a, before[1]), conditions(b, after[1]), a.workload.factors)
    yield from (f"{one.name} {one.a} -> {one.b}" for one in found if one.speed != "none")
