"""The flow of `invoke run`: provision, run each point, record, judge."""

from __future__ import annotations

import contextlib
import datetime
import os
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import Timeout

from twinrun import __version__
from twinrun.execution.engine import Engine, Workspace, point_folder
from twinrun.execution.environment import (
    inspect,
    lock_differences,
    revision,
    steering_variables,
)
from twinrun.execution.kernels import PROCESSOR, kernel_variables
from twinrun.execution.ranks import METRICS, LaunchResult, Ranks
from twinrun.foundation.errors import InputError, MachineError, RunError, RunInterruptedError
from twinrun.foundation.files import sha256_of_file, write_atomically
from twinrun.foundation.locks import locked
from twinrun.foundation.manifest import Frozen, load_json
from twinrun.foundation.text import number, percent
from twinrun.machine.architecture import architectures_needed
from twinrun.planning.plan import Plan
from twinrun.planning.project import Project
from twinrun.protocol.allocation import Allocation
from twinrun.protocol.job import Result
from twinrun.protocol.machine import Device, Machine
from twinrun.results.finished_run import FinishedRun
from twinrun.results.judge import RULES, claims_digest, judge
from twinrun.results.record import Environment, Record, write_record
from twinrun.runs.checkpointing import check_legs
from twinrun.runs.data import prepared_data
from twinrun.runs.launches import launch_of, rank_commands, shared_settings, workspace_of
from twinrun.runs.models import prepared_model
from twinrun.runs.preconditions import demand_interpreter
from twinrun.runs.progress import Display
from twinrun.runs.selection import Selection
from twinrun.workloads.workload import Point, PointRecord, Run, Workload

LOCK = ".lock"
# Changed files that a record names, of an environment that is not as installed.
NAMED_FILES = 20


def execute(
    project: Project, selection: Selection, *, out: Path | None, resume: bool, display: Display
) -> FinishedRun:
    """Run the plan and return the finished run, judged.

    Raises:
        MachineError, RunError: see their classes.
        Interrupted: Ctrl-C; what is finished stays and `--resume` goes on.
    """
    plan = selection.plan
    check_legs(selection.checkpointing, plan=plan, resume=resume)
    with _run_folder(project.root, plan, out=out, resume=resume) as run:
        write_atomically(run / "plan.json", plan.model_dump_json(indent=1) + "\n")
        display.say(f"run folder: {run}")
        try:
            record = _measure(project, selection, run, display)
        except KeyboardInterrupt:
            done = len(finished(run, plan, workload=selection.workload))
            raise RunInterruptedError(
                f"stopped with {done} of {len(plan.points)} points finished",
                place=str(run),
                hint="the same command with --resume runs the points that are left",
            ) from None
        write_record(run / "record.json", record)
    return FinishedRun(
        record=record,
        recipe=selection.recipe,
        workload=selection.workload,
        project=project,
        folder=run,
        file=run / "record.json",
    )


def _measure(project: Project, selection: Selection, run: Path, display: Display) -> Record:
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
    if model := selection.description.model:
        prepared_model(model, say=display.say)
    done = SweepRun(
        selection=selection,
        ranks=Ranks(engine=engine, commands=commands),
        workspace=workspace,
        shared=shared_settings(selection, run=run, data=data, documents=documents, inside=engine.inside),
        display=display,
    ).finish()
    if not any(one.point.measurements or one.point.checks for one in done):
        raise InputError("nothing was measured", place=str(run), hint="no point has what --set left")
    environment = Environment(
        python=installed.python,
        libraries=done[-1].libraries,
        lock_differences=lock_differences(installed, selection.stack, project.root),
        changed_files=changed,
        attested=selection.stack.attested(project.root),
        unverified=selection.stack.unhashed(project.root),
        image_digest=engine.image_digest,
        variables=steering_variables(os.environ),
    )
    return _record(project, selection, run, done, environment)


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
    project: Project, selection: Selection, run: Path, done: Sequence[PointOutcome], environment: Environment
) -> Record:
    """Return the judged record of the finished points of a run."""
    plan, published = selection.plan, selection.recipe.published
    allocation = _allocation([one.allocation for one in done])
    left = ("plan.json", METRICS, *plan.description.files)
    files = {name: sha256_of_file(run / name) for name in left if (run / name).exists()}
    record = Record(
        twinrun=__version__,
        run=run.name,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        plan=plan,
        plan_sha256=plan.sha256(),
        claims_sha256=claims_digest(published),
        rules=RULES,
        revision=revision(project.root),
        machine=_first_node(selection, allocation),
        allocation=allocation,
        gpu=selection.gpu,
        environment=environment,
        points=tuple(one.point for one in done),
        verdicts=(),
        files=files,
    )
    return record.model_copy(update={"verdicts": judge(record, published, project)}).with_digest()


