"""The flow of `invoke run`: provision, run each point, record, judge, report."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from twinrun import __version__, engines, launchers
from twinrun.cache import cache_root
from twinrun.discovery import load_part
from twinrun.engine import Engine, Site
from twinrun.environment import Installed, inspect, lock_differences, revision, steering_variables
from twinrun.errors import InputError, Interrupted
from twinrun.files import sha256_of_file, write_atomically
from twinrun.hardware import load_gpus
from twinrun.job import BenchPlan, Plan
from twinrun.judge import judge
from twinrun.kernels import PROCESSOR, kernel_variables, package_folders
from twinrun.manifest import Frozen, load_json
from twinrun.measure import measured_case, measured_point
from twinrun.points import METRICS, BenchRunner, Ranks, Runner
from twinrun.preparation import prepared_data
from twinrun.progress import Display
from twinrun.record import BenchRecord, CaseRecord, Environment, PointRecord, Record, write_record
from twinrun.selection import Selection
from twinrun.sizing import Case, Place, Point
from twinrun.training import PointResult


class Measured(Frozen):
    """A finished point as it waits in the run folder for the others."""

    plan_sha256: str
    point: PointRecord | CaseRecord
    libraries: dict[str, str]


Step = Callable[[Place], Measured]


def execute(
    *, root: Path, selection: Selection, out: Path | None, resume: bool, display: Display
) -> tuple[Record | BenchRecord, Path]:
    """Run the plan and return its judged record with the run folder.

    Raises:
        MachineError, RunError: see their classes.
        Interrupted: Ctrl-C; what is finished stays and `--resume` goes on.
    """
    plan = selection.plan
    run = _run_folder(root, plan, out=out, resume=resume)
    write_atomically(run / "plan.json", plan.model_dump_json(indent=1) + "\n")
    display.say(f"run folder: {run}")
    try:
        record = _measure(root, selection, run, display)
    except KeyboardInterrupt:
        done = len(_finished(run, plan))
        raise Interrupted(
            f"stopped with {done} of {len(plan.points)} points finished",
            place=str(run),
            hint="the same command with --resume runs the points that are left",
        ) from None
    write_record(run / "record.json", record)
    return record.sealed(), run


def _measure(root: Path, selection: Selection, run: Path, display: Display) -> Record | BenchRecord:
    plan, part = selection.plan, load_part(engines, selection.plan.engine)
    baked = selection.stack.stack.kernels if part.RUNS_IMAGES else ()
    carried = [name for name in selection.recipe.recipe.kernels if name not in baked]
    site = Site(root=root, run=run, data=cache_root() / "data", packages=package_folders(root, carried))
    site.data.mkdir(parents=True, exist_ok=True)
    opener: Callable[..., Engine] = part.open_engine
    engine = opener(stack=selection.stack, vendor=selection.vendor, site=site, say=display.say)
    installed = inspect(engine)
    ranks = Ranks(
        plan=plan,
        engine=engine,
        launcher=load_part(launchers, plan.launcher),
        site=site,
        cores=selection.machine.cpu_count,
        variables=kernel_variables(
            site, archs=selection.stack.stack.archs or (PROCESSOR,), engine=engine, say=display.say
        ),
    )
    if isinstance(plan, BenchPlan):
        one = _measuring(selection, plan, ranks, display)
    else:
        one = _training(selection, plan, ranks, _data(plan, installed, engine, site, display), display)
    measured = _all_points(plan, one, run, display)
    if not (run / METRICS).exists():
        raise InputError("nothing was measured", place=str(run), hint="no case has what --set left")
    environment = Environment(
        python=installed.python,
        libraries=measured[-1].libraries,
        lock_differences=lock_differences(installed, selection.stack, root),
        image_digest=engine.image_digest,
        variables=steering_variables(os.environ),
    )
    return _record(root, selection, run, [item.point for item in measured], environment)


def _data(plan: Plan, installed: Installed, engine: Engine, site: Site, display: Display) -> Path:
    return prepared_data(
        source=plan.data,
        name=plan.training.data,
        sequence=plan.shape.sequence,
        python=installed.python,
        engine=engine,
        site=site,
        log=site.run / "log" / "data.log",
        say=display.say,
    )


def _training(selection: Selection, plan: Plan, ranks: Ranks, data: Path, display: Display) -> Step:
    """Return what trains one point of a sweep."""
    runner = Runner(plan=plan, ranks=ranks, data=data, display=display)

    def train(point: Place) -> Measured:
        assert isinstance(point, Point)
        result, attempts = runner.run(point)
        _check_parameters(plan, result)
        record = measured_point(plan=plan, point=point, result=result, attempts=attempts, gpu=selection.gpu)
        display.end(point.id, status=summary(record))
        return Measured(plan_sha256=plan.sha256(), point=record, libraries=result.libraries)

    return train


def _measuring(selection: Selection, plan: BenchPlan, ranks: Ranks, display: Display) -> Step:
    """Return what measures one case of a benchmark."""
    runner = BenchRunner(plan=plan, ranks=ranks, accelerator=bool(selection.machine.devices), display=display)

    def measure(case: Place) -> Measured:
        assert isinstance(case, Case)
        result = runner.run(case)
        record = measured_case(case=case, result=result)
        display.end(case.id, status=f"{len(record.measurements)} measurements")
        return Measured(plan_sha256=plan.sha256(), point=record, libraries=result.libraries)

    return measure


def _all_points(plan: Plan | BenchPlan, one: Step, run: Path, display: Display) -> list[Measured]:
    finished = _finished(run, plan)
    for point in plan.points:
        if point.id in finished:
            display.say(f"{point.id}: finished before, not run again")
            continue
        finished[point.id] = one(point)
        write_atomically(_measured_file(run, point.id), finished[point.id].model_dump_json(indent=1) + "\n")
    return [finished[point.id] for point in plan.points]


def summary(point: PointRecord) -> str:
    """Return the result of a point in one line."""
    flops = point.model_flops.rate
    return (
        f"{flops.median:.4g} model {flops.unit} per {flops.per}, {point.tokens_per_second.median:,.0f}"
        f" tokens/s per device, microbatch {point.microbatch}, loss {point.losses[-1]:.4f}"
    )


def _record(
    root: Path,
    selection: Selection,
    run: Path,
    points: Sequence[PointRecord | CaseRecord],
    environment: Environment,
) -> Record | BenchRecord:
    plan = selection.plan
    shared: dict[str, Any] = {
        "twinrun": __version__,
        "run": run.name,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "plan_sha256": plan.sha256(),
        "revision": revision(root),
        "machine": selection.machine,
        "gpu": selection.gpu,
        "environment": environment,
        "verdicts": (),
        "files": {name: sha256_of_file(run / name) for name in ("plan.json", METRICS)},
    }
    record: Record | BenchRecord
    if isinstance(plan, BenchPlan):
        cases = tuple(point for point in points if isinstance(point, CaseRecord))
        record = BenchRecord(plan=plan, points=cases, **shared)
    else:
        trained = tuple(point for point in points if isinstance(point, PointRecord))
        record = Record(plan=plan, points=trained, **shared)
    verdicts = judge(record, selection.recipe.published, load_gpus(root))
    return record.model_copy(update={"verdicts": verdicts})


def _run_folder(root: Path, plan: Plan | BenchPlan, *, out: Path | None, resume: bool) -> Path:
    base = (out or root / "runs").resolve() / plan.recipe
    mark = plan.sha256()[:8]
    if resume:
        unfinished = [
            folder
            for folder in sorted(base.glob(f"*-{mark}"))
            if (folder / "plan.json").is_file() and not (folder / "record.json").exists()
        ]
        if not unfinished:
            raise InputError(
                "no unfinished run of this plan",
                place=str(base),
                found=f"plan {mark}",
                hint="leave --resume out to start one; a changed option or file makes another plan",
            )
        return unfinished[-1]
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    return base / f"{stamp}-{mark}"


def _finished(run: Path, plan: Plan | BenchPlan) -> dict[str, Measured]:
    files = {point.id: _measured_file(run, point.id) for point in plan.points}
    loaded = {name: load_json(file, Measured) for name, file in files.items() if file.is_file()}
    return {name: item for name, item in loaded.items() if item.plan_sha256 == plan.sha256()}


def _measured_file(run: Path, point: str) -> Path:
    return run / "points" / f"{point}.json"


def _check_parameters(plan: Plan, result: PointResult) -> None:
    expected = plan.fingerprint["parameters"]
    assert result.parameters == expected, f"the ranks count {result.parameters} parameters, not {expected}"
