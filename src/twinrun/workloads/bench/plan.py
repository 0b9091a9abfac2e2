"""From a benchmark's recipe to its cases at placements, and to the jobs of their ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from twinrun.foundation.errors import InputError
from twinrun.manifests.recipe import SCALES, LoadedRecipe
from twinrun.manifests.settings import overlay
from twinrun.protocol.allocation import Placement
from twinrun.protocol.bench import BenchJob, Settings
from twinrun.workloads.bench.manifest import (
    BenchPlan,
    BenchPoint,
    BenchTables,
    check_names,
    check_values,
    measurement_ids,
)
from twinrun.workloads.settings import Fingerprint, as_fingerprint, flat, flat_fields
from twinrun.workloads.sweep import KEYS, chosen, placements, refuse_demands
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

# Where an option is, and what its values may be.
OPTION = "options."
# Key of a claim under which its restatement asks for a number.
HERE = ".here.metric"
KINDS = {int: "a whole number", bool: "true or false", str: "text", list: "a list"}


def check(recipe: LoadedRecipe[BenchTables], demands: Sequence[Demand]) -> Mapping[str, DataRequest]:
    """Hold the names inside recipe.toml, and what claims ask, against each other; raises InputError."""
    check_names(recipe)
    tables = recipe.tables

    def gives(point: str, scales: Sequence[str] = SCALES, *, placed: bool = True) -> bool:
        case, _, size = point.partition("@")
        given = [scale for name in scales if case in (scale := tables.scale(name)).cases]
        return any(not placed or (one.sweep.gives(size) if one.sweep else not size) for one in given)

    def missing(asked: Demand) -> str | None:
        # A claim that says something of other hardware is judged at its own case, which every node must run.
        if asked.point and asked.place.endswith(HERE) and not gives(asked.point, ("node",), placed=False):
            return f"no scale has a point {asked.point} on one node, where its restatement is asked"
        ids = measurement_ids(tables, asked.metric)
        if ids is None:
            return f"a benchmark measures no {asked.metric}"
        if asked.measurement is None and asked.metric not in ids:
            return "which call is not said: `measurement` is needed"
        known = asked.measurement is None or asked.measurement in ids
        return None if known else f"the labels give no measurement {asked.measurement}"

    refuse_demands(demands, gives, missing)
    return {}


def plan(request: PlanRequest[BenchTables]) -> WorkloadPlan[BenchPlan, BenchPoint]:
    """Turn a request into cases at placements.

    Raises:
        InputError: a setting, case or value that does not exist, or one of another type than the recipe's.
        MachineError: this machine has too few devices.
    """
    recipe, tables = request.recipe, request.recipe.tables
    scale, overrides = tables.scale(request.scale), dict(request.overrides)
    names = chosen(overrides.pop("cases", None), scale.cases, tables.cases, key="cases")
    # A benchmark without a sweep has the one device.
    places: Sequence[Placement | None] = [None]
    left_out: tuple[Choice, ...] = ()
    if scale.sweep is not None:
        places, left_out = placements(scale.sweep, overrides, request.hardware, request.node_devices)
    elif sized := [key for key in KEYS if key in overrides]:
        place, found = f"--set {sized[0]}", overrides[sized[0]]
        raise InputError("this benchmark runs on one device", place=place, found=found)
    _demand_types(tables.bench.options, overrides)
    bench = overlay(tables.bench, scale=scale.set, manifest=recipe.manifest, user=overrides)
    check_values(tables, bench.options, f"--set {OPTION}")
    # A setting that was asked for holds at every case, also where a case has its own.
    asked = {name: value for name, value in bench.options.items() if f"{OPTION}{name}" in overrides}
    points = tuple(
        Point(
            id=f"{name}@{place.id}" if place else name,
            nodes=place.nodes if place else 1,
            devices_per_node=place.devices_per_node if place else 1,
            part=BenchPoint(case=name, settings=bench.options | tables.cases[name] | asked),
        )
        for name in names
        for place in places
    )
    timed = f"{bench.repeats} timed calls each" if bench.repeats else "checked, not timed"
    cases = Choice(name="cases", value=", ".join(point.id for point in points), because=timed)
    part = BenchPlan(bench=bench, labels=tables.label)
    return WorkloadPlan(part=part, points=points, choices=(cases, *left_out))


def _demand_types(options: Settings, overrides: dict[str, Any]) -> None:
    """Raise InputError for an option of another type than the recipe's, which only ranks would meet."""
    for key, value in overrides.items():
        known = options.get(key.removeprefix(OPTION)) if key.startswith(OPTION) else None
        kind = list if isinstance(known, tuple) else type(known)
        # `overlay` says how a list is written.
        if known is None or type(value) is kind or (kind is list and isinstance(value, str)):
            continue
        hint = f"the recipe has {json.dumps(known)}"
        raise InputError("wrong type", place=f"--set {key}", found=value, allowed=KINDS[kind], hint=hint)


def describe(part: BenchPlan, points: Sequence[Point[BenchPoint]]) -> PlanDescription:
    """Return what follows from a plan of a benchmark."""
    repeats = part.bench.repeats
    return PlanDescription(
        subject=f"median of {repeats} calls" if repeats else "checked, not timed",
        configuration=(("Benchmark", flat(part.bench)),),
        points={
            point.id: PointDescription(attempts=("the case",), steps=1, case=point.part.settings)
            for point in points
        },
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
    shared = run.model_dump(exclude={"power"}) | {"point": point.id, "world_size": point.world_size}
    return BenchJob(
        **shared,
        case=point.part.case,
        settings=point.part.settings,
        timing=part.bench,
        labels=part.labels,
    )
