"""A finished run as experiment trackers take it: parameters, series over the steps, numbers."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import ValidationError

from twinrun.foundation.manifest import Frozen
from twinrun.foundation.text import without_credentials
from twinrun.manifests.metrics import Metric
from twinrun.protocol.job import MetricsLine
from twinrun.protocol.measurements import Measurement, sampled
from twinrun.report.words import headline
from twinrun.results.finished_run import FinishedRun
from twinrun.results.record import Record, hardware
from twinrun.workloads.workload import PointRecord

# Prefix of the medians of the record beside the series of the same metrics.
NUMBER_PREFIX = "record/"


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
    """Return a finished run as trackers take it, with the step lines of its folder.

    Every value is of the record's own lines and formulas: a series of steps that the record holds is taken
    as it is, and what follows from a step's time is derived as for the whole point.
    """
    record, folder, metrics = run.record, run.folder, run.project.metrics
    lines = _lines(folder / "metrics.jsonl")
    shared = _parameters(record)
    end = datetime.datetime.fromisoformat(record.created).timestamp()
    points: list[TrackedPoint] = []
    for point in reversed(record.points):
        points.append(_point(record, point, lines[point.id], metrics, shared=shared, end=end))
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
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _lines(file: Path) -> dict[str, list[bytes]]:
    found: defaultdict[str, list[bytes]] = defaultdict(list)
    for line in file.read_bytes().splitlines() if file.is_file() else ():
        try:
            found[MetricsLine.model_validate_json(line).point].append(line)
        except ValidationError:
            # A rank that was killed may have left half a line.
            continue
    return found


def _point(
    record: Record,
    point: PointRecord,
    lines: list[bytes],
    metrics: Mapping[str, Metric],
    *,
    shared: Mapping[str, str],
    end: float,
) -> TrackedPoint:
    known = [
        TrackedSeries(name=one.id, unit=one.unit, values=tuple(enumerate(one.values, start=1)))
        for one in point.series
    ]
    stepped = list(_stepped(record, point, lines, metrics))
    seconds = dict(next((one.values for one in stepped if one.name == "step-time"), ()))
    ended = [end]
    for step in range(len(seconds), 1, -1):
        ended.append(ended[-1] - seconds.get(step, 0.0))
    return TrackedPoint(
        id=point.id,
        parameters={
            name: without_credentials(value) for name, value in {**shared, **_point_parameters(point)}.items()
        },
        series=(*known, *stepped),
        numbers={f"{NUMBER_PREFIX}{one.id}": one.median for one in point.measurements},
        began=ended[-1] - seconds.get(1, 0.0),
        ended=tuple(reversed(ended)),
    )


def _stepped(
    record: Record, point: PointRecord, lines: list[bytes], metrics: Mapping[str, Metric]
) -> Iterator[TrackedSeries]:
    """Yield what each step measured, and what follows from it."""
    values: defaultdict[tuple[str, str], list[tuple[int, float]]] = defaultdict(list)
    for line in lines:
        progress = record.workload.progress(line)
        measured = tuple(_measured(name, value, metrics) for name, value in progress.values.items())
        step = point.model_copy(update={"measurements": measured, "series": ()})
        derived = record.workload.derived(record.plan.part, step, record.gpu) if measured else ()
        for one in (*measured, *derived):
            values[one.id, one.unit].append((progress.done, one.median))
    for (name, unit), found in values.items():
        yield TrackedSeries(name=name, unit=unit, values=tuple(found))


def _measured(name: str, value: float, metrics: Mapping[str, Metric]) -> Measurement:
    return sampled(name, [value], metric=name, unit=metrics[name].unit, per=metrics[name].per[0])


def _parameters(record: Record) -> dict[str, str]:
    """Return what was asked for and what it ran on."""
    plan, environment = record.plan, record.environment
    named = ("recipe", "recipe_version", "scale", "vendor", "stack", "engine", "launcher", "scheduler")
    return {
        **{name: str(getattr(plan, name)) for name in named},
        "plan": record.plan_sha256,
        "hardware": hardware(record),
        "commit": record.revision.commit or "unknown",
        **{f"software.{name}": version for name, version in environment.libraries.items()},
        **{
            f"{group.lower()}.{name}": value
            for group, values in record.description.configuration
            for name, value in values.items()
        },
    }


def _point_parameters(point: PointRecord) -> dict[str, str]:
    return {
        "point": point.id,
        "nodes": str(point.nodes),
        "devices": str(point.devices),
        **{name: str(value) for name, value in point.facts.items() if value is not None},
    }