def _allocation(allocations: Sequence[Allocation]) -> Allocation:
    """Return all nodes of a run's points as one allocation."""
    nodes = dict.fromkeys(node for one in allocations for node in one.nodes)
    reports = {host: report for one in allocations for host, report in one.reports.items()}
    return allocations[-1].model_copy(update={"nodes": tuple(nodes), "reports": reports})


def _first_node(selection: Selection, allocation: Allocation) -> Machine:
    """Return the first node of an allocation; the host that submits may be of another kind."""
    machine, report = selection.machine, allocation.reports.get(allocation.nodes[0])
    if selection.site is None or report is None:
        return machine
    vendor, gpu = selection.vendor, selection.gpu
    devices = tuple(
        Device(
            index=index,
            name=name,
            gpu=gpu.id if gpu else None,
            arch=gpu.arch if gpu else None,
            memory_bytes=None,
            unique_id=None,
            driver=report.driver,
        )
        for index, name in enumerate(report.devices)
    )
    return Machine(
        vendor=vendor.name,
        devices=devices,
        driver=report.driver if devices else None,
        host=allocation.nodes[0],
        cpu=report.cpu,
        cpu_count=report.cores,
        memory_bytes=report.memory_bytes,
        kernel=report.kernel,
        probe=f"asked on the node by its first rank, at the site {selection.site.name}",
    )


@contextlib.contextmanager
def _run_folder(root: Path, plan: Plan, *, out: Path | None, resume: bool) -> Iterator[Path]:
    """Yield the folder of the run, which is nobody else's until it ends.

    Raises:
        InputError: nothing to resume, or the run that would be resumed is alive.
        MachineError: the file system has no locks.
    """
    base = (out or root / "runs").resolve() / plan.recipe
    run = _unfinished(base, plan) if resume else _fresh(base, plan)
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(locked(run / LOCK, seconds=0))
        except Timeout:
            raise InputError(
                "another process is running this run",
                place=str(run),
                found="another process holds its lock",
                hint="wait until it ends, or leave --resume out to start one beside it",
            ) from None
        yield run


def _fresh(base: Path, plan: Plan) -> Path:
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    # Runs of one plan may start in the same second, also on machines that share the folder.
    run = base / f"{stamp}-{plan.sha256()[:8]}-{uuid.uuid4().hex[:4]}"
    run.mkdir(parents=True)
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
            hint="leave --resume out to start one; a changed option or file makes another plan",
        )
    return found[-1]


class PointOutcome(Frozen):
    """A finished point as it waits in the run folder for the others."""

    plan_sha256: str
    point: PointRecord
    libraries: dict[str, str]
    allocation: Allocation


