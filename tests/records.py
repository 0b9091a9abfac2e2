"""Small records for tests, made as ranks send them: typed results with every sample, and judged."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from twinrun.manifests.settings import parse_settings
from twinrun.manifests.vendor import Gpu
from twinrun.planning.plan import Plan, resolve
from twinrun.planning.project import Project
from twinrun.protocol.allocation import Allocation, Device, Machine, NodeDevice, NodeReport, Revision
from twinrun.protocol.bench import BenchResult, Call, Implementation, PeakRate, Work
from twinrun.protocol.job import PowerSource, Result
from twinrun.protocol.measurements import Measurement
from twinrun.protocol.training import Step, TrainingResult
from twinrun.results.judge import judged
from twinrun.results.judged import Judged
from twinrun.results.reading import read_record
from twinrun.results.record import Environment, Record, content_digest
from twinrun.results.verdicts import Verdict
from twinrun.workloads.workload import Hardware, PlanRequest, Point, PointRecord

ROOT = Path(__file__).resolve().parents[1]
PROJECT = Project(ROOT)
TRAINING, BENCH = "mpt7b-scaling", "mamba-kernels"
RECIPE = TRAINING
PROCESSOR = "a processor"
RECORDS = ROOT / "tests" / "data" / "records"
"""Records of real smoke runs on a processor, one a recipe."""


def smoke(recipe: str) -> dict[str, Any]:
    """Return what the file of a smoke run says."""
    content: dict[str, Any] = json.loads((RECORDS / f"{recipe}.json").read_text(encoding="utf-8"))
    return content


def smoke_record(recipe: str) -> Judged:
    """Return the judged record of a smoke run."""
    return read_record(RECORDS / f"{recipe}.json", PROJECT)


def sealed(content: dict[str, Any]) -> dict[str, Any]:
    """Return what a record's file says, with the digest that whoever edits it computes anew."""
    return content | {"sha256": content_digest(content)}


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
    chosen = project.stack(stack or loaded.recipe.stacks.current[vendor])
    asked = PlanRequest(
        recipe=loaded,
        scale=scale,
        overrides=parse_settings(settings),
        stack=chosen,
        hardware=hardware(gpu, devices).model_copy(update={"vendor": chosen.stack.vendor}),
        leg=leg,
    )
    return resolve(asked, engine="host", launcher="torchrun", scheduler="local")[0]


def falling(vocabulary: int, steps: int) -> tuple[float, ...]:
    """Return a curve of a training that learns: from guessing down by a third, each step another loss."""
    first = math.log(vocabulary) + 0.3
    return tuple(first * (1 - step / (3 * steps)) for step in range(steps))


# The losses of MPT-7B at the paper scale.
LOSSES = falling(50368, 30)


