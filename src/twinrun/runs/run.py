"""The flow of `invoke run`: provision, run each point, record, judge."""

from __future__ import annotations

import contextlib
import datetime
import errno
import os
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from twinrun import __version__
from twinrun.execution.engine import Engine
from twinrun.execution.environment import inspect, lock_differences, revision, steering_variables
from twinrun.execution.kernels import PROCESSOR, kernel_variables
from twinrun.execution.ranks import METRICS, Ranks
from twinrun.foundation.cache import prune_bytecode
from twinrun.foundation.errors import InputError, RunInterruptedError
from twinrun.foundation.files import real, sha256_of_file, write_atomically
from twinrun.foundation.locks import locked
from twinrun.machine.architecture import architectures_needed
from twinrun.planning.plan import Plan
from twinrun.planning.project import Project
from twinrun.protocol.allocation import Allocation
from twinrun.results.finished_run import FinishedRun
from twinrun.results.judge import judged
from twinrun.results.judged import measured_points
from twinrun.results.record import Environment, Record, write_record
from twinrun.runs.checkpointing import check_legs, demand_signatures
from twinrun.runs.data import prepared_data, take_documents
from twinrun.runs.launches import rank_commands, shared_settings, workspace_of
from twinrun.runs.models import prepared_model
from twinrun.runs.preconditions import demand_interpreter
from twinrun.runs.progress import Display
from twinrun.runs.selection import Selection
from twinrun.runs.sweep import PointOutcome, SweepRun, finished

LOCK = ".lock"
# Changed files that a record names, of an environment that is not as installed.
NAMED_FILES = 20


def execute(
    project: Project,
    selection: Selection,
    *,
    out: Path | None,
    resume: bool,
    display: Display,
    detach: bool = False,
) -> FinishedRun | Path:
    """Run the plan and return the finished run, judged; or the run folder where its jobs go on.

    Args:
        detach: submit and return, unless all has ended that was submitted before.

    Raises:
        MachineError, RunError: see their classes.
        Interrupted: Ctrl-C; what is finished stays and `--resume` goes on.
    """
    plan = selection.plan
    check_legs(selection.checkpointing, plan=plan, resume=resume)
    prune_bytecode()
    with _run_folder(project.root, plan, out=out, resume=resume) as run:
        demand_signatures(project.root, selection.checkpointing, plan=plan, run=run, signed=selection.signed)
        write_atomically(run / "plan.json", plan.model_dump_json(indent=1) + "\n")
        display.say(f"run folder: {run}")
        try:
            record = _measure(project, selection, run, display, detach=detach)
        except KeyboardInterrupt:
            done = len(finished(run, plan, workload=selection.workload))
            raise RunInterruptedError(
                f"stopped with {done} of {len(plan.points)} points finished",
                place=str(run),
                hint="the same command with --resume runs the points that are left",
            ) from None
        if record is None:
            return run
        write_record(run / "record.json", record)
    return FinishedRun(record=judged(record, project), folder=run, file=run / "record.json")


def _measure(
    project: Project, selection: Selection, run: Path, display: Display, *, detach: bool
) -> Record | None:
    workspace = workspace_of(project, selection, run)
    workspace.data.mkdir(parents=True, exist_ok=True)
    engine = selection.engine.open_engine(
        stack=selection.stack, vendor=selection.vendor, workspace=workspace, say=display.say
    )
    demand_interpreter(project, selection, engine)
    changed = _changed_files(engine, display)
    installed = inspect(engine)
    kernels = kernel_variables(workspace, archs=_archs(project, selection), engine=engine, say=display.say)
    commands = rank_commands(selection, renderer=engine, workspace=workspace, variables=kernels)
    data, documents = (
        prepared_data(
            request,
            recipe=selection.recipe.folder,
            python=installed.python,
            engine=engine,
            workspace=workspace,
            log=run / "log" / "data.log",
            say=display.say,
        )
        if request
        else None
        for request in (selection.description.data, selection.description.documents)
    )
    if given := selection.description.given_documents:
        take_documents(given)
    if model := selection.description.model:
        prepared_model(model, say=display.say)
    sweep = SweepRun(
        selection=selection,
        ranks=Ranks(engine=engine, commands=commands),
        workspace=workspace,
        shared=shared_settings(selection, run=run, data=data, documents=documents, inside=engine.inside),
        display=display,
    )
    done = sweep.submit() if detach else sweep.finish()
    if len(done) < len(selection.plan.points):
        return None
    measured = measured_points(selection.plan, tuple(one.point for one in done), selection.gpu)
    if not any(one.measurements or one.checks for one in measured):
        raise InputError("nothing was measured", place=str(run), hint="no point has what --set left")
    site = selection.site
    environment = Environment(
        lock_differences=lock_differences(installed, selection.stack, project.root),
        changed_files=changed,
        image_digest=engine.image_digest,
        variables=steering_variables(os.environ | (site.site.environment if site else {})),
    )
    return _record(project, selection.plan, run, done, environment)


