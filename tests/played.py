"""Whole records, as a run of today's code writes them, of what no committed record is whole of."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from tests.leaves import committed_file, sealed
from tests.records import PROJECT, finished, plan, with_derived
from twinrun.manifests.vendor import Gpu
from twinrun.planning.plan import Plan
from twinrun.protocol.evaluation import EvaluationResult, ModelScores, TaskScore
from twinrun.protocol.models import ModelShape
from twinrun.protocol.power import PowerSource
from twinrun.protocol.training import StepMetrics, Training, TrainingResult
from twinrun.results.record import Record
from twinrun.workloads import load_workload
from twinrun.workloads.workload import Point, PointRecord

STACK, TORCH = "cuda13.0-torch2.11", "2.11.0"
WEIGHTS = "initial weights hash"


def played(recipe: str, name: str) -> Any:
    """Return a committed record as its run would write it in the stack whose PyTorch it imported."""
    content = committed_file(recipe, name)
    plan_, environment = content["plan"], content["environment"]
    image = PROJECT.stack(STACK).stack.image
    workload = load_workload(plan_["workload"])
    own = PROJECT.recipe(recipe).recipe.script
    plan_ |= {
        "stack": STACK,
        "image": f"{image}:{plan_['image'].rpartition(':')[2]}",
        "script": PROJECT.recipe(recipe).file(own) if own else workload.module,
    }
    for package in ("torch", "torchvision", "triton"):
        environment["lock_differences"].pop(package, None)
    for point in content["points"] if plan_["workload"] == "training" else ():
        of_device = "e" if "NVIDIA" in str(point["facts"]["device name"]) else "d"
        point["facts"].setdefault(WEIGHTS, of_device * 64)
    return sealed(content)


def evaluated() -> Any:
    """Return a record of a small training whose checkpoints are scored."""
    made = plan("mpt-chinchilla", gpu="h100-80gb", scale="smoke", devices=1)
    part, (placed,) = made.part, made.points
    training, row = part.evaluation.training, PROJECT.gpus["h100-80gb"]
    every = part.evaluation.every or training.steps
    scored = sorted({*range(every, training.steps + 1, every), training.steps})
    result = EvaluationResult(
        point=placed.id,
        libraries={},
        device_name="NVIDIA H100 80GB HBM3",
        training=_trained(training, placed, part.shape, "NVIDIA H100 80GB HBM3"),
        models=tuple(_scores(part, step) for step in scored),
        samples_sha256="1" * 64,
        harness="lm-eval 0.4.9",
        tokenizer_sha256=part.evaluation.tokenizer or "2" * 64,
        peak_memory_bytes=2 << 30,
    )
    record = finished(made, [_point(made, placed, result, row)], row)
    return sealed(copy.deepcopy(record.model_dump(mode="json")))


def trained(recipe: str, gpu: str) -> Record:
    """Return a record of a training of one device at node scale."""
    made, row = plan(recipe, gpu=gpu, scale="node", devices=1), PROJECT.gpus[gpu]
    (placed,) = made.points
    return finished(
        made,
        [_point(made, placed, _trained(made.part.training, placed, made.part.shape, row.name), row)],
        row,
    )


def _point(made: Plan, placed: Point, result: Any, row: Gpu) -> PointRecord:
    """Return what the ranks of a point report, with what follows from it."""
    numbers = load_workload(made.workload).numbers(made.part, placed, result)
    point = PointRecord(
        id=placed.id,
        nodes=placed.nodes,
        devices=placed.world_size,
        hosts=("node-0",),
        part=placed.part,
        **numbers.model_dump(),
    )
    return with_derived(point, made, row)


def _trained(training: Training, placed: Point, shape: ModelShape, device_name: str) -> TrainingResult:
    """Return a training whose loss falls by a hundredth each step."""
    return TrainingResult(
        point=placed.id,
        libraries={},
        device_name=device_name,
        parameters=shape.parameters(),
        microbatch=placed.part.microbatches[0],
        steps=tuple(
            StepMetrics(
                point=placed.id,
                attempt="0",
                step=number,
                loss=5.0 * 0.99**number,
                seconds=0.5 + number / 1e4,
                timed=number > training.warmup_steps,
            )
            for number in range(1, training.steps + 1)
        ),
        peak_memory_bytes=1 << 30,
        device_memory_bytes=80 << 30,
        attention_backend="flash",
        parallelism="single",
        data_hash="a" * 64,
        order_hash="b" * 64,
        weights_hash="c" * 64,
        power=PowerSource(sensor=None, reason="none was asked for"),
    )


def _scores(part: Any, step: int) -> ModelScores:
    tasks = []
    for task in part.tasks:
        sizes = [one for one in (task.documents, part.evaluation.limit) if one]
        documents = min(sizes) if sizes else 40
        share = round(0.4 * documents) / documents
        error = (share * (1 - share) / max(documents - 1, 1)) ** 0.5
        tasks.append(
            TaskScore(
                task=task.name,
                rule=task.rule,
                shots=part.evaluation.shots,
                documents=documents,
                score=share,
                error=error,
                by_rule={task.rule: share},
                prompts_sha256="3" * 64,
                version="1",
                requests=4 * documents,
                batch=8,
                seconds=2.0,
                forward_seconds=1.0,
            )
        )
    return ModelScores(
        step=step,
        checkpoint_sha256="4" * 64,
        sha256="5" * 64,
        tensors_sha256="6" * 64,
        parameters=part.shape.parameters(),
        tasks=tuple(tasks),
    )


PLAYED: dict[str, Callable[[], Any]] = {
    "layouts": lambda: played("deepspeed-pretrain", "h200x2_cuda12.6-torch2.7_2026-11-25-1"),
    "legs": lambda: played("mpt1b-convergence", "h200x1_cuda12.6-torch2.7_2026-11-24"),
    "ring": lambda: played("ring-allreduce", "h200x2_cuda12.6-torch2.7_2026-11-25"),
    "evaluation": evaluated,
}
