"""The estimates of memory and time against every committed record of a training on GPUs."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.records import plan
from twinrun.foundation.text import GIB
from twinrun.planning.project import Project
from twinrun.predict.memory import SPREAD, capacity
from twinrun.protocol.training import Training
from twinrun.results.reading import read_record
from twinrun.results.record import Record
from twinrun.runs.selection import FIRST_START, LATER_START
from twinrun.workloads.training import layouts
from twinrun.workloads.training.estimates import MOST_OF_MEMORY, Budget, estimated_seconds, predicted
from twinrun.workloads.training.manifest import TrainingPlan, TrainingPoint
from twinrun.workloads.workload import Hardware, PointRecord

ROOT = Path(__file__).resolve().parents[2]
PROJECT = Project(ROOT)
RECORDS = {
    path: record
    for path in sorted((ROOT / "recipes").glob("*/results/*.json"))
    if (record := read_record(path, PROJECT)).plan.workload == "training"
}
# The software of that day kept more: two later records hold the same size.
OUTGROWN = ("mpt7b-scaling", "h200x4_cuda12.6-torch2.7_2026-11-21-1", "devices=1", 16)
# It compiled its kernels first.
COMPILED_KERNELS = ("mamba-scaling", "h200x2_cuda12.6-torch2.7_2026-11-25")
# torch.compile takes longer over the modules of fp8 than over those of bf16.
COMPILED_FP8 = ("llama-throughput", "h100-80gbx1_cuda13.0-torch2.11_2026-11-27-2")


@dataclass(frozen=True)
class Attempt:
    """One microbatch that a record says was tried."""

    name: tuple[str, str, str, int]
    estimate: float
    device: float
    peak: float | None
    """None where memory ran out."""
    deepspeed: bool


def budget_of(record: Record, point: PointRecord[TrainingPoint], part: TrainingPoint) -> Budget:
    plan: TrainingPlan = record.plan.part
    shape, training = part.shape or plan.shape, layouts.trained(plan.training, part.layout)
    if point.facts["parallelism"] == "single":
        training = training.model_copy(update={"sharding": "none"})
    memory = record.machine.devices[0].memory_bytes
    return Budget(shape=shape, training=training, layout=part.layout, device_memory_bytes=memory)


def attempts() -> Iterator[Attempt]:
    for path, record in RECORDS.items():
        planned = {one.id: one.part for one in record.plan.points}
        for point in record.points:
            part = planned[point.id]
            if part.leg and part.leg.processor:
                continue
            budget = budget_of(record, point, part)
            (peak,) = (one.median * GIB for one in point.measurements if one.id == "peak-memory")
            tried: list[tuple[int, float | None]] = [(int(one.split()[1]), None) for one in point.attempts]
            for size, held in (*tried, (int(str(point.facts["microbatch"])), peak)):
                yield Attempt(
                    name=(path.parts[-3], path.stem, point.id, size),
                    estimate=budget.needed(microbatch=size, world=point.devices),
                    device=float(budget.device_memory_bytes or 0),
                    peak=held,
                    deepspeed=bool(part.layout and part.layout.framework == "deepspeed"),
                )


ATTEMPTS = list(attempts())


def test_no_size_is_tried_that_memory_rules_out() -> None:
    failed = {one.name: one.estimate / one.device for one in ATTEMPTS if one.peak is None}
    assert len(failed) >= 5
    assert {name for name, share in failed.items() if share <= MOST_OF_MEMORY} == {OUTGROWN}


def test_what_failed_is_not_said_to_fit_nor_what_ran_not_to() -> None:
    said = {one.name: (one.peak is None, _fit(one)) for one in ATTEMPTS}
    assert {name for name, (failed, fit) in said.items() if failed and fit == "FITS"} == set()
    assert {name for name, (failed, fit) in said.items() if not failed and fit == "DOES NOT FIT"} == set()


def _fit(one: Attempt) -> str:
    has = capacity(PROJECT.gpus[one.name[1].partition("x")[0]])
    return (
        "FITS"
        if one.estimate * (1 + SPREAD) <= has
        else "AT RISK"
        if one.estimate * (1 - SPREAD) <= has
        else "DOES NOT FIT"
    )


def test_what_ran_is_tried() -> None:
    held = {one.name: one.estimate / one.device for one in ATTEMPTS if one.peak is not None}
    assert len(held) >= 60
    assert {name: share for name, share in held.items() if share > MOST_OF_MEMORY} == {}


def test_the_estimate_of_memory_is_that_of_the_records() -> None:
    large = [one for one in ATTEMPTS if one.peak and one.peak > 32 * GIB]
    assert len(large) >= 81
    ratios = {one.name: one.estimate / one.peak for one in large if one.peak and not one.deepspeed}
    assert min(ratios.values()) >= 0.95, min(ratios, key=lambda one: ratios[one])
    assert max(ratios.values()) <= 1.04, max(ratios, key=lambda one: ratios[one])
    others = {one.name: one.estimate / one.peak for one in large if one.peak and one.deepspeed}
    assert min(others.values()) >= 0.93, min(others, key=lambda one: others[one])
    assert max(others.values()) <= 1.01, max(others, key=lambda one: others[one])


@pytest.mark.parametrize(
    ("gpu", "memory_gib", "model", "largest"),
    [("h100-80gb", 79.65, "mpt-3b", 4), ("h100-80gb", 79.65, "mpt-1b", 16), ("h200", 140.4, "mpt-7b", 3)],
)
def test_the_first_size_on_one_device_is_the_one_that_runs(
    gpu: str, memory_gib: float, model: str, largest: int
) -> None:
    assert PROJECT.gpus[gpu].device_memory_bytes
    recipe = PROJECT.recipe("mpt7b-scaling")
    shape = recipe.tables.models[model]
    training = trained(model)
    budget = Budget(shape=shape, training=training, device_memory_bytes=int(memory_gib * GIB))
    assert budget.microbatches(1)[0] == largest


def trained(model: str) -> Training:
    """Return the training of the node scale on one device."""
    record = next(one for one in RECORDS.values() if one.plan.recipe == "mpt7b-scaling")
    update = {"model": model, "global_batch": 192, "sharding": "none", "microbatch": "auto"}
    found: Training = record.plan.part.training.model_copy(update=update)
    return found


def wall_seconds(record: Record) -> float:
    """Return how long a run took, from its name to its record."""
    begin = datetime.datetime.strptime(record.run[:15], "%Y%m%d-%H%M%S").replace(tzinfo=datetime.UTC)
    return (datetime.datetime.fromisoformat(record.created) - begin).total_seconds()


def estimate_of(record: Record) -> float | None:
    """Return what the points of a record would be estimated to take; None where predict cannot say."""
    plan = record.plan.part
    gpu = PROJECT.gpus[record.plan.gpu or ""]
    memory = record.machine.devices[0].memory_bytes
    hardware = Hardware(gpu=gpu, device_memory_bytes=memory, devices=4, cores=1)
    total = 0.0
    for point in record.plan.points:
        part: TrainingPoint = point.part
        if part.leg or (part.layout and part.layout.offload != "none"):
            return None
        training = layouts.trained(plan.training, part.layout)
        repeated = training.model_copy(update={"steps": training.steps * (1 + part.controls)})
        world = point.world_size
        seconds = estimated_seconds(part.shape or plan.shape, repeated, hardware, world=world)
        if seconds is None:
            return None
        total += seconds
    return total


def test_the_estimate_of_time_is_that_of_the_records() -> None:
    """A record does not say whether its machine had just started: one of the two estimates must hold."""
    off = {}
    timed = {path: seconds for path, one in RECORDS.items() if (seconds := estimate_of(one))}
    assert len(timed) >= 50
    for path, seconds in timed.items():
        wall = wall_seconds(RECORDS[path])
        shares = [(start + seconds) / wall for start in (FIRST_START, LATER_START)]
        if min(abs(share - 1) for share in shares) > 0.27:
            off[path.parts[-3], path.stem] = shares
    assert set(off) == {COMPILED_KERNELS, COMPILED_FP8}, off


@pytest.mark.parametrize("claim", ["throughput-1-node", "throughput-32-nodes"])
def test_the_published_rows_lie_in_the_interval_of_the_prediction(claim: str) -> None:
    """Figure 5 of the publication has TFLOP/s of an MI250 card; of a point, the steps alone are compared."""
    (published,) = (one for one in PROJECT.recipe("mpt7b-scaling").published.claim if one.id == claim)
    stated = published.hardware
    assert stated
    gpu, part = PROJECT.gpus[stated.gpu], plan("mpt7b-scaling").part
    hardware = Hardware(
        gpu=gpu, device_memory_bytes=gpu.device_memory_bytes, devices=8, cores=8, network_gbit_s=800
    )
    one = predicted(
        part.shape, part.training, None, hardware, nodes=stated.cards // 4, devices_per_node=8, microbatch=6
    )
    assert one.seconds_interval
    flops = part.shape.flops_per_token() * part.training.global_batch * part.shape.sequence
    low, high = (flops / seconds / stated.cards / 1e12 for seconds in one.seconds_interval[::-1])
    assert low < published.value < high
