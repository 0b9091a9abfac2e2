"""Cases of version-1 records in today's form."""

from __future__ import annotations

import re
from typing import Any

from twinrun.protocol.bench import COPY

GIB, MIB = 1 << 30, 1 << 20
# What options were called in version 1.
OPTIONS = {"elements": "dtypes", "ways": "modes"}


def converted(record: dict[str, Any]) -> dict[str, Any]:
    """Return plan part, points of the plan and measured points of a version-1 record."""
    plan = record["plan"]
    bench = {**plan["bench"], "options": _settings(plan["bench"]["options"])}
    return {
        "part": {"bench": bench, "labels": []},
        "plan_points": [
            {
                "id": point["id"],
                "nodes": point["nodes"],
                "devices_per_node": point["devices_per_node"],
                "part": {"case": point["id"], "settings": _settings(point["settings"])},
            }
            for point in plan["points"]
        ],
        "points": [_point(point) for point in record["points"]],
    }


def _settings(settings: dict[str, Any]) -> dict[str, Any]:
    return {OPTIONS.get(name, name): value for name, value in settings.items()}


def _point(case: dict[str, Any]) -> dict[str, Any]:
    facts: dict[str, Any] = {"seed": case["seed"], "device name": case["device_name"]}
    measurements = [_single("peak-memory", case["peak_memory_bytes"] / GIB, "GiB", metric="peak-memory")]
    for peak in case["ceilings"]:
        facts[f"peak rate of {peak['id']}"] = peak["what"]
        measurements.append(
            _single(
                f"peak-rate@{peak['id']}",
                peak["rate"],
                "B/s" if peak["id"] == COPY else "op/s",
                metric="peak-rate",
                labels={"resource": peak["id"]},
            )
        )
    for call in case["measurements"]:
        measurements += _call(call, facts)
    return {
        "id": case["id"],
        "nodes": 1,
        "devices": case["devices"],
        "part": {"case": case["id"], "settings": _settings(case["settings"])},
        "measurements": measurements,
        "facts": facts,
    }


def _call(call: dict[str, Any], facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the measurements of one call, and add its facts."""
    name = call["id"]
    facts[f"{name} title"] = call["operation"]
    facts[f"{name} allowed error"] = call["allowed_error"]
    facts |= {f"{name} work {resource}": amount for resource, amount in call["amounts"].items()}
    if call["floor"]:
        facts[f"{name} work formula"] = call["floor"]["formula"]
    found = []
    baseline = call["baseline"]
    for one, suffix in ((call["ours"], ""), (baseline, f"@{baseline['implementation']}" if baseline else "")):
        if one:
            found += _implementation(call, one, suffix)
            facts[f"version of {one['implementation']}"] = one["version"]
            facts[f"{name} errors of {one['implementation']}"] = ", ".join(
                f"{tensor} {'not finite' if error is None else format(error, '.3g')}"
                for tensor, error in one.get("errors", {}).items()
            )
    if call["baseline_absent"]:
        facts[f"{name} without a baseline"] = call["baseline_absent"]
    return found


def _implementation(call: dict[str, Any], one: dict[str, Any], suffix: str) -> list[dict[str, Any]]:
    name, labels = call["id"], _labels(call) | {"call": call["id"], "implementation": one["implementation"]}
    found = []
    if one["milliseconds"]:
        found.append({"id": f"{name}{suffix}", "metric": "time", **one["milliseconds"], "labels": labels})
    if one["error"] is not None:
        found.append(_single(f"{name}/error{suffix}", one["error"], "ratio", metric="error", labels=labels))
    if one["kept_bytes"] is not None:
        kept = one["kept_bytes"] / MIB
        found.append(_single(f"{name}/kept-memory{suffix}", kept, "MiB", metric="kept-memory", labels=labels))
    return found


def _labels(call: dict[str, Any]) -> dict[str, str]:
    operation, phase = re.split("-", call["id"])[:2]
    return {"operation": operation, "phase": phase, "dtype": call["element"], "mode": call["way"]}


def _single(
    name: str, value: float, unit: str, *, metric: str, labels: dict[str, str] | None = None
) -> dict[str, Any]:
    return {
        "id": name,
        "metric": metric,
        "unit": unit,
        "per": "device",
        "median": value,
        "low": value,
        "high": value,
        "count": 1,
        "labels": labels or {},
    }
