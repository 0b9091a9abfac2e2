"""The flow of `invoke run`: provision, run each point, record, judge."""

from __future__ import annotations

import datetime
import errno
import os
from collections.abc import Sequence
from pathlib import Path

from twinrun import __version__
from twinrun.execution.engine import Engine, point_folder
from twinrun.execution.environment import (
    PROCESSOR,
    inspect,
    kernel_variables,
    lock_differences,
    steering_variables,
)
from twinrun.execution.ranks import METRICS, all_pending
from twinrun.foundation.cache import locked
from twinrun.foundation.errors import InputError, RunInterruptedError
from twinrun.foundation.files import sha256_of_file, write_atomically
from twinrun.machine.inventory import architectures_needed
from twinrun.planning.project import Project
from twinrun.protocol.allocation import Allocation, Revision
from twinrun.results.judge import judged
from twinrun.results.judged import measured_points
from twinrun.results.reading import FinishedRun
from twinrun.results.record import Environment, Record, write_record
from twinrun.runs.checkpointing import demand_signatures
from twinrun.runs.data import prepared_data, take_documents
from twinrun.runs.models import prepared_model
from twinrun.runs.prepared import Prepared
from twinrun.runs.progress import Display
from twinrun.runs.selection import NETWORK, Selection
from twinrun.runs.sources import loaded_by, replaced, sealed
from twinrun.runs.sweep import PointOutcome, SweepRun, finished

LOCK = ".lock"
# Changed files that a record names, of an environment that is not as installed.
NAMED_FILES = 20


def execute(prepared: Prepared, *, display: Display, detach: bool = False) -> FinishedRun | Path:
    """Run what was prepared and return the finished run, judged; or the folder where its jobs go on.

    Args:
        detach: submit and return, unless all has ended that was submitted before.

    Raises:
        MachineError, RunError: see their classes.
        RunInterruptedError: Ctrl-C; what is finished stays and `--resume` goes on.
    """
    plan, run, project, selection = prepared.plan, prepared.run, prepared.project, prepared.selection
    _make(run)
    busy = InputError(
        "another process is running this run",
        place=str(run),
        found="another process holds its lock",
        hint="wait until it ends, or leave --resume out to start one beside it",
    )
    with locked(run / LOCK, busy=busy):
        demand_signatures(
            project.root, selection.checkpointing, prepared.checkpoints, signed=selection.signed
        )
        write_atomically(run / "plan.json", plan.model_dump_json(indent=1) + "\n")
        display.say(f"run folder: {run}")
        try:
            record = _measure(prepared, display, detach=detach)
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


def _make(run: Path) -> None:
    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        found = str(run.parent)
        raise InputError("a link leads to itself", place="--out", found=found, allowed="a folder") from None


def _measure(prepared: Prepared, display: Display, *, detach: bool) -> Record | None:
    """Open the engine, prepare what ranks read, run the points, and return the record of all of them."""
    plan, project, selection = prepared.plan, prepared.project, prepared.selection
    begun = {*finished(prepared.run, plan, workload=selection.workload)}
    begun |= {one.point for one in all_pending(prepared.run)}
    prepared, sources = sealed(prepared, starts=any(point.id not in begun for point in plan.points))
    workspace = prepared.workspace
    workspace.data.mkdir(parents=True, exist_ok=True)
    engine = selection.engine.open_engine(
        stack=selection.stack, vendor=selection.vendor, workspace=workspace, say=display.say
    )
    changed = _changed_files(engine, display)
    installed = inspect(engine)
    kernels = kernel_variables(workspace, archs=_archs(project, selection), engine=engine, say=display.say)
    described = selection.description
    folders = {
        name: prepared_data(
            request,
            recipe=selection.recipe,
            python=installed.python,
            engine=engine,
            workspace=workspace,
            log=prepared.run / "log" / "data.log",
            say=display.say,
        )
        for name, request in (("data", described.data), ("documents", described.documents))
        if request
    }
    if given := described.given_documents:
        take_documents(given)
    if model := described.model:
        prepared_model(model, folder=prepared.folders["model"], say=display.say)
    opened = prepared.opened(engine, folders=folders, variables=kernels)
    sweep = SweepRun(prepared=opened, sources=sources, ranks=opened.ranks, display=display)
    done = sweep.submit() if detach else sweep.finish()
    if len(done) < len(prepared.plan.points):
        return None
    measured = measured_points(prepared.plan, tuple(one.point for one in done), selection.gpu)
    if not any(one.measurements or one.checks for one in measured):
        hint = "no point has what --set left"
        raise InputError("nothing was measured", place=str(prepared.run), hint=hint)
    site = selection.site
    environment = Environment(
        lock_differences=lock_differences(installed, selection.stack, project.root),
        changed_files=changed,
        image_digest=engine.image_digest,
        variables=steering_variables(os.environ | (site.site.environment if site else {})),
    )
    loaded = [report for one in done for report in loaded_by(point_folder(prepared.run, one.point.id))]
    edited = dict.fromkeys((*(name for one in done for name in one.changed), *replaced(loaded)))
    revision = sources.revision.model_copy(update={"changed": tuple(edited)})
    return _record(prepared, done, environment, revision)


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
    prepared: Prepared, done: Sequence[PointOutcome], environment: Environment, revision: Revision
) -> Record:
    """Return the record of the finished points of a run."""
    plan, run = prepared.plan, prepared.run
    left = ("plan.json", METRICS, *plan.description.files)
    return Record(
        twinrun=__version__,
        run=run.name,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        plan=plan,
        revision=revision,
        allocation=allocation_of([one.allocation for one in done], prepared.selection),
        environment=environment,
        points=tuple(one.point for one in done),
        files={name: sha256_of_file(run / name) for name in left if (run / name).exists()},
    ).with_digest()


def allocation_of(allocations: Sequence[Allocation], selection: Selection) -> Allocation:
    """Return all nodes of a run's points as one allocation, with what speaks against its network."""
    nodes = dict.fromkeys(node for one in allocations for node in one.nodes)
    reports = {host: report for one in allocations for host, report in one.reports.items()}
    network = next((one.value for one in selection.choices if one.name == NETWORK), None)
    own = {"nodes": tuple(nodes), "reports": reports, "network": network}
    return allocations[-1].model_copy(update=own)
