"""Small records for tests, made as a run makes them: measured numbers, and what follows from those."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from twinrun.manifests.published import PublishedClaims
from twinrun.manifests.vendor import Gpu
from twinrun.planning.plan import Plan, resolve
from twinrun.planning.project import Project
from twinrun.protocol.allocation import Allocation, NodeReport
from twinrun.protocol.machine import Device, Machine, Revision
from twinrun.protocol.measurements import Measurement, Series, sampled
from twinrun.results.between import verdicts_between
from twinrun.results.bounds import excesses
from twinrun.results.conditions import Findings
from twinrun.results.judge import RULES, claims_digest, verdicts_on
from twinrun.results.judge import judge as judge_whole
from twinrun.results.reading import read_record
from twinrun.results.record import Environment, Record
from twinrun.results.verdicts import Verdict
from twinrun.workloads import load_workload
from twinrun.workloads.workload import Hardware, PointRecord

ROOT = Path(__file__).resolve().parents[1]
PROJECT = Project(ROOT)
TRAINING, BENCH = "mpt7b-scaling", "mamba-kernels"
RECIPE = TRAINING
PROCESSOR = "a processor"
# Names of devices whose rows are called otherwise.
NAMES = (
    *("NVIDIA H100 80GB HBM3", "NVIDIA H100 96GB", "NVIDIA H100 PCIe", "NVIDIA A100-SXM4-80GB"),
    *("NVIDIA A100-PCIE-40GB", "NVIDIA A100 80GB PCIe", "NVIDIA GH200 480GB"),
)


def warmed(*values: float) -> tuple[float, ...]:
    """Return a curve that falls by one in the published warm-up of 100 steps, and then has `values`."""
    return (*(values[0] + 1 - step / 100 for step in range(100)), *values)


LOSSES = warmed(4.0, 3.0, 2.5, 2.2, 2.0)


@cache
def committed(recipe: str, name: str) -> Record:
    """Return a committed record of a recipe."""
    return read_record(ROOT / "recipes" / recipe / "results" / f"{name}.json", PROJECT)


def hardware(gpu: str | None, devices: int = 8) -> Hardware:
    """Return the hardware of a plan."""
    row = PROJECT.gpus[gpu] if gpu else None
    memory = row.device_memory_bytes if row else None
    return Hardware(
        gpu=row, device_memory_bytes=memory, devices=devices if row else 0, cores=2, processor="cpu"
    )


def plan(
    recipe: str = TRAINING,
    *,
    scale: str = "paper",
    gpu: str | None = "mi250",
    devices: int = 8,
    settings: tuple[str, ...] = (),
    project: Project = PROJECT,
    leg: int | None = None,
    stack: str | None = None,
) -> Plan:
    """Return a plan for a stack, else for the current one of a GPU's vendor or of the processor."""
    loaded = project.recipe(recipe)
    vendor = project.gpus[gpu].vendor if gpu else "cpu"
    made, _ = resolve(
        loaded,
        workload=load_workload(loaded.workload),
        scale=scale,
        settings=settings,
        stack=project.stack(stack or loaded.recipe.stacks.current[vendor]),
        hardware=hardware(gpu, devices),
        engine="host",
        launcher="torchrun",
        scheduler="local",
        leg=leg,
    )
    return made