def training_record(
    rates: Mapping[str, float],
    *,
    recipe: str = TRAINING,
    gpu: str | None = "mi250",
    scale: str = "paper",
    settings: tuple[str, ...] = (),
    spread: float = 0.0,
    watts: float | None = None,
    losses: Sequence[float] | Mapping[str, Sequence[float]] = (),
    controls: Mapping[str, Sequence[Sequence[float]]] | None = None,
    orders: Mapping[str, str] | None = None,
    project: Project = PROJECT,
    **fields: Any,
) -> Judged:
    """Return a judged record of a sweep, of the points that have a rate.

    Args:
        rates: model TFLOP/s of a device, by point.
        spread: how far the slowest and fastest step are from the median, over it.
        losses: of every point, or by point; those of a training that learns when left out.
        fields: further fields of the record.
    """
    made = plan(recipe, scale=scale, gpu=gpu, settings=settings, project=project)
    made = made.model_copy(update={"points": tuple(one for one in made.points if one.id in rates)})
    sent = []
    for point in made.points:
        shape, training = point.part.shape or made.part.shape, made.part.training
        flops = shape.flops_per_token() * training.global_batch * shape.sequence
        seconds = flops / (rates[point.id] * 1e12 * point.world_size)
        curve = losses[point.id] if isinstance(losses, Mapping) else losses
        leg, curve = point.part.leg, curve or falling(shape.vocabulary, training.steps)
        begin, curve = (leg.begin, curve[: leg.end]) if leg else (0, curve)
        ends = {begin + training.warmup_steps + 1: 1 - spread, len(curve): 1 + spread}
        steps = tuple(
            Step(
                step=number,
                loss=loss,
                seconds=seconds * ends.get(number, 1),
                timed=number > begin + training.warmup_steps,
                watts=watts,
            )
            for number, loss in enumerate(curve, start=1)
        )
        row = PROJECT.gpus[gpu] if gpu else None
        result = TrainingResult(
            point=point.id,
            device_name=_name(None if leg and leg.processor else row),
            libraries=_libraries(made),
            parameters=shape.parameters(),
            microbatch=point.part.microbatches[0],
            steps=steps,
            peak_memory_bytes=int(row.device_memory_bytes * 0.9) if row else 30 << 30,
            device_memory_bytes=row.device_memory_bytes if row else 64 << 30,
            attention_backend="flash",
            parallelism="fsdp2" if (point.part.sharding or training.sharding) == "full" else "ddp",
            data_hash="d" * 64,
            order_hash=(orders or {}).get(point.id, "a" * 64),
            weights_hash="b" * 64,
            controls=tuple(map(tuple, (controls or {}).get(point.id, ()))),
            power=PowerSource(sensor="a meter" if watts else None),
        )
        sent.append(sent_from(point, result))
    return finished(made, sent, project=project, **fields)


def bench_record(
    times: Mapping[str, Sequence[float]],
    *,
    gpu: str | None = "mi250",
    point: str = "2x4096x5376x16",
    scale: str = "paper",
    errors: Mapping[str, float] | None = None,
    work: float | None = None,
    settings: tuple[str, ...] = (),
    **fields: Any,
) -> Judged:
    """Return a judged record of one case; `times` are in ms by measurement, such as `NAME@BASELINE`.

    Args:
        errors: of our calls and of baselines, by the same names.
        work: bytes that each call moves at least.
    """
    made = plan(BENCH, gpu=gpu, scale=scale, settings=(f"cases={point}", *settings))
    loaded, calls, row = PROJECT.recipe(BENCH), [], PROJECT.gpus[gpu] if gpu else None

    def done(name: str, who: str, samples: Sequence[float]) -> Implementation:
        error = (errors or {}).get(name, 1e-4)
        return Implementation(name=who, version="1", milliseconds=tuple(samples), errors={"output": error})

    for name in (one for one in times if "@" not in one):
        values = [(label.name, value) for label in loaded.tables.label for value in label.values]
        labels = {label: value for label, value in values if value in name.split("-")}
        others = [one for one in times if one.startswith(f"{name}@")]
        calls.append(
            Call(
                name=name,
                title=name,
                labels={label.name: label.default for label in loaded.tables.label if label.default} | labels,
                work=Work(formula="bytes/own", amounts={"copy": work}) if work else None,
                allowed_error=1e-3,
                ours=done(name, "ours", times[name]),
                baselines=tuple(done(one, one.partition("@")[2], times[one]) for one in others),
            )
        )
    peaks = (PeakRate(resource="copy", rate=row.device_bandwidth_bytes_s * 0.9, how="a copy"),) if row else ()
    result = BenchResult(
        point=point,
        device_name=_name(row),
        libraries=_libraries(made),
        seed=1,
        peak_rates=peaks,
        calls=tuple(calls),
        device_memory_bytes=1 << 36,
        peak_memory_bytes=1 << 30,
    )
    return finished(made, [sent_from(made.points[0], result)], **fields)