@dataclass(frozen=True, kw_only=True)
class SweepRun:
    """Runs the points of one plan that are not finished yet."""

    selection: Selection
    ranks: Ranks
    workspace: Workspace
    shared: Run
    """What the jobs of all points share."""
    display: Display

    def finish(self) -> list[PointOutcome]:
        """Run what is left and return every point, in the order of the plan.

        Raises:
            MachineError: no attempt fits into the memory of a device.
            RunError: a rank failed; names it and shows the end of its log.
        """
        plan = self.selection.plan
        done = finished(self.workspace.run, plan, workload=self.selection.workload)
        self.display.expect(len(plan.points), done=len(done))
        for point in plan.points:
            if point.id in done:
                self.display.say(f"{point.id}: finished before, not run again")
                continue
            done[point.id] = self._measure(point)
            text = done[point.id].model_dump_json(indent=1) + "\n"
            write_atomically(_file(self.workspace.run, point.id), text)
            self.display.point_done()
        return [done[point.id] for point in plan.points]

    def _measure(self, point: Point) -> PointOutcome:
        plan, workload = self.selection.plan, self.selection.workload
        names = self.selection.description.points[point.id].attempts
        for place, name in enumerate(names):
            launched = self._start(point, place, name)
            if launched:
                result = _result(self.workspace.run, point, workload.result)
                numbers = workload.numbers(plan.part, point, result)
                measured = PointRecord(
                    id=point.id,
                    nodes=point.nodes,
                    devices=point.world_size,
                    hosts=launched.allocation.nodes,
                    part=point.part,
                    attempts=names[:place],
                    **{name: getattr(numbers, name) for name in type(numbers).model_fields},
                )
                derived = workload.derived(plan.part, measured, self.selection.gpu)
                record = measured.model_copy(update={"measurements": (*measured.measurements, *derived)})
                self.display.end(point.id, status=summary(record, workload.headline))
                return PointOutcome(
                    plan_sha256=plan.sha256(),
                    point=record,
                    libraries=result.libraries,
                    allocation=launched.allocation,
                )
            self.display.end(point.id, status=f"{name}: out of memory")
        raise MachineError(
            "nothing that was tried fits into the memory of a device",
            place=point.id,
            found=f"tried {', '.join(names)}",
            hint=workload.smaller,
        )

    def _start(self, point: Point, place: int, name: str) -> LaunchResult | None:
        workload = self.selection.workload
        self.display.begin(
            point.id,
            steps=self.selection.description.points[point.id].steps,
            status=f"starting {point.world_size} rank(s), {name}",
        )
        launch = launch_of(
            self.selection,
            point,
            attempt=place,
            shared=self.shared,
            workspace=self.workspace,
            inside=self.ranks.inside,
        )
        return self.ranks.run(launch, show=lambda line: self.display.step(point.id, workload.progress(line)))


def finished(run: Path, plan: Plan, *, workload: Workload) -> dict[str, PointOutcome]:
    """Return the points of `plan` that are finished in a run folder."""
    files = {point.id: _file(run, point.id) for point in plan.points}
    found = {name: load_json(file, PointOutcome) for name, file in files.items() if file.is_file()}
    return {
        name: one.model_copy(update={"point": workload.read_points((one.point,))[0]})
        for name, one in found.items()
        if one.plan_sha256 == plan.sha256()
    }


def summary(point: PointRecord, headline: tuple[str, ...]) -> str:
    """Return the result of a point in one line: the first number that stands for it, and its last loss."""
    shown = [one for metric in headline for one in point.measurements if one.metric == metric][:2]
    parts = [
        f"{one.id} "
        + (percent(one.median) if one.metric.endswith("-share") else f"{number(one.median)} {one.unit}")
        for one in shown
    ]
    parts += [f"{one.id} {one.values[-1]:.4f}" for one in point.series if one.values]
    failed = [one.id for one in point.checks if one.outcome != "pass"]
    return ", ".join([*parts, *(f"not passed: {name}" for name in failed)]) or "measured"


def _result(run: Path, point: Point, model: type[Result]) -> Result:
    """Return what the ranks of `point` left; raises RunError where that is not a whole result of it."""
    file = point_folder(run, point.id) / "result.json"
    try:
        result = load_json(file, model)
    except InputError as error:
        message = "the ranks ended well and left no whole result"
        raise RunError(message, place=str(file), found=f"{error.message}: {error.found}") from None
    if result.point != point.id:
        message = "the ranks left the result of another point"
        raise RunError(message, place=str(file), found=result.point, allowed=point.id)
    return result


def _file(run: Path, point: str) -> Path:
    return run / "points" / f"{point}.json"
