"""What a benchmark's recipe says, and from it to cases at placements and to the jobs of their ranks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated

from pydantic import Field

from twinrun.foundation.errors import InputError, require_known
from twinrun.foundation.manifest import Frozen
from twinrun.manifests.recipe import SCALES, LoadedRecipe, Scale, ScaledTables, Sweep
from twinrun.manifests.settings import chosen, overlay
from twinrun.protocol.bench import BenchJob, Label, Settings, Timing, possible_names
from twinrun.workloads.settings import Fingerprint, as_fingerprint, flat, flat_fields
from twinrun.workloads.sweep import KEYS, placements, refuse_demands
from twinrun.workloads.workload import (
    Choice,
    DataRequest,
    Demand,
    PlanDescription,
    PlanRequest,
    Point,
    PointDescription,
    Run,
    WorkloadPlan,
)

# Metrics of our calls alone, of baselines too, and of ours beside each baseline.
OF_OURS = ("bandwidth", "roofline-time", "roofline-share", "link-traffic")
OF_BOTH, BESIDE = ("time", "error", "kept-memory", "bus-bandwidth"), ("speedup", "memory-saving")
# Where an option is, and what its values may be.
OPTION = "options."
KINDS = {int: "a whole number", bool: "true or false", str: "text", tuple: "a list"}


class BenchScale(Scale):
    """One size at which the benchmark runs."""

    cases: tuple[str, ...]
    """Cases, in the order in which they run."""
    sweep: Sweep | None = None
    """Placements of each case; one device where there is none."""


class Figure(Frozen):
    """A picture of the benchmark: what is drawn over what."""

    title: str = ""
    """The metric when left out."""
    metric: str = "time"
    each: tuple[str, ...] = ()
    """Labels: one picture for each combination of their values."""
    series: tuple[str, ...] = ()
    """Labels whose values name a row or a curve, beside the implementation."""
    over: str | None = None
    """Setting of the cases on the horizontal axis of curves, for example `bytes`; rows of a case without."""
    where: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Labels and the values of them that are drawn; all where a label is left out."""
    cases: tuple[str, ...] = ()
    """Cases that are drawn; when left out of rows those that claims name, of curves all."""


class BenchTables(ScaledTables[BenchScale]):
    """Tables of recipe.toml."""

    bench: Timing
    """How the publication measured, as far as it says."""
    at_least: dict[str, int | float] = Field(default_factory=dict)
    """The smallest value of options that are numbers."""
    label: tuple[Label, ...] = ()
    """What is timed at each case: names of calls are made of their values."""
    baselines: tuple[str, ...] = ()
    """Implementations that ours is timed beside."""
    allowed_errors: dict[str, dict[str, Annotated[float, Field(gt=0, lt=1)]]] = Field(default_factory=dict)
    """How far ours may be from its float64 reference, by values of labels; of several the last label's."""
    figure: tuple[Figure, ...] = ()
    cases: dict[str, Settings]
    """What the script is told at each case."""

    def allowed_error(self, labels: Mapping[str, str]) -> float | None:
        """Return how far a call with these labels may be from its reference; None where nobody says it."""
        by_label = (of[labels[name]] for name, of in self.allowed_errors.items() if labels.get(name) in of)
        return next(reversed([None, *by_label]))


class BenchPlan(Frozen):
    """What decides a benchmark."""

    bench: Timing
    labels: tuple[Label, ...] = ()


class BenchPoint(Frozen):
    """One case at one placement."""

    case: str
    settings: Settings
    """What its script is told."""


def check(recipe: LoadedRecipe[BenchTables], demands: Sequence[Demand]) -> Mapping[str, DataRequest]:
    """Hold the names inside recipe.toml, and what claims ask, against each other; raises InputError."""
    tables = recipe.tables
    _check_names(tables, recipe.manifest)

    def gives(point: str) -> bool:
        case, _, size = point.partition("@")
        given = [scale for name in SCALES if case in (scale := tables.scale(name)).cases]
        return any(one.sweep.gives(size) if one.sweep else not size for one in given)

    def missing(asked: Demand) -> str | None:
        # A claim that says something of other hardware is judged at its own case, which every node must run.
        restated, case = asked.place.endswith(".here.metric"), (asked.point or "").partition("@")[0]
        if restated and case and case not in tables.scale("node").cases:
            return f"no scale has a point {asked.point} on one node, where its restatement is asked"
        ids = measurement_ids(tables, asked.metric)
        if ids is None:
            return f"a benchmark measures no {asked.metric}"
        if asked.measurement is None and asked.metric not in ids:
            return "which call is not said: `measurement` is needed"
        known = asked.measurement in {None, *ids}
        return None if known else f"the labels give no measurement {asked.measurement}"

    refuse_demands(demands, gives, missing)
    return {}


def _check_names(tables: BenchTables, place: str) -> None:
    """Hold the names inside recipe.toml against each other; raises InputError."""

    def demand(names: Iterable[str], known: Iterable[str], where: str) -> None:
        for name in names:
            require_known(name, known, "no such name", place=f"{place}:{where}")

    labels = {one.name: one.values for one in tables.label}
    options = {name: one for name, one in tables.bench.options.items() if type(one) in (int, float)}
    demand(tables.at_least, options, "at_least")
    _check_values(tables, tables.bench.options, f"{place}:bench.{OPTION}")
    for case, settings in tables.cases.items():
        _check_values(tables, settings, f"{place}:cases.{case}.")
    for scale in SCALES:
        demand(tables.scale(scale).cases, tables.cases, f"scales.{scale}.cases")
    demand(tables.allowed_errors, labels, "allowed_errors")
    for name, allowed in tables.allowed_errors.items():
        demand(allowed, labels[name], f"allowed_errors.{name}")
    for number, figure in enumerate(tables.figure):
        demand((*figure.each, *figure.series, *figure.where), labels, f"figure.{number}")
        for name, values in figure.where.items():
            demand(values, labels[name], f"figure.{number}.where.{name}")
        demand(figure.cases, tables.cases, f"figure.{number}.cases")