def _changed_files(engine: Engine, display: Display) -> dict[str, str]:
    """Return the files of an environment that are not as installed, as many as a record names; say so."""
    changed = engine.changed_files()
    named = dict(list(changed.items())[:NAMED_FILES])
    for name, what in named.items():
        display.say(f"{name}: {what}")
    if len(changed) > len(named):
        named["..."] = f"{len(changed) - len(named)} more"
    if changed:
        display.say(
            "files of the environment were changed since it was installed: the record says so, and no results"
            " folder takes it. Remove the environment, and the package from uv's cache, to install it again."
        )
    return named


def _archs(project: Project, selection: Selection) -> tuple[str, ...]:
    """Return the architectures to compile kernels for; another host's devices are not known here."""
    built = selection.stack.stack.archs
    if not selection.site:
        built = architectures_needed(
            built=built, machine=selection.machine, vendor=selection.vendor, gpus=project.gpus
        )
    return built or (PROCESSOR,)


def _record(
    project: Project, plan: Plan, run: Path, done: Sequence[PointOutcome], environment: Environment
) -> Record:
    """Return the record of the finished points of a run."""
    left = ("plan.json", METRICS, *plan.description.files)
    return Record(
        twinrun=__version__,
        run=run.name,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        plan=plan,
        revision=revision(project.root),
        allocation=_allocation([one.allocation for one in done]),
        environment=environment,
        points=tuple(one.point for one in done),
        files={name: sha256_of_file(run / name) for name in left if (run / name).exists()},
    ).with_digest()


def _allocation(allocations: Sequence[Allocation]) -> Allocation:
    """Return all nodes of a run's points as one allocation."""
    nodes = dict.fromkeys(node for one in allocations for node in one.nodes)
    reports = {host: report for one in allocations for host, report in one.reports.items()}
    return allocations[-1].model_copy(update={"nodes": tuple(nodes), "reports": reports})


@contextlib.contextmanager
def _run_folder(root: Path, plan: Plan, *, out: Path | None, resume: bool) -> Iterator[Path]:
    """Yield the folder of the run, which is nobody else's until it ends.

    Raises:
        InputError: nothing to resume, or the run that would be resumed is alive.
        MachineError: the file system has no locks.
    """
    base = real(out or root / "runs") / plan.recipe
    run = _unfinished(base, plan) if resume else _fresh(base, plan)
    busy = InputError(
        "another process is running this run",
        place=str(run),
        found="another process holds its lock",
        hint="wait until it ends, or leave --resume out to start one beside it",
    )
    with locked(run / LOCK, busy=busy):
        yield run


def _fresh(base: Path, plan: Plan) -> Path:
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    # Runs of one plan may start in the same second, also on machines that share the folder.
    run = base / f"{stamp}-{plan.sha256()[:8]}-{uuid.uuid4().hex[:4]}"
    try:
        run.mkdir(parents=True)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise InputError(
            "a link leads to itself", place="--out", found=str(base), allowed="a folder"
        ) from None
    return run


def _unfinished(base: Path, plan: Plan) -> Path:
    mark = plan.sha256()[:8]
    found = [
        folder
        for folder in sorted(base.glob(f"*-{mark}-*"))
        if (folder / "plan.json").is_file() and not (folder / "record.json").exists()
    ]
    if not found:
        raise InputError(
            "no unfinished run of this plan",
            place=str(base),
            found=f"plan {mark}",
            hint="leave --resume out to start one; a changed option or file makes another plan,"
            " and so do nodes that have gone down: --set nodes=... names the points",
        )
    return found[-1]
