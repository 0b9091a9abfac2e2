"""The flow of a run: open what was prepared, try each point until an attempt fits, record and judge."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

from twinrun import __version__
from twinrun.execution.engine import point_folder
from twinrun.execution.environment import (
    PROCESSOR,
    inspect,
    kernel_variables,
    lock_differences,
    steering_variables,
)
from twinrun.execution.ranks import METRICS, all_pending, pending_of, rank_reports
from twinrun.execution.site_qualification import Qualification, qualify
from twinrun.foundation.cache import locked, runs_folder
from twinrun.foundation.errors import InputError, MachineError, RunError, RunInterruptedError, require_equal
from twinrun.foundation.files import sha256_of_file, write_atomically
from twinrun.foundation.manifest import Frozen, load_json
from twinrun.foundation.terminal import LiveProgress
from twinrun.foundation.text import number, percent
from twinrun.machine.inventory import architectures_needed
from twinrun.manifests.cluster import load_site
from twinrun.planning.plan import Plan
from twinrun.planning.project import Project
from twinrun.protocol.allocation import Allocation
from twinrun.protocol.job import Result
from twinrun.protocol.measurements import Measurement
from twinrun.protocol.signals import SNIFFS, WINDOW, Sniff, alarms
from twinrun.results.judge import judged
from twinrun.results.judged import measured_points
from twinrun.results.reading import FinishedRun
from twinrun.results.record import Environment, Record, write_record
from twinrun.runs.data import Maker, input_folders
from twinrun.runs.prepared import Prepared, prepare
from twinrun.runs.selection import NETWORK, Request, Selection, select
from twinrun.runs.sources import Sources, changed_since, loaded_by, replaced, sealed, when_and_what
from twinrun.workloads import load_workload
from twinrun.workloads.workload import MeasuredPoint, Point, PointRecord, Progress

LOCK, POINTS = ".lock", "points"
# Changed files that a record names, of an environment that is not as installed.
NAMED_FILES = 20


class PointOutcome(Frozen):
    """A finished point as it waits in the run folder for the others."""

    plan_sha256: str
    point: PointRecord
    allocation: Allocation
    changed: tuple[str, ...] = ()
    """Files that ranks could import which were edited while they ran."""


def execute(prepared: Prepared, *, display: Display, detach: bool = False) -> FinishedRun | Path:
    """Run what was prepared and return the finished run, judged; or the folder where its jobs go on.

    Args:
        detach: submit and return, unless all has ended that was submitted before.

    Raises:
        MachineError, RunError: see their classes.
        RunInterruptedError: Ctrl-C; what is finished stays and `--resume` goes on.
    """
    plan, run = prepared.plan, prepared.run
    run.mkdir(parents=True, exist_ok=True)
    hint = "wait until it ends, or leave --resume out to start one beside it"
    busy = InputError("another process is running this run", place=str(run), hint=hint)
    with locked(run / LOCK, busy=busy):
        write_atomically(run / "plan.json", plan.model_dump_json(indent=1) + "\n")
        display.say(f"run folder: {run}")
        done = finished(run, plan)
        try:
            record = _measure(prepared, done, display, detach=detach)
        except KeyboardInterrupt:
            message = f"stopped with {len(done)} of {len(plan.points)} points finished"
            hint = "the same command with --resume runs the points that are left"
            raise RunInterruptedError(message, place=str(run), hint=hint) from None
        if record is None:
            return run
        write_record(run / "record.json", record)
    return FinishedRun(record=judged(record, prepared.project), folder=run, file=run / "record.json")


def qualified(
    project: Project, name: str, *, key: Path | None, say: Callable[[str], None], engine: str | None = None
) -> Qualification:
    """Measure a site with a stack that any recipe has for it, and return what was found.

    Raises:
        InputError: no such site, no recipe has a stack for it, or the key does not sign.
        MachineError: the engine cannot start there.
    """
    site = load_site(project.root, name)
    settings, vendor = (f"nodes={min(site.site.nodes, 2)}",), site.site.vendor
    known = project.recipes().items()
    recipe = next((one for one, loaded in known if vendor in loaded.recipe.stacks.current), None)
    if recipe is None:
        raise InputError("no recipe has a stack for this vendor", place=f"{site.place}.vendor", found=vendor)
    chosen = select(project, Request(recipe=recipe, cluster=name, engine=engine, set=settings))
    prepared = prepare(project, chosen, out=runs_folder(project.root))
    prepared.run.mkdir(parents=True)
    told = replace(prepared.opened(say), variables={"NCCL_DEBUG": "INFO"})
    return qualify(site, ranks=told.ranks, accelerator=bool(chosen.hardware.devices), key=key)


def _measure(
    prepared: Prepared, done: dict[str, PointOutcome], display: Display, *, detach: bool
) -> Record | None:
    """Open the engine, prepare what ranks read, run the points, and return the record of all of them.

    Args:
        done: the points that are finished; others are added as they end.
    """
    plan, selection, site = prepared.plan, prepared.selection, prepared.selection.site
    begun = {*done, *(one.point for one in all_pending(prepared.run))}
    prepared, sources = sealed(prepared, starts=any(point.id not in begun for point in plan.points))
    prepared = prepared.opened(display.say)
    engine, workspace = prepared.renderer, prepared.workspace
    changed = engine.changed_files()
    named = dict(list(changed.items())[:NAMED_FILES])
    if more := len(changed) - len(named):
        named["..."] = f"{more} more"
    for name, what in named.items():
        display.say(f"the environment is not as installed, and no results folder takes that: {name}: {what}")
    installed = inspect(engine)
    # A site's devices are not known here: it gets all that the stack is built for.
    built, machine, gpus = selection.stack.stack.archs, selection.machine, prepared.project.gpus
    archs = architectures_needed(built=built, machine=machine, vendor=selection.vendor, gpus=gpus)
    kernels = kernel_variables(workspace, archs=archs or (PROCESSOR,), engine=engine, say=display.say)
    folders = input_folders(plan.description, installed.python)
    log = prepared.run / "log" / "data.log"
    Maker(engine, log, display.say).inputs(plan.description, folders)
    prepared = replace(prepared, folders=folders, variables=kernels)
    _run_points(prepared, sources, done, display, detach=detach)
    if len(done) < len(plan.points):
        return None
    outcomes = [done[point.id] for point in plan.points]
    points, gpu = tuple(one.point for one in outcomes), selection.hardware.gpu
    if not any(one.measurements or one.checks for one in measured_points(plan, points, gpu)):
        raise InputError("nothing was measured", place=str(prepared.run), hint="no point has what --set left")
    left = ("plan.json", METRICS, *plan.description.files)
    loaded = [report for one in points for report in loaded_by(point_folder(prepared.run, one.id))]
    edited = dict.fromkeys((*(name for one in outcomes for name in one.changed), *replaced(loaded)))
    return Record(
        twinrun=__version__,
        run=prepared.run.name,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        plan=plan,
        revision=sources.revision.model_copy(update={"changed": tuple(edited)}),
        allocation=allocation_of([one.allocation for one in outcomes], selection),
        environment=Environment(
            lock_differences=lock_differences(installed, selection.stack, prepared.project.root),
            changed_files=named,
            image_digest=engine.image_digest,
            variables=steering_variables(os.environ | (site.site.environment if site else {})),
        ),
        points=points,
        files={name: sha256_of_file(prepared.run / name) for name in left if (prepared.run / name).exists()},
    ).with_digest()


def allocation_of(allocations: Sequence[Allocation], selection: Selection) -> Allocation:
    """Return all nodes of a run's points as one allocation, with what speaks against its network."""
    nodes = dict.fromkeys(node for one in allocations for node in one.nodes)
    reports = {host: report for one in allocations for host, report in one.reports.items()}
    network = next((one.value for one in selection.choices if one.name == NETWORK), None)
    own = {"nodes": tuple(nodes), "reports": reports, "network": network}
    return allocations[-1].model_copy(update=own)


