"""From a request to the cases of a benchmark."""

from __future__ import annotations

import json
from typing import Any

from twinrun.foundation.errors import InputError, MachineError, closest
from twinrun.manifests.settings import overlay
from twinrun.protocol.bench import Settings
from twinrun.workloads.bench.manifest import (
    BenchPlan,
    BenchPoint,
    BenchScale,
    BenchTables,
    check_values,
    tables_of,
)
from twinrun.workloads.sweep import placement, sizes
from twinrun.workloads.workload import Choice, Placement, PlanRequest, Point, WorkloadPlan

# Where an option is, and what its values may be.
OPTION = "options."
KINDS = {int: "a whole number", bool: "true or false", str: "text", list: "a list"}


def plan(request: PlanRequest) -> WorkloadPlan:
    """Turn a request into cases at placements.

    Raises:
        InputError: a setting, case or value that does not exist, or one of another type than the recipe's.
        MachineError: this machine has too few devices.
    """
    recipe, tables = request.recipe, tables_of(request.recipe)
    scale, overrides = tables.scale(request.scale), dict(request.overrides)
    names = _cases(tables, scale, overrides.pop("cases", None))
    places = _places(scale, overrides.pop("devices", None), request.hardware.devices)
    _demand_types(tables.bench.options, overrides)
    bench = overlay(tables.bench, scale=scale.set, manifest=recipe.manifest, user=overrides)
    check_values(tables, bench.options, f"--set {OPTION}")
    # What was asked for holds at every case, also where a case has its own.
    asked = {name: value for name, value in bench.options.items() if f"{OPTION}{name}" in overrides}
    points = tuple(
        _point(name, bench.options | tables.cases[name] | asked, place) for name in names for place in places
    )
    timed = f"{bench.repeats} timed calls each" if bench.repeats else "checked, not timed"
    return WorkloadPlan(
        part=BenchPlan(bench=bench, labels=tables.label),
        points=points,
        choices=(Choice(name="cases", value=", ".join(point.id for point in points), because=timed),),
    )


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


def _places(scale: BenchScale, requested: Any, devices: int) -> list[Placement | None]:
    """Return the placements of a case, None for the one device of a benchmark without a sweep."""
    if scale.sweep is None:
        if requested is not None:
            raise InputError("this benchmark runs on one device", place="--set devices", found=requested)
        return [None]
    return [placement(scale.sweep, size) for size in sizes(scale.sweep, requested=requested, devices=devices)]


def _point(name: str, settings: Settings, place: Placement | None) -> Point:
    return Point(
        id=f"{name}@{place.id}" if place else name,
        nodes=place.nodes if place else 1,
        devices_per_node=place.devices_per_node if place else 1,
        part=BenchPoint(case=name, settings=settings),
    )


def _cases(tables: BenchTables, scale: BenchScale, asked: Any) -> tuple[str, ...]:
    if asked is None:
        return scale.cases
    names = asked if isinstance(asked, list) else str(asked).split(",")
    for name in map(str, names):
        if name not in tables.cases:
            known = list(tables.cases)
            raise InputError(
                "no such name", place="--set cases", found=name, allowed=known, hint=closest(name, known)
            )
    return tuple(dict.fromkeys(map(str, names)))


def demand_devices(scale: str, *, devices: int) -> None:
    """Raise MachineError where a scale that times devices has none."""
    if scale != "smoke" and not devices:
        raise MachineError(
            "this scale measures a GPU",
            found="no GPU in use",
            allowed="--scale smoke",
            hint="use --scale smoke, or print the plan with --dry",
        )
