"""Training points of version-1 records in today's form."""

from __future__ import annotations

from typing import Any

GIB = 1 << 30


def converted(record: dict[str, Any]) -> dict[str, Any]:
    """Return plan part, points of the plan and measured points of a version-1 record."""
    plan = record["plan"]
    planned = {point["id"]: point for point in plan["points"]}
    return {
        "part": {name: plan[name] for name in ("shape", "training", "data")},
        "plan_points": [
            {
                "id": point["id"],
                "nodes": point["nodes"],
                "devices_per_node": point["devices_per_node"],
                "part": _part(point),
            }
            for point in plan["points"]
        ],
        "points": [_point(point, planned[point["id"]]) for point in record["points"]],
    }


def _part(point: dict[str, Any]) -> dict[str, Any]:
    return {"microbatches": point["microbatches"], "sharding": point.get("sharding")}


def _point(point: dict[str, Any], planned: dict[str, Any]) -> dict[str, Any]:
    flops = point["model_flops"]
    formula = flops["formula"]
    measurements = [
        _measurement("step-time", point["seconds_per_step"]),
        _measurement("peak-memory", _single(point["peak_memory_bytes"] / GIB, "GiB", "device")),
        _measurement("tokens-per-second", point["tokens_per_second"]),
        _measurement("model-flops", flops["rate"], formula=formula),
    ]
    if share := point["utilisation"]:
        spread = flops["rate"]
        scale = 1 / share["peak_tflops"]
        shares = {name: spread[name] * scale for name in ("low", "high")}
        found = {**spread, **shares, "median": share["value"], "unit": "ratio", "per": share["peak_per"]}
        measurements.append(_measurement("model-flops-share", found, formula=formula))
    if point["losses"]:
        measurements.append(_measurement("loss", _single(point["losses"][-1], "nats/token", "run")))
    return {
        "id": point["id"],
        "nodes": point["nodes"],
        "devices": point["devices"],
        "part": _part(planned),
        "attempts": [
            f"microbatch {one['microbatch']}" for one in point["attempts"] if one["outcome"] != "fits"
        ],
        "measurements": measurements,
        "series": [
            {"id": "loss", "metric": "loss", "unit": "nats/token", "per": "run", "values": point["losses"]}
        ],
        "facts": {
            "microbatch": point["microbatch"],
            "parameters": point["parameters"],
            "parallelism": point["parallelism"],
            "attention backend": point["attention_backend"],
            "device name": point["device_name"],
            "warm-up steps": point["warmup_steps"],
            "data hash": point["data_hash"],
            "order hash": point["order_hash"],
        },
    }


def _single(value: float, unit: str, per: str) -> dict[str, Any]:
    return {"median": value, "low": value, "high": value, "count": 1, "unit": unit, "per": per}


def _measurement(metric: str, spread: dict[str, Any], *, formula: str | None = None) -> dict[str, Any]:
    return {"id": metric, "metric": metric, **spread, "formula": formula}