def _run_points(
    prepared: Prepared, sources: Sources, done: dict[str, PointOutcome], display: Display, *, detach: bool
) -> None:
    """Run the points that are not in `done`, in the order of the plan, and add each to it.

    Args:
        detach: submit what is left and collect what has ended; a leg waits until the one before it is
            collected.
    """
    plan = prepared.plan
    for name in done:
        display.say(f"{name}: finished before, not run again")
    for point in plan.points:
        leg = plan.description.points[point.id].leg
        waits = detach and leg and leg.previous and leg.previous not in done
        if point.id in done or waits or not (found := _tried(prepared, point, display, detach=detach)):
            continue
        sent, allocation = found
        (measured,) = measured_points(plan, (sent,), prepared.selection.hardware.gpu)
        display.end(point.id, status=summary(measured, prepared.selection.workload.headline))
        changed = changed_since(prepared.run, sources)
        outcome = PointOutcome(plan_sha256=plan.sha256(), point=sent, allocation=allocation, changed=changed)
        write_atomically(prepared.run / POINTS / f"{point.id}.json", outcome.model_dump_json(indent=1) + "\n")
        done[point.id] = outcome


def _tried(
    prepared: Prepared, point: Point, display: Display, *, detach: bool
) -> tuple[PointRecord, Allocation] | None:
    """Return what the ranks of a point sent, of an attempt that was submitted before or of a new one.

    Args:
        detach: submit an attempt, or wait no longer for it, and return None.

    Raises:
        MachineError: no attempt fits into the memory of a device.
        RunError: a rank failed; names it and shows the end of its log.
    """
    workload, folder = prepared.selection.workload, point_folder(prepared.run, point.id)
    described, waiting = prepared.plan.description.points[point.id], pending_of(prepared.run, point.id)
    ranks, names, told = prepared.ranks, described.attempts, set[str]()
    if detach and waiting and ranks.goes_on(waiting):
        return None

    def show(line: bytes) -> None:
        display.step(point.id, workload.progress(line))
        for rank, alarm in slow_ranks(folder, newest=True).items():
            if rank not in told:
                told.add(rank)
                display.say(f"warning: {point.id}: {alarm}")

    for place, name in list(enumerate(names))[waiting.place if waiting else 0 :]:
        if detach and waiting is None:
            ranks.begin(prepared.launch(point, place), place=place)
            return None
        started = f"goes on with job {waiting.handle}" if waiting else "starting"
        status = f"{started} {point.world_size} rank(s), {name}"
        display.begin(point.id, steps=described.steps, status=status)
        if waiting:
            launched = ranks.collect(point, waiting, show=show)
        else:
            launched = ranks.run(prepared.launch(point, place), place=place, show=show)
        waiting = None
        if launched:
            result, slow = _result(folder, point, workload.result), tuple(slow_ranks(folder).values())
            known: dict[str, Any] = {"hosts": launched.nodes, "attempts": names[:place], "slow": slow}
            known |= when_and_what(loaded_by(folder))
            return PointRecord(id=point.id, result=result, **known), launched
        display.end(point.id, status=f"{name}: out of memory")
    message, found = "nothing that was tried fits into the memory of a device", f"tried {', '.join(names)}"
    raise MachineError(message, place=point.id, found=found, hint=workload.smaller)


