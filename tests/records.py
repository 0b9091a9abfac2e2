"""Records for tests, made by the code that makes real ones: resolved plans, measured points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from twinrun.devices import Device
from twinrun.hardware import Gpu, Machine, load_gpus
from twinrun.job import Plan, resolve
from twinrun.judge import judge
from twinrun.measure import measured_point
from twinrun.recipe import LoadedRecipe, load_recipe
from twinrun.record import Attempt, Environment, PointRecord, Record, Revision
from twinrun.sizing import Point
from twinrun.stack import LoadedStack, Stack
from twinrun.training import PointResult, StepMetrics

ROOT = Path(__file__).resolve().parents[1]
RECIPE = "mpt7b-scaling"

# Tokens per second of a device: 166 to 159 TFLOP/s per card of two devices in 6N+12LDS.
PAPER_RATES = {1: 1920.3, 2: 1915.0, 4: 1908.0, 8: 1890.0, 16: 1865.0, 32: 1839.3}
NODE_RATES = {1: 65_200.0, 2: 63_100.0, 4: 62_000.0}
SMOKE_RATES = {1: 5200.0, 2: 2900.0}


@cache
def loaded_recipe() -> LoadedRecipe:
    """Return the recipe that the records are of."""
    return load_recipe(ROOT, RECIPE)


@cache
def gpus() -> dict[str, Gpu]:
    """Return the rows of images/gpus.toml."""
    return load_gpus(ROOT)


def smoke_record(*, rates: Mapping[int, float] | None = None, name: str | None = None) -> Record:
    """Return a run on a CPU at one and two ranks, `rates` in tokens per second of a rank."""
    return record(scale="smoke", gpu=None, rates=rates or SMOKE_RATES, device_name=name or "cpu")


def node_record(
    *,
    gpu: str = "h200",
    rates: Mapping[int, float] | None = None,
    settings: Sequence[str] = ("model=mpt-1b",),
) -> Record:
    """Return a run on the GPUs of one machine."""
    return record(scale="node", gpu=gpu, rates=rates or NODE_RATES, settings=settings)


def paper_record(*, gpu: str = "mi250", rates: Mapping[int, float] | None = None) -> Record:
    """Return a run in the published configuration; `rates` are by number of nodes."""
    return record(scale="paper", gpu=gpu, rates=rates or PAPER_RATES)


def record(
    *,
    scale: str,
    gpu: str | None,
    rates: Mapping[int, float],
    settings: Sequence[str] = (),
    device_name: str | None = None,
    created: str = "2026-01-02T03:04:05+00:00",
) -> Record:
    """Return a judged record with a point for each entry of `rates`."""
    row = gpus()[gpu] if gpu else None
    sweep = () if scale == "paper" else (f"devices={','.join(map(str, rates))}",)
    machine = machine_of(row, max(rates))
    plan = resolve(
        loaded=loaded_recipe(),
        scale=scale,
        settings=(*settings, *sweep),
        stack=_stack(row),
        gpu=row,
        device_memory_bytes=row.device_memory_bytes if row else None,
        devices=len(machine.devices),
        engine="venv",
        launcher="local",
    )
    points = {point.nodes if scale == "paper" else point.devices_per_node: point for point in plan.points}
    named = device_name or (row.name if row else "cpu")
    measured = tuple(_measured(plan, points[size], rate, row, named) for size, rate in rates.items())
    unjudged = Record(
        twinrun="0.1.0",
        run=f"{created[:10].replace('-', '')}-030405-{plan.sha256()[:8]}",
        created=created,
        plan=plan,
        plan_sha256=plan.sha256(),
        revision=Revision(commit="1" * 40, changes_sha256=None),
        machine=machine,
        gpu=row,
        environment=environment_of(row),
        points=measured,
        verdicts=(),
        files={"plan.json": "2" * 64, "metrics.jsonl": "3" * 64},
    )
    return judged(unjudged)


def judged(unjudged: Record) -> Record:
    """Return the record sealed, with the verdicts that belong to it."""
    verdicts = judge(unjudged, loaded_recipe().published, gpus())
    return unjudged.model_copy(update={"verdicts": verdicts}).sealed()


def with_losses(original: Record, *curves: Sequence[float]) -> Record:
    """Return the record with other loss curves, one for each point, judged again."""
    points = [
        point.model_copy(update={"losses": tuple(curve)})
        for point, curve in zip(original.points, curves, strict=True)
    ]
    return judged(original.model_copy(update={"points": tuple(points)}))


def with_point(original: Record, place: int, **changes: object) -> Record:
    """Return the record with fields of one point changed, judged again."""
    points = list(original.points)
    points[place] = points[place].model_copy(update=changes)
    return judged(original.model_copy(update={"points": tuple(points)}))


def loss_curve(steps: int, *, shift: float = 0.0) -> tuple[float, ...]:
    """Return a falling curve; `shift` raises the later steps by that share."""
    return tuple((1.5 + 4.3 * 0.93**step) * (1 + shift * step / steps) for step in range(steps))


def _measured(plan: Plan, point: Point, rate: float, gpu: Gpu | None, device_name: str) -> PointRecord:
    """Measure steps that process `rate` tokens per second of a device, give or take one percent."""
    seconds = plan.training.global_batch * plan.shape.sequence / point.world_size / rate
    losses = loss_curve(plan.training.steps, shift=1e-5 * point.world_size)
    steps = tuple(
        StepMetrics(
            point=point.id,
            step=place + 1,
            loss=loss,
            seconds=seconds * (1, 0.992, 1.009)[place % 3],
            timed=place >= plan.training.warmup_steps,
        )
        for place, loss in enumerate(losses)
    )
    result = PointResult(
        point=point.id,
        parameters=int(plan.fingerprint["parameters"]),
        microbatch=point.microbatches[-1],
        steps=steps,
        peak_memory_bytes=93 << 30 if gpu else 2 << 30,
        device_name=device_name,
        device_memory_bytes=gpu.device_memory_bytes if gpu else 0,
        attention_backend="flash" if gpu else "math",
        parallelism="fsdp2" if point.world_size > 1 else "single",
        data_hash="a" * 64,
        order_hash="b" * 64,
        libraries=environment_of(gpu).libraries,
    )
    attempts = [Attempt(microbatch=size, outcome="out of memory") for size in point.microbatches[:-1]]
    fits = Attempt(microbatch=result.microbatch, outcome="fits")
    return measured_point(plan=plan, point=point, result=result, attempts=(*attempts, fits), gpu=gpu)


def _stack(gpu: Gpu | None) -> LoadedStack:
    vendor = gpu.vendor if gpu else "cpu"
    name = loaded_recipe().recipe.stacks.current[vendor]
    stack = Stack(name=name, vendor=vendor, title=name, python=">=3.11", image=f"twinrun/{name}")
    return LoadedStack(stack=stack, folder=f"images/stacks/{name}", lock_sha256="4" * 64)


def machine_of(gpu: Gpu | None, count: int) -> Machine:
    """Return a machine with `count` devices of a model, or with none."""

    def device(index: int) -> Device:
        assert gpu is not None
        return Device(
            index=index,
            name=gpu.name,
            gpu=gpu.id,
            arch=gpu.arch,
            memory_bytes=gpu.device_memory_bytes,
            unique_id=None,
            driver="570.86",
        )

    return Machine(
        vendor=gpu.vendor if gpu else "cpu",
        devices=tuple(device(index) for index in range(count)) if gpu else (),
        driver="570.86" if gpu else None,
        host="node-1",
        cpu="An Example Processor",
        cpu_count=16,
        memory_bytes=128 << 30,
        kernel="6.1.0",
        probe="asked",
    )


def environment_of(gpu: Gpu | None) -> Environment:
    """Return the software of a run on a model."""
    libraries = {"python": "3.11.7", "torch": "2.7.0", "composer": "0.32.1", "streaming": "0.13.0"}
    return Environment(
        python="3.11.7",
        libraries=libraries | {"collectives": "NCCL 2.26.2" if gpu else "Gloo of PyTorch 2.7.0"},
        lock_differences={},
        image_digest=None,
        variables={"OMP_NUM_THREADS": "1"},
    )