def training_record(
    rates: Mapping[str, float],
    *,
    recipe: str = TRAINING,
    gpu: str | None = "mi250",
    scale: str = "paper",
    settings: tuple[str, ...] = (),
    spread: float = 0.0,
    count: int = 20,
    losses: Sequence[float] | Mapping[str, Sequence[float]] = LOSSES,
    orders: Mapping[str, str] | None = None,
) -> Record:
    """Return a judged record of a sweep.

    Args:
        rates: model TFLOP/s of a device, by point.
        spread: how far the slowest and fastest step are from the median, over it.
    """
    made = plan(recipe, scale=scale, gpu=gpu, settings=settings, devices=8)
    row = PROJECT.gpus[gpu] if gpu else None
    shape, training = made.part.shape, made.part.training
    memory = 60.0 if row is None or row.device_memory_bytes > 60e9 else 30.0
    points = []
    for point in made.points:
        if point.id not in rates:
            continue
        flops = shape.flops_per_token() * training.global_batch * shape.sequence
        seconds = flops / (rates[point.id] * 1e12 * point.world_size)
        samples = [seconds] * count
        if count > 1:
            samples[0], samples[-1] = seconds * (1 - spread), seconds * (1 + spread)
        curve = losses[point.id] if isinstance(losses, Mapping) else losses
        if (leg := point.part.leg) and not leg.last:
            curve = curve[: leg.end]
        record = PointRecord(
            id=point.id,
            nodes=point.nodes,
            devices=point.world_size,
            hosts=tuple(f"node-{number}" for number in range(point.nodes)),
            part=point.part,
            measurements=(
                sampled("step-time", samples, metric="step-time", unit="s", per="run"),
                sampled("peak-memory", [memory], metric="peak-memory", unit="GiB", per="device"),
            ),
            series=(Series(id="loss", metric="loss", unit="nats/token", per="run", values=tuple(curve)),),
            facts={
                "microbatch": point.part.microbatches[-1],
                "parameters": shape.parameters(),
                "parallelism": "fsdp2",
                "attention backend": "flash",
                "device name": f"a {point.part.leg.vendor} device" if point.part.leg else "a device",
                "warm-up steps": 2,
                "data hash": "d" * 64,
                "order hash": (orders or {}).get(point.id, "0" * 64),
            },
        )
        points.append(with_derived(record, made, row))
    return finished(made, points, row)


def bench_record(
    times: Mapping[str, Sequence[float]],
    *,
    gpu: str | None = "mi250",
    point: str = "2x4096x5376x16",
    facts: Mapping[str, Any] | None = None,
) -> Record:
    """Return a judged record of one case; `times` are in ms by measurement, such as `NAME@BASELINE`."""
    made = plan(BENCH, gpu=gpu)
    row = PROJECT.gpus[gpu] if gpu else None
    placed = next(one for one in made.points if one.id == point)
    found = []
    for name, samples in times.items():
        call, _, baseline = name.partition("@")
        labels = {"call": call, "implementation": baseline or "ours"}
        found.append(sampled(name, samples, metric="time", unit="ms", per="device", labels=labels))
    record = PointRecord(
        id=placed.id,
        nodes=1,
        devices=1,
        hosts=("node-0",),
        part=placed.part,
        measurements=tuple(found),
        facts={"device name": "a device", "version of ours": "1", **(facts or {})},
    )
    return finished(made, [with_derived(record, made, row)], row)


def with_derived(point: PointRecord, made: Plan, gpu: Gpu | None) -> PointRecord:
    """Return the point with what follows from its measured numbers."""
    derived = load_workload(made.workload).derived(made.part, point, gpu)
    return point.model_copy(update={"measurements": (*point.measurements, *derived)})


def finished(made: Plan, points: Sequence[PointRecord], gpu: Gpu | None) -> Record:
    """Return the judged record of measured points, on hosts that have as many devices as they need."""
    published = PROJECT.recipe(made.recipe).published
    digest = made.sha256()
    record = Record(
        twinrun="0",
        run=f"20260101-000000-{digest[:8]}-0000",
        created="2026-01-31T00:00:00+00:00",
        plan=made,
        plan_sha256=digest,
        claims_sha256=claims_digest(published),
        rules=RULES,
        revision=Revision(commit="c" * 40, changes_sha256=None),
        machine=machine(made.vendor, gpu, devices=_per_node(made)),
        allocation=_allocation(made, gpu),
        gpu=gpu,
        environment=Environment(
            python="3.11.9",
            libraries={"python": "3.11.9", "torch": _torch(made)},
            lock_differences={},
            image_digest=None,
            variables={},
        ),
        points=tuple(_named(point, made, gpu) for point in points),
        verdicts=(),
        files=dict.fromkeys(("plan.json", "metrics.jsonl"), "f" * 64),
    )
    return record.model_copy(update={"verdicts": judge_whole(record, published, PROJECT)}).with_digest()