def finished(made: Plan, sent: Sequence[PointRecord], *, project: Project = PROJECT, **fields: Any) -> Judged:
    """Return the judged record of points, on hosts that have as many devices as they need."""
    row = PROJECT.gpus[made.gpu] if made.gpu else None
    nodes = tuple(dict.fromkeys(host for point in sent for host in point.hosts)) or ("node-0",)
    most = max((point.devices_per_node for point in made.points), default=1)
    device = NodeDevice(name=_name(row), arch=row.arch, memory_bytes=row.device_memory_bytes) if row else None
    report = NodeReport(
        cpu=PROCESSOR,
        cores=8,
        memory_bytes=1 << 37,
        kernel="6.1",
        devices=(device,) * most if device else (),
        driver="1.2.3",
        interfaces=(),
        transport={},
        software_sha256="5" * 64,
    )
    record = Record(
        **{
            "twinrun": "0",
            "run": f"20261101-000000-{made.sha256()[:8]}-0000",
            "created": "2026-11-21T00:00:00+00:00",
            "plan": made,
            "revision": Revision(commit="c" * 40, changes_sha256=None),
            "allocation": Allocation(
                scheduler=made.scheduler, nodes=nodes, reports=dict.fromkeys(nodes, report)
            ),
            "environment": Environment(lock_differences={}, image_digest=None, variables={}),
            "points": tuple(sent),
            "files": {},
            **fields,
        }
    )
    return judged(record.with_digest(), project)


def again(found: Judged, **fields: Any) -> Judged:
    """Return the record with other fields, judged anew."""
    return judged(found.record.model_copy(update=fields).with_digest(), PROJECT)


def replaced(found: Judged, point: str, **fields: Any) -> Judged:
    """Return the record with other fields of the result of one point, judged anew."""
    points = tuple(
        one.model_copy(update={"result": one.result.model_copy(update=fields)}) if one.id == point else one
        for one in found.record.points
    )
    return again(found, points=points)


def verdict_on(found: Judged, claim: str) -> Verdict:
    """Return the verdict on one claim."""
    return next(one for one in found.verdicts if one.claim == claim)


def finals(found: Judged) -> dict[str, str]:
    """Return the outcome that counts of each claim."""
    return {one.claim: one.final for one in found.verdicts}


def measurement(found: Judged, point: str, name: str) -> Measurement:
    """Return one measurement of a record."""
    at = found.point(point)
    one = at and at.measurement(name)
    assert one
    return one


def of_recipe(found: Judged, **published: Any) -> Judged:
    """Return the record judged by other published claims."""
    claims = found.recipe.published.model_copy(update=published)
    project = Project(found.project.root)
    loaded = found.recipe.model_copy(update={"published": claims})
    project.recipe = lambda _name: loaded  # type: ignore[method-assign,assignment]
    return judged(found.record, project)


def sent_from(point: Point, result: Result) -> PointRecord:
    """Return what the hosts of a point sent."""
    hosts = tuple(f"node-{number}" for number in range(point.nodes))
    return PointRecord(id=point.id, hosts=hosts, result=result)


def _libraries(made: Plan) -> dict[str, str]:
    return {"python": "3.11.9", "torch": PROJECT.stack(made.stack).locked(ROOT)["torch"][0]}


def _name(gpu: Gpu | None) -> str:
    return gpu.name if gpu else PROCESSOR


def machine(vendor: str, gpu: Gpu | None = None, *, devices: int = 0) -> Machine:
    """Return a host with devices of a GPU."""
    one: dict[str, Any] = {"driver": "1.2.3"}
    if gpu:
        one |= {"name": gpu.name, "gpu": gpu.id, "arch": gpu.arch, "memory_bytes": gpu.device_memory_bytes}
    return Machine(
        vendor=vendor,
        devices=tuple(Device(index=at, unique_id=f"GPU-{at}", **one) for at in range(devices)),
        driver="1.2.3" if devices else None,
        host="node-0",
        cpu=PROCESSOR,
        cpu_count=8,
        memory_bytes=1 << 36,
        kernel="6.1",
        probe="none asked",
    )