def _check_values(tables: BenchTables, settings: Settings, place: str) -> None:
    """Hold settings against the types of the recipe's options, their smallest values, and labels.

    A list such as `dtypes` has values of the label `dtype`.

    Raises:
        InputError: a value is none of these; its place begins with `place`.
    """
    labels = {f"{one.name}s": one.values for one in tables.label}
    for name, found in settings.items():
        where, known = f"{place}{name}", tables.bench.options.get(name, found)
        # `overlay` says how a list is written.
        listed = isinstance(known, tuple) and isinstance(found, (list, str))
        if type(found) is not type(known) and not listed:
            allowed, hint = KINDS[type(known)], f"the recipe has {json.dumps(known)}"
            raise InputError("wrong type", place=where, found=found, allowed=allowed, hint=hint)
        least = tables.at_least.get(name)
        if least is not None and isinstance(found, (int, float)) and found < least:
            raise InputError("too small", place=where, found=found, allowed=f"{least} or more")
        for value in found if isinstance(found, tuple) and name in labels else ():
            require_known(str(value), labels[name], "no such name", place=where)


def measurement_ids(tables: BenchTables, metric: str) -> set[str] | None:
    """Return the identifiers that measurements of `metric` can have; None where they have no metric such."""
    names = {name for name in possible_names(tables.label) if name}
    own = {name if metric == "time" else f"{name}/{metric}" for name in names}
    beside = {f"{name}@{other}" for name in own for other in tables.baselines}
    given = dict.fromkeys(OF_OURS, own) | dict.fromkeys(OF_BOTH, own | beside) | dict.fromkeys(BESIDE, beside)
    return (given | {"peak-memory": {"peak-memory"}}).get(metric)


def plan(request: PlanRequest[BenchTables]) -> WorkloadPlan[BenchPlan, BenchPoint]:
    """Turn a request into cases at placements.

    Raises:
        InputError: a setting, case or value that does not exist, or one of another type than the recipe's.
        MachineError: this machine has too few devices.
    """
    recipe, tables = request.recipe, request.recipe.tables
    scale, overrides = tables.scale(request.scale), dict(request.overrides)
    names = chosen(overrides.pop("cases", None), scale.cases, tables.cases, key="cases")
    if sized := [key for key in KEYS if key in overrides and scale.sweep is None]:
        place, found = f"--set {sized[0]}", overrides[sized[0]]
        raise InputError("this benchmark runs on one device", place=place, found=found)
    sweep = scale.sweep or Sweep(devices=(1,))
    places, left_out = placements(sweep, overrides, request.hardware, request.node_devices)
    typed = {key.removeprefix(OPTION): one for key, one in overrides.items() if key.startswith(OPTION)}
    _check_values(tables, typed, f"--set {OPTION}")
    bench = overlay(tables.bench, scale=scale.set, manifest=recipe.manifest, user=overrides)
    _check_values(tables, bench.options, f"--set {OPTION}")
    # A setting that was asked for holds at every case, also where a case has its own.
    asked = {name: value for name, value in bench.options.items() if name in typed}
    points = tuple(
        Point(
            **{**dict(place), "id": f"{name}@{place.id}" if scale.sweep else name},
            part=BenchPoint(case=name, settings=bench.options | tables.cases[name] | asked),
        )
        for name in names
        for place in places
    )
    timed = f"{bench.repeats} timed calls each" if bench.repeats else "checked, not timed"
    cases = Choice(name="cases", value=", ".join(point.id for point in points), because=timed)
    part = BenchPlan(bench=bench, labels=tables.label)
    return WorkloadPlan(part=part, points=points, choices=(cases, *left_out))


def describe(part: BenchPlan, points: Sequence[Point[BenchPoint]]) -> PlanDescription:
    """Return what follows from a plan of a benchmark."""
    repeats, run = part.bench.repeats, PointDescription(attempts=("the case",), steps=1)
    return PlanDescription(
        subject=f"median of {repeats} calls" if repeats else "checked, not timed",
        configuration=(("Benchmark", flat(part.bench)),),
        points={point.id: replace(run, case=point.part.settings) for point in points},
    )


def as_written(
    tables: BenchTables, part: BenchPlan, point: Point[BenchPoint], name: str
) -> tuple[BenchPlan, Point[BenchPoint]]:
    """Return a plan's part and the case that a point names as recipe.toml has them at the paper scale."""
    bench = overlay(tables.bench, scale=tables.scales.paper.set, manifest="recipe.toml", user={})
    case = name.partition("@")[0] if name.partition("@")[0] in tables.cases else point.part.case
    placed = BenchPoint(case=case, settings=bench.options | tables.cases.get(case, {}))
    return part.model_copy(update={"bench": bench}), point.model_copy(update={"part": placed})


def settings(part: BenchPlan, point: Point[BenchPoint]) -> Fingerprint:
    """Return what the script is told at a case, a list as one text, and how the case is timed."""
    timing = {f"timing.{name}": value for name, value in flat_fields(part.bench).items() if "." not in name}
    return {**as_fingerprint(point.part.settings), **timing}


def job(part: BenchPlan, point: Point[BenchPoint], _attempt: int, run: Run) -> BenchJob:
    """Return the job of a case."""
    told = {"timing": part.bench, "labels": part.labels, **dict(point.part)}
    return BenchJob(**run.at(point, "power"), **told)