def slow_ranks(folder: Path, *, newest: bool = False) -> dict[str, str]:
    """Return the ranks of a point that were slower than the others, each in words, by rank and kind.

    Args:
        newest: look at what was sniffed last alone.
    """
    file = folder / SNIFFS
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    lines, found = text[: text.rfind("\n") + 1].splitlines(), dict[str, str]()
    for end in range(len(lines) if newest else 1, len(lines) + 1):
        window = [Sniff.model_validate_json(line) for line in lines[max(0, end - WINDOW) : end]]
        for one in alarms(window):
            host = next((report.host for report in rank_reports(folder) if report.rank == one.rank), None)
            found.setdefault(f"{one.rank} {one.kind}", one.text(host or "a host that has not reported"))
    return found


def finished(run: Path, plan: Plan) -> dict[str, PointOutcome]:
    """Return the points of `plan` that are finished in a run folder, in its order."""
    files = {point.id: run / POINTS / f"{point.id}.json" for point in plan.points}
    found = {name: load_json(file, PointOutcome) for name, file in files.items() if file.is_file()}
    read = load_workload(plan.workload).read_results
    return {
        name: one.model_copy(update={"point": read((one.point,))[0]})
        for name, one in found.items()
        if one.plan_sha256 == plan.sha256()
    }


def summary(point: MeasuredPoint, headline: tuple[str, ...]) -> str:
    """Return the result of a point in one line: the first number that stands for it, and its last loss."""

    def amount(one: Measurement) -> str:
        return percent(one.median) if one.metric.endswith("-share") else f"{number(one.median)} {one.unit}"

    shown = [one for metric in headline for one in point.measurements if one.metric == metric][:2]
    parts = [f"{one.id} {amount(one)}" for one in shown]
    parts += [f"{one.id} {one.values[-1]:.4f}" for one in point.series if one.values]
    parts += [f"not passed: {one.id}" for one in point.checks if one.outcome != "pass"]
    return ", ".join(parts) or "measured"


def _result(folder: Path, point: Point, model: type[Result]) -> Result:
    """Return what the ranks of `point` left; raises RunError where that is not a whole result of it."""
    file = folder / "result.json"
    try:
        result = load_json(file, model)
        require_equal(result.point, point.id, "the result of another point", place=str(file))
    except InputError as error:
        message = "the ranks ended well and left no whole result"
        raise RunError(message, place=str(file), found=f"{error.message}: {error.found}") from None
    return result


class Display(LiveProgress):
    """Progress of the points of a run: bars on a terminal, plain lines elsewhere; always on stderr."""

    def __init__(self) -> None:
        status = TextColumn("{task.fields[status]}")
        super().__init__(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), status, TimeElapsedColumn()
        )
        self._steps: dict[str, int] = {}

    def begin(self, point: str, *, steps: int, status: str) -> None:
        """Show that `point` starts; called again when it starts over."""
        self._steps[point] = steps
        if point not in self._tasks:
            self._tasks[point] = self._progress.add_task(point, status=status)
        self._progress.reset(self._tasks[point], total=steps)
        self.end(point, status=status)

    def step(self, point: str, progress: Progress) -> None:
        """Show one line of metrics."""
        steps, done, status = self._steps[point], progress.done, progress.status
        advance = None if done else 1
        self._progress.update(self._tasks[point], status=status, completed=done or None, advance=advance)
        if not done:
            self._line(f"{point}: {status}")
        elif done in (1, steps) or done % max(1, steps // 8) == 0:
            self._line(f"{point}: step {done}/{steps}  {status}")

    def end(self, point: str, *, status: str) -> None:
        """Show the result of `point`."""
        self._progress.update(self._tasks[point], status=status)
        self._line(f"{point}: {status}")

    def _line(self, text: str) -> None:
        if not self.console.is_terminal:
            self.say(text)
