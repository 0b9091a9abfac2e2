"""Benchmark records for tests, made by the code that makes real ones: resolved plans, measured cases."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from tests.records import ROOT, environment_of, gpus, machine_of
from twinrun.benchmark import BenchResult, Ceiling, Measured, Settings, Timing, Work
from twinrun.hardware import Gpu
from twinrun.job import BenchPlan, resolve_bench
from twinrun.judge import judge
from twinrun.measure import measured_case
from twinrun.recipe import LoadedBench, load_any_recipe
from twinrun.record import BenchRecord, CaseRecord, Revision
from twinrun.sizing import Case
from twinrun.stack import load_stack

BENCH = "mamba-kernels"
POINT = "2x4096x5376x16"
# Milliseconds of ours and of upstream at the published shape on an H200, in round figures.
TIMES = {
    "scan-forward": (0.3, 0.8),
    "scan-backward": (1.0, 3.2),
    "conv-forward": (0.044, 0.049),
    "conv-backward": (0.066, 0.077),
    "update-step": (0.004, 0.005),
}
CEILINGS = (
    Ceiling(id="copy", rate=4.25e12, what="bytes read and written by a copy of 2048 MiB"),
    Ceiling(id="exp2", rate=4.1e12, what="exponentials in a chain"),
    Ceiling(id="fp32", rate=33e12, what="fp32 multiply-adds in a chain"),
)


@cache
def loaded_bench() -> LoadedBench:
    """Return the benchmark that the records are of."""
    loaded = load_any_recipe(ROOT, BENCH)
    assert isinstance(loaded, LoadedBench)
    return loaded


def bench_plan(*, scale: str, gpu: str | None = None, settings: tuple[str, ...] = ()) -> BenchPlan:
    """Return the plan for a machine with one device of the model `gpu`."""
    row = gpus()[gpu] if gpu else None
    loaded = loaded_bench()
    stack = load_stack(ROOT, loaded.recipe.stacks.current[row.vendor if row else "cpu"])
    return resolve_bench(
        loaded=loaded,
        scale=scale,
        settings=settings,
        # A lock that is resolved again leaves the plan as it is.
        stack=stack.model_copy(update={"lock_sha256": "0" * 64}),
        gpu=row,
        engine="venv",
        launcher="local",
    )


def bench_record(
    *, gpu: str | None = "h200", scale: str = "node", factor: float = 1.0, **choices: Any
) -> BenchRecord:
    """Return a judged record whose times are `factor` times those of an H200."""
    row = gpus()[gpu] if gpu else None
    plan = bench_plan(scale=scale, gpu=gpu, **choices)
    record = BenchRecord(
        twinrun="0.1.0",
        run=f"20260102-030405-{plan.sha256()[:8]}",
        created="2026-01-02T03:04:05+00:00",
        plan=plan,
        plan_sha256=plan.sha256(),
        revision=Revision(commit="1" * 40, changes_sha256=None),
        machine=machine_of(row, 1),
        gpu=row,
        environment=environment_of(row),
        points=tuple(_case(plan, case, row, factor) for case in plan.points),
        verdicts=(),
        files={"plan.json": "2" * 64, "metrics.jsonl": "3" * 64},
    )
    return judged_bench(record)


def judged_bench(record: BenchRecord) -> BenchRecord:
    """Return the record sealed, with the verdicts that belong to it."""
    verdicts = judge(record, loaded_bench().published, gpus())
    return record.model_copy(update={"verdicts": verdicts}).sealed()


def _case(plan: BenchPlan, case: Case, gpu: Gpu | None, factor: float) -> CaseRecord:
    timed = plan.bench.repeats > 0
    result = BenchResult(
        point=case.id,
        seed=7,
        ceilings=CEILINGS if gpu and timed else (),
        measurements=tuple(
            _measurements(case.settings, plan.bench.repeats, factor, upstream=gpu is not None)
        ),
        device_name=gpu.name if gpu else "cpu",
        device_memory_bytes=gpu.device_memory_bytes if gpu else 1 << 30,
        peak_memory_bytes=3 << 30,
        libraries=environment_of(gpu).libraries,
    )
    return measured_case(case=case, result=result)


def _measurements(settings: Any, repeats: int, factor: float, *, upstream: bool) -> Iterator[Measured]:
    for element in settings["elements"]:
        for operation in settings["operations"]:
            for phase in ("step",) if operation == "update" else ("forward", "backward"):
                yield _measured(f"{operation}-{phase}", element, settings, repeats, factor, upstream=upstream)


def _measured(
    name: str, element: str, settings: Settings, repeats: int, factor: float, *, upstream: bool
) -> Measured:
    ours, theirs = (time * factor for time in TIMES[name])
    elements = 768 if name == "update-step" else 44_040_192
    return Measured(
        id=f"{name}-{element}",
        operation=name.replace("-", ", "),
        element=element,
        way="kernels",
        work=Work(
            formula=name,
            amounts={"copy": 8.0 * elements, "fp32": 64.0 * elements, "exp2": 20.0 * elements},
        ),
        allowed_error=5e-3,
        ours=_timing("twinrun-mamba native", name, ours, repeats),
        baseline=_timing("mamba_ssm", name, theirs, repeats) if upstream else None,
        baseline_absent=None if upstream else "upstream's kernels need a GPU",
    )


def _timing(implementation: str, name: str, milliseconds: float, repeats: int) -> Timing:
    times = tuple(milliseconds * (1, 0.99, 1.02)[place % 3] for place in range(repeats))
    of_gradients: dict[str, float | None] = {"u": 1.2e-3, "delta_bias": 1.7e-3}
    return Timing(
        implementation=implementation,
        version="1.0",
        milliseconds=times,
        errors=of_gradients if name.endswith("backward") else {"out": 1.6e-3},
        kept_bytes=1 << 20,
    )
