"""From a request to the cases of a benchmark."""

from __future__ import annotations

from typing import Any

from twinrun.foundation.errors import InputError, MachineError, closest
from twinrun.manifests.settings import overlay
from twinrun.protocol.bench import Timing
from twinrun.workloads.bench.manifest import BenchPlan, BenchPoint, BenchScale, Tables, tables_of
from twinrun.workloads.sweep import placement, sizes
from twinrun.workloads.workload import Choice, Placement, Planned, PlanRequest, Point


def plan(request: PlanRequest) -> Planned:
    """Turn a request into cases at placements.

    Raises:
        InputError: a setting or case that does not exist.
        MachineError: this machine has too few devices.
    """
    recipe, tables = request.recipe, tables_of(request.recipe)
    scale, overrides = tables.scale(request.scale), dict(request.overrides)
    names = _cases(tables, scale, overrides.pop("cases", None))
    places = _places(scale, overrides.pop("devices", None), request.hardware.devices)
    bench = overlay(tables.bench, scale=scale.set, manifest=recipe.manifest, user=overrides)
    points = tuple(_point(tables, bench, name, place) for name in names for place in places)
    timed = f"{bench.repeats} timed calls each" if bench.repeats else "checked, not timed"
    return Planned(
        script=recipe.recipe.script,
        part=BenchPlan(bench=bench, labels=tables.label),
        points=points,
        choices=(Choice(name="cases", value=", ".join(point.id for point in points), because=timed),),
    )


def _places(scale: BenchScale, requested: Any, devices: int) -> list[Placement | None]:
    """Return the placements of a case, None for the one device of a benchmark without a sweep."""
    if scale.sweep is None:
        if requested is not None:
            raise InputError("this benchmark runs on one device", place="--set devices", found=requested)
        return [None]
    return [placement(scale.sweep, size) for size in sizes(scale.sweep, requested=requested, devices=devices)]


def _point(tables: Tables, bench: Timing, name: str, place: Placement | None) -> Point:
    return Point(
        id=f"{name}@{place.id}" if place else name,
        nodes=place.nodes if place else 1,
        devices_per_node=place.devices_per_node if place else 1,
        part=BenchPoint(case=name, settings=bench.options | tables.cases[name]),
    )


def _cases(tables: Tables, scale: BenchScale, asked: Any) -> tuple[str, ...]:
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
