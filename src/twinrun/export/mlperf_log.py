"""A run as lines of MLPerf's log format, which its checkers and summaries read.

No run of ours is a submission: no quality is aimed at and nothing is evaluated while it trains. The lines say
what ran, and leave out what only a submission has.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from twinrun.export.tracked_run import TrackedPoint, TrackedRun

# The parameters of a plan, by their keys in MLPerf's `mllog.constants`.
KEYS = {
    "global_batch_size": "training.global_batch",
    "max_sequence_length": "model.sequence",
    "seed": "training.seed",
    "opt_base_learning_rate": "training.optimizer.learning_rate",
    "opt_adamw_epsilon": "training.optimizer.epsilon",
    "opt_adamw_weight_decay": "training.optimizer.weight_decay",
    "opt_learning_rate_warmup_steps": "training.optimizer.warmup_steps",
    "opt_gradient_clip_norm": "training.optimizer.gradient_clip",
    "micro_batch_size": "microbatch",
    "number_of_nodes": "nodes",
    "number_of_ranks": "devices",
}
ORGANISATION = "none, this is no submission"
# Step series that are logged as statistics, by MLPerf's names; the rate is of all devices.
THROUGHPUT, LOSS = "tokens-per-second", "loss"


def mllog_lines(run: TrackedRun, point: TrackedPoint, *, hardware: str) -> str:
    """Return the log of one point that has steps."""
    return "".join(f":::MLLOG {json.dumps(one)}\n" for one in _entries(run, point, hardware))


def _entries(run: TrackedRun, point: TrackedPoint, hardware: str) -> Iterator[dict[str, Any]]:
    batch = int(point.parameters.get("training.global_batch", "1"))
    began, ended = point.began, point.time_of(point.steps)
    first = {"samples_count": 0, "first_epoch_num": 0}
    samples = {"samples_count": point.steps * batch}
    for key, value in _header(run, point, hardware).items():
        yield _entry(began, key, value)
    yield _entry(began, "init_start", None, kind="INTERVAL_START")
    yield _entry(began, "init_stop", None, kind="INTERVAL_END")
    yield _entry(began, "run_start", None, kind="INTERVAL_START")
    yield _entry(began, "block_start", None, first, kind="INTERVAL_START")
    yield from _steps(point, batch)
    yield _entry(ended, "block_stop", None, samples | {"first_epoch_num": 0}, kind="INTERVAL_END")
    # MLPerf calls a run so that has not reached the quality of its benchmark.
    yield _entry(ended, "run_stop", None, {"status": "aborted", **samples}, kind="INTERVAL_END")


def _header(run: TrackedRun, point: TrackedPoint, hardware: str) -> dict[str, Any]:
    found = point.parameters
    batch = int(found.get("training.global_batch", "1"))
    return {
        # `submission_benchmark` names one of MLPerf's own: with any other its checker ends in a fault.
        "twinrun_recipe": run.recipe,
        "submission_org": ORGANISATION,
        "submission_division": "open",
        "submission_status": "research",
        "submission_platform": hardware,
        "train_samples": point.steps * batch,
        "opt_name": "adamw",
        **{key: _number(found[name]) for key, name in KEYS.items() if name in found},
    }


def _steps(point: TrackedPoint, batch: int) -> Iterator[dict[str, Any]]:
    series = {one.name: dict(one.values) for one in point.series}
    devices = int(point.parameters["devices"])
    losses, rates = series.get(LOSS, {}), series.get(THROUGHPUT, {})
    for step in range(1, point.steps + 1):
        place = {"samples_count": step * batch, "step": step}
        if step in losses:
            yield _entry(point.time_of(step), "train_loss", losses[step], place)
        if step in rates:
            value = {"throughput": rates[step] * devices}
            yield _entry(point.time_of(step), "tracked_stats", value, place | {"unit": "tokens/s"})


def _entry(
    seconds: float,
    key: str,
    value: Any,
    metadata: Mapping[str, Any] | None = None,
    *,
    kind: str = "POINT_IN_TIME",
) -> dict[str, Any]:
    return {
        "namespace": "",
        "time_ms": round(seconds * 1000),
        "event_type": kind,
        "key": key,
        "value": value,
        "metadata": dict(metadata or {}),
    }


def _number(text: str) -> float | str:
    """Return a number where the text is one; a whole one without a point."""
    try:
        value = float(text)
    except ValueError:
        return text
    return int(value) if value.is_integer() else value
