"""The flow of `invoke run`: provision, run each point, record, judge, report."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from pathlib import Path

from twinrun import __version__, engines, launchers
from twinrun.cache import cache_root
from twinrun.discovery import load_part
from twinrun.engine import Engine, Site
from twinrun.environment import inspect, lock_differences, revision, steering_variables
from twinrun.errors import InputError, Interrupted
from twinrun.files import sha256_of_file, write_atomically
from twinrun.hardware import load_gpus
from twinrun.job import Plan
from twinrun.judge import judge
from twinrun.manifest import Frozen, load_json
from twinrun.measure import measured_point
from twinrun.points import Runner
from twinrun.preparation import prepared_data
from twinrun.progress import Display
from twinrun.record import Environment, PointRecord, Record, write_record
from twinrun.selection import Selection
from twinrun.training import PointResult


class Measured(Frozen):
    """A finished point as it waits in the run folder for the others."""

    plan_sha256: str
    point: PointRecord
    libraries: dict[str, str]


def execute(
    *, root: Path, selection: Selection, out: Path | None, resume: bool, display: Display
) -> tuple[Record, Path]:
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


def _measure(root: Path, selection: Selection, run: Path, display: Display) -> Record:
    plan = selection.plan
    site = Site(root=root, run=run, data=cache_root() / "data")
    site.data.mkdir(parents=True, exist_ok=True)
    opener: Callable[..., Engine] = load_part(engines, plan.engine).open_engine
    engine = opener(stack=selection.stack, vendor=selection.vendor, site=site, say=display.say)
    installed = inspect(engine)
    data = prepared_data(
        source=plan.data,
        name=plan.training.data,
        sequence=plan.shape.sequence,
        python=installed.python,
        engine=engine,
        site=site,
        log=run / "log" / "data.log",
        say=display.say,
    )
    runner = Runner(
        plan=plan,
        engine=engine,
        launcher=load_part(launchers, plan.launcher),
        site=site,
        data=data,
        cores=selection.machine.cpu_count,
        display=display,
    )
    measured = _all_points(selection, runner, run, display)
    environment = Environment(
        python=installed.python,
        libraries=measured[-1].libraries,
        lock_differences=lock_differences(installed, selection.stack, root),
        image_digest=engine.image_digest,
        variables=steering_variables(os.environ),
    )
    return _record(root, selection, run, tuple(item.point for item in measured), environment)


def _all_points(selection: Selection, runner: Runner, run: Path, display: Display) -> list[Measured]:
    plan = selection.plan
    finished = _finished(run, plan)
    for point in plan.points:
        if point.id in finished:
            display.say(f"{point.id}: finished before, not run again")
            continue
        result, attempts = runner.run(point)
        _check_parameters(plan, result)
        measured = Measured(
            plan_sha256=plan.sha256(),
            point=measured_point(plan=plan, point=point, result=result, attempts=attempts, gpu=selection.gpu),
            libraries=result.libraries,
        )
        write_atomically(_measured_file(run, point.id), measured.model_dump_json(indent=1) + "\n")
        finished[point.id] = measured
        display.end(point.id, status=summary(measured.point))
    return [finished[point.id] for point in plan.points]


def summary(point: PointRecord) -> str:
    """Return the result of a point in one line."""
    flops = point.model_flops.rate
    return (
        f"{flops.median:.4g} model {flops.unit} per {flops.per}, {point.tokens_per_second.median:,.0f}"
        f" tokens/s per device, microbatch {point.microbatch}, loss {point.losses[-1]:.4f}"
    )


def _record(
    root: Path, selection: Selection, run: Path, points: tuple[PointRecord, ...], environment: Environment
) -> Record:
    plan = selection.plan
    record = Record(
        twinrun=__version__,
        run=run.name,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        plan=plan,
        plan_sha256=plan.sha256(),
        revision=revision(root),
        machine=selection.machine,
        gpu=selection.gpu,
        environment=environment,
        points=points,
        verdicts=(),
        files={name: sha256_of_file(run / name) for name in ("plan.json", "metrics.jsonl")},
    )
    verdicts = judge(record, selection.recipe.published, load_gpus(root))
    return record.model_copy(update={"verdicts": verdicts})


def _run_folder(root: Path, plan: Plan, *, out: Path | None, resume: bool) -> Path:
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


def _finished(run: Path, plan: Plan) -> dict[str, Measured]:
    files = {point.id: _measured_file(run, point.id) for point in plan.points}
    loaded = {name: load_json(file, Measured) for name, file in files.items() if file.is_file()}
    return {name: item for name, item in loaded.items() if item.plan_sha256 == plan.sha256()}


def _measured_file(run: Path, point: str) -> Path:
    return run / "points" / f"{point}.json"


def _check_parameters(plan: Plan, result: PointResult) -> None:
    expected = plan.fingerprint["parameters"]
    assert result.parameters == expected, f"the ranks count {result.parameters} parameters, not {expected}"
