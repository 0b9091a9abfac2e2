"""What the ranks of each workload would have reported, for an engine that runs nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tests.execution.fake_engine import Play
from twinrun.protocol.models.mpt import MptShape

Job = Mapping[str, Any]
LIBRARIES = {"torch": "2.7.0"}
WATTS = 250.0


def training(job: Job) -> Play:
    """Return the steps of a run whose loss falls."""
    settings = job["training"]
    steps = [
        {
            "point": job["point"],
            "attempt": job["attempt"],
            "step": step,
            "loss": 5.0 - 0.1 * step,
            "seconds": 0.5 if step > settings["warmup_steps"] else 9.0,
            "timed": step > settings["warmup_steps"],
            # The sampler is a moment behind.
            "watts": WATTS if step > 1 else None,
        }
        for step in range(1, settings["steps"] + 1)
    ]
    result = {
        **_common(job),
        "parameters": MptShape.model_validate(job["shape"]).parameters(),
        "microbatch": job["microbatch"],
        "steps": [
            {key: value for key, value in step.items() if key not in ("point", "attempt")} for step in steps
        ],
        "peak_memory_bytes": 1 << 30,
        "device_memory_bytes": 1 << 32,
        "attention_backend": "math",
        "parallelism": "single",
        "data_hash": "d" * 64,
        "order_hash": "0" * 64,
        "power": {"sensor": "played", "samples_per_second": 8.0},
    }
    return Play(lines=steps, result=result)


def bench(job: Job) -> Play:
    """Return one call beside its baseline."""
    ours = {"name": "ours", "version": "1", "milliseconds": [2.0, 2.0, 2.1], "errors": {"out": 1e-7}}
    call = {
        "name": "norm-fp32",
        "title": "norm",
        "labels": {"operation": "norm", "dtype": "fp32"},
        "work": None,
        "allowed_error": 1e-5,
        "ours": ours,
        "baselines": [{**ours, "name": "fused", "milliseconds": [4.0, 4.0, 4.0]}],
    }
    result = {
        **_common(job),
        "seed": 1,
        "peak_rates": [],
        "calls": [call],
        "device_memory_bytes": 1 << 32,
        "peak_memory_bytes": 1 << 20,
    }
    return Play(lines=[{"point": job["point"], "call": call}], result=result)


def checks(job: Job) -> Play:
    """Return checks that all pass."""
    found = [
        {"id": one["id"], "outcome": "pass", "place": f"{one['scope']} 0", "reason": "as it should be"}
        for one in job["checks"]
    ]
    lines = [{"point": job["point"], "check": one} for one in found]
    return Play(lines=lines, result={**_common(job), "checks": found})


def evaluation(job: Job) -> Play:
    """Return scores of a model that answers half of each task, trained before or there already."""
    tasks = [
        {
            "task": one["name"],
            "rule": one["rule"],
            "shots": job["shots"],
            "documents": 4,
            "score": 0.5,
            "error": 0.25,
            "by_rule": {one["rule"]: 0.5},
            "prompts_sha256": "a" * 64,
            "version": "1.0",
            "requests": 8,
            "batch": 2,
            "seconds": 1.0,
            "forward_seconds": 0.5,
        }
        for one in job["tasks"]
    ]
    lines: list[Any] = []
    trained, model = None, {"step": None, "parameters": 9}
    if asked := job["training"]:
        played = training(asked | {"point": job["point"], "attempt": job["attempt"]})
        assert played.result is not None
        lines, trained = list(played.lines), played.result
        model = {"step": asked["training"]["steps"], "parameters": trained["parameters"]}
    result = {
        **_common(job),
        "training": trained,
        "models": [{**model, "sha256": "b" * 64, "tensors_sha256": "e" * 64, "tasks": tasks}],
        "samples_sha256": "c" * 64,
        "harness": "lm-eval 0.4.13",
        "tokenizer_sha256": "d" * 64,
        "peak_memory_bytes": 1 << 30,
    }
    return Play(lines=lines, result=result)


PLAYED: dict[str, Callable[[Job], Play]] = {
    "training": training,
    "bench": bench,
    "checks": checks,
    "evaluation": evaluation,
}


def _common(job: Job) -> dict[str, Any]:
    return {"point": job["point"], "device_name": "a processor", "libraries": LIBRARIES}
