"""A finished run as experiment trackers take it: parameters, series over the steps, numbers."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from twinrun.foundation.manifest import Frozen
from twinrun.foundation.redaction import leaving
from twinrun.report.words import headline
from twinrun.results.judged import Judged, hardware
from twinrun.results.reading import FinishedRun
from twinrun.workloads.workload import MeasuredPoint

# Prefix of the medians of the record beside the series of the same metrics.
NUMBER_PREFIX = "record/"
# Metrics that each step has a number of.
STEPWISE = {"step-time", "tokens-per-second", "model-flops", "model-flops-share", "power"}
STEPWISE |= {"tokens-per-second-per-watt"}


class TrackedSeries(Frozen):
    """One quantity over the steps."""

    name: str
    unit: str
    values: tuple[tuple[int, float], ...]
    """Step and value; a step that has none is left out."""


class TrackedPoint(Frozen):
    """One point: a run of its own in every tracker."""

    id: str
    parameters: dict[str, str]
    series: tuple[TrackedSeries, ...]
    numbers: dict[str, float]
    """Medians of the record, each with NUMBER_PREFIX before its id."""
    began: float
    """When the first step began, in seconds since 1970."""
    ended: tuple[float, ...]
    """When each step ended, in seconds since 1970: step times added up, the last at the end of the point."""

    @property
    def steps(self) -> int:
        """The last step, 0 where nothing has steps."""
        return max((step for one in self.series for step, _ in one.values), default=0)

    def time_of(self, step: int) -> float:
        """Return when `step` ended."""
        return self.ended[max(0, min(step, len(self.ended)) - 1)]


class TrackedRun(Frozen):
    """A run."""

    recipe: str
    run: str
    summary: str
    """Its headline."""
    verdicts: dict[str, str]
    """By claim."""
    points: tuple[TrackedPoint, ...]
    files: tuple[Path, ...]
    """What is kept with it whole: record, plan, report."""


def tracked_run(run: FinishedRun) -> TrackedRun:
    """Return a finished run as trackers take it.

    Every value is of the record's own lines and formulas: a series of steps that the record holds is taken
    as it is, and what follows from a step's time is derived as for the whole point.
    """
    record, folder = run.record, run.folder
    shared = _parameters(record)
    end = datetime.datetime.fromisoformat(record.created).timestamp()
    points: list[TrackedPoint] = []
    for point in reversed(record.points):
        points.append(_point(record, point, shared, end))
        end = points[-1].began
    files = ("record.json", "plan.json", "metrics.jsonl", "report.html")
    return TrackedRun(
        recipe=record.plan.recipe,
        run=record.run,
        summary=headline(record),
        verdicts={one.claim: one.final for one in record.verdicts},
        points=tuple(reversed(points)),
        files=tuple(folder / name for name in files if (folder / name).is_file()),
    )


@contextlib.contextmanager
def variables_set(wanted: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables that a library reads, and set them back."""
    before = dict(os.environ)
    os.environ.update(wanted)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _point(record: Judged, point: MeasuredPoint, shared: Mapping[str, str], end: float) -> TrackedPoint:
    known = [
        TrackedSeries(name=one.id, unit=one.unit, values=tuple(enumerate(one.values, start=1)))
        for one in point.series
    ]
    stepped = list(_stepped(record, point))
    seconds = dict(next((one.values for one in stepped if one.name == "step-time"), ()))
    ended = [end]
    for step in range(len(seconds), 1, -1):
        ended.append(ended[-1] - seconds.get(step, 0.0))
    own = {"point": point.id, "nodes": str(point.nodes), "devices": str(point.devices), **point.facts}
    return TrackedPoint(
        id=point.id,
        parameters={name: leaving(value) for name, value in {**shared, **own}.items()},
        series=(*known, *stepped),
        numbers={f"{NUMBER_PREFIX}{one.id}": one.median for one in point.measurements},
        began=ended[-1] - seconds.get(1, 0.0),
        ended=tuple(reversed(ended)),
    )


def _stepped(record: Judged, point: MeasuredPoint) -> Iterator[TrackedSeries]:
    """Yield what each step measured, and what follows from it."""
    values: defaultdict[tuple[str, str], list[tuple[int, float]]] = defaultdict(list)
    for step in getattr(point.result, "steps", ()):
        alone = point.result.model_copy(update={"steps": (step.model_copy(update={"timed": True}),)})
        found = record.workload.numbers(record.plan.part, point.planned, alone, record.gpu)
        for one in found.measurements:
            if one.metric in STEPWISE:
                values[one.id, one.unit].append((step.step, one.median))
    for (name, unit), found_values in values.items():
        yield TrackedSeries(name=name, unit=unit, values=tuple(found_values))


def _parameters(record: Judged) -> dict[str, str]:
    """Return what was asked for and what it ran on."""
    plan, settings = record.plan, record.description.configuration
    named = ("recipe", "recipe_version", "scale", "vendor", "stack", "engine", "launcher", "scheduler")
    found = {name: str(getattr(plan, name)) for name in named}
    found |= {"hardware": hardware(record), "commit": record.record.revision.commit or "unknown"}
    found |= {f"software.{name}": version for name, version in record.record.libraries.items()}
    return found | {
        f"{group.lower()}.{name}": value for group, values in settings for name, value in values.items()
    }