def judge(record: Record, published: PublishedClaims, project: Project = PROJECT) -> tuple[Verdict, ...]:
    """Judge what a record says, without the account of all that a test leaves out of it."""
    return verdicts_on(record, published, project, Findings(excesses=excesses(record, project)))


def verdict_on(record: Record, claim: str) -> Verdict:
    """Return what `judge` says of one claim of the record's recipe."""
    published = PROJECT.recipe(record.plan.recipe).published
    return next(one for one in judge(record, published) if one.claim == claim)


def judge_between(records: Sequence[Record], project: Project = PROJECT) -> tuple[Verdict, ...]:
    """Judge the claims between records, as `judge` does those about one."""
    own = [one.model_copy(update={"run": f"{one.run[:-4]}{number:04}"}) for number, one in enumerate(records)]
    return verdicts_between(own, project, {one.run: Findings(excesses=excesses(one, project)) for one in own})


def _per_node(made: Plan) -> int:
    return max((point.devices_per_node for point in made.points), default=1)


def _torch(made: Plan) -> str:
    return PROJECT.stack(made.stack).locked(ROOT)["torch"][0]


def device_name(gpu: Gpu | None) -> str:
    """Return what a framework calls a GPU, or a processor where there is none."""
    if gpu is None:
        return PROCESSOR
    names = (gpu.name, f"NVIDIA {gpu.id[:4].upper()}", *NAMES)
    return next(name for name in names if any(one.search(name) for one in gpu.match))


def _named(point: PointRecord, made: Plan, gpu: Gpu | None) -> PointRecord:
    """Return a point whose ranks saw the devices of its hosts, where a test says nothing of them."""
    planned = {one.id: one.part for one in made.points}
    leg = getattr(planned[point.id], "leg", None)
    name = PROCESSOR if leg and leg.processor else device_name(gpu)
    placeholder = str(point.facts.get("device name", "a device")).startswith(("a ", "one"))
    return point.model_copy(update={"facts": point.facts | ({"device name": name} if placeholder else {})})


def _allocation(made: Plan, gpu: Gpu | None) -> Allocation:
    nodes = tuple(f"node-{number}" for number in range(max((one.nodes for one in made.points), default=1)))
    host = machine(made.vendor, gpu, devices=_per_node(made))
    report = NodeReport(
        cpu=host.cpu,
        cores=host.cpu_count,
        memory_bytes=host.memory_bytes,
        kernel=host.kernel,
        devices=tuple(one.name for one in host.devices),
        driver=host.driver,
        interfaces=(),
        transport={},
        software_sha256="5" * 64,
    )
    return Allocation(scheduler=made.scheduler, nodes=nodes, reports=dict.fromkeys(nodes, report))


def machine(vendor: str, gpu: Gpu | None = None, *, devices: int = 0) -> Machine:
    """Return the first host of a run, with the devices that one of its nodes has."""
    return Machine(
        vendor=vendor,
        devices=tuple(_device(gpu, number) for number in range(devices)) if gpu else (),
        driver="1.2.3",
        host="node-0",
        cpu=PROCESSOR,
        cpu_count=8,
        memory_bytes=1 << 36,
        kernel="6.1",
        probe="none asked",
    )


def _device(gpu: Gpu, number: int) -> Device:
    return Device(
        index=number,
        name=device_name(gpu),
        gpu=gpu.id,
        arch=gpu.arch,
        memory_bytes=gpu.device_memory_bytes,
        unique_id=f"GPU-{number}",
        driver="1.2.3",
    )


def replaced(record: Record, point: str, **fields: Any) -> Record:
    """Return the record with fields of one point changed."""
    points = tuple(one.model_copy(update=fields) if one.id == point else one for one in record.points)
    return record.model_copy(update={"points": points})


def measurement(record: Record, point: str, name: str) -> Measurement:
    """Return one measurement of a record."""
    found = record.point(point)
    assert found
    one = found.measurement(name)
    assert one
    return one
