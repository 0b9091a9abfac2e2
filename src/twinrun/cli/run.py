"""`invoke run` and `invoke data`: from a request to the printed plan, or to the record and its exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from twinrun.cli.console import print_json
from twinrun.foundation.errors import InputError, RunInterruptedError, TwinrunError
from twinrun.foundation.terminal import say
from twinrun.machine.checks import demand_device_files
from twinrun.planning.project import Project
from twinrun.runs.preconditions import demand_ready
from twinrun.runs.selection import Request, Selection, demand_runnable, select
from twinrun.workloads.settings import NOT_RECORDED

if TYPE_CHECKING:
    from twinrun.export.trackers import ChosenTracker
    from twinrun.results.finished_run import FinishedRun

__all__ = ["Request", "data", "run"]


import shlex

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from twinrun.foundation.text import GIB, duration, number, plain
from twinrun.runs.launches import commands_of
from twinrun.workloads.workload import Point


def run(
    root: Path,
    request: Request,
    *,
    out: Path | None,
    resume: bool,
    as_json: bool,
    yes: bool = False,
    track: str = "",
    detach: bool = False,
) -> int:
    """Run a recipe and return the exit code: 1 when a claim or a check fails."""
    chosen = _trackers(track)
    project = Project(root)
    selection = select(project, request)
    if request.dry:
        _print_plan(project, selection, as_json=as_json)
        warn(project, selection, out=(out or root / "runs").absolute(), detach=detach)
        return 0
    _demand_devices(selection)
    _print_choices(selection)
    _demand_site(selection, detach=detach)
    from twinrun.export.check_files import write_check_files
    from twinrun.report.form import offer
    from twinrun.report.page import write_report
    from twinrun.results.verdicts import FAILURES
    from twinrun.runs.progress import Display
    from twinrun.runs.run import execute

    demand_ready(project, selection, out=(out or root / "runs").absolute())
    ask(selection, yes=yes)
    with Display() as display:
        finished = execute(project, selection, out=out, resume=resume, display=display, detach=detach)
    if isinstance(finished, Path):
        from twinrun.cli.jobs import say_pending

        say_pending(finished, as_json=as_json)
        return 0
    report = write_report(finished.folder / "report.html", finished)
    write_check_files(finished)
    form = offer(finished)
    if as_json:
        print_json(summary(finished))
    else:
        _show(finished, report)
        say(form, end="")
    _track(finished, chosen)
    failed = any(check.outcome == "fail" for point in finished.record.points for check in point.checks)
    return int(failed or any(verdict.final in FAILURES for verdict in finished.record.verdicts))


def _demand_devices(selection: Selection) -> None:
    """Raise MachineError where ranks on this machine could not open its GPUs."""
    if selection.site is None:
        devices, grouped = selection.machine.devices, selection.engine.ADDS_GROUPS
        demand_device_files(selection.vendor, devices, grouped=grouped)


def _demand_site(selection: Selection, *, detach: bool) -> None:
    """Raise InputError where a run without a site is to go on after its command."""
    if detach and selection.site is None:
        hint = "add --cluster SITE; on this machine a run ends with the command that started it"
        raise InputError("nothing would go on with the run", place="--detach", found="no site", hint=hint)


def _trackers(text: str) -> tuple[ChosenTracker, ...]:
    """Return the trackers that `--track` names; what they need is slow to import."""
    if not text:
        return ()
    from twinrun.export.trackers import choose_trackers

    return choose_trackers(text)


def _track(finished: FinishedRun, chosen: Sequence[ChosenTracker]) -> None:
    """Write the run for each tracker, and say how it is opened."""
    if not chosen:
        return
    from twinrun.export.tracked_run import tracked_run

    run = tracked_run(finished)
    for name, tracker in chosen:
        say(f"{name}: {tracker.write(finished.folder / 'trackers' / name, run)}", file=sys.stderr)


def _print_choices(selection: Selection) -> None:
    """Say what was chosen and where the run is not the published configuration."""
    for choice in selection.choices:
        say(f"{choice.name:9} {choice.value}  ({choice.because})", file=sys.stderr)
    differences = selection.plan.differences
    for item in differences:
        if item.found != NOT_RECORDED:
            say(f"differs   {item}", file=sys.stderr)
    if absent := [item.field for item in differences if item.found == NOT_RECORDED]:
        say(f"differs   published, and nothing of this run: {', '.join(absent)}", file=sys.stderr)


def _print_plan(project: Project, selection: Selection, *, as_json: bool) -> None:
    from twinrun.report.terminal import show

    if as_json:
        _print_choices(selection)
        print_json(everything(project, selection))
    else:
        show(page(project, selection))


def summary(run: FinishedRun) -> dict[str, object]:
    """Return what `--json` prints: where the record is, its points and verdicts."""
    from twinrun.report.words import headline

    record = run.record
    numbers = {"id", "nodes", "devices", "cards", "hosts", "measurements", "checks", "facts"}
    return {
        "headline": headline(record),
        "run": record.run,
        "record": str(run.file),
        "report": str(run.folder / "report.html"),
        "points": [point.model_dump(mode="json", include=numbers) for point in record.points],
        "verdicts": [one.model_dump() | {"final": one.final, "why": one.why} for one in record.verdicts],
    }


def _show(run: FinishedRun, report: Path) -> None:
    from twinrun.report.tables import run_tables, verdict_table
    from twinrun.report.terminal import RUN_COLUMNS, show
    from twinrun.report.words import headline

    show(run_tables(run), most=RUN_COLUMNS)
    say(headline(run.record))
    say()
    if run.record.verdicts:
        show(verdict_table(run.record.verdicts), most=RUN_COLUMNS)
    say(f"report: {report}")


def data(root: Path, name: str, *, recipe: str, engine: str, files: int | None, endpoint: str | None) -> None:
    """Fetch and prepare a data set, or fetch a model, and print its folder; raises as `acquire` does."""
    from twinrun.runs.data import acquire
    from twinrun.runs.models import fetch_model
    from twinrun.runs.progress import Display

    if files == 0:
        raise InputError("no file would be taken", place="--files", found=files, allowed="1 or more")
    tell = Display().say
    project = Project(root)
    try:
        folder = (
            fetch_model(name, endpoint=endpoint, say=tell)
            if "/" in name
            else acquire(
                project, name, recipe=recipe, engine=engine, files=files, endpoint=endpoint, say=tell
            )
        )
    except KeyboardInterrupt:
        raise RunInterruptedError("stopped", place=name, hint="the same command goes on from here") from None
    say(folder)


def everything(project: Project, selection: Selection) -> dict[str, object]:
    """Return the plan, the choices, and every command with its variables."""
    plan = selection.plan
    return {
        "plan_sha256": plan.sha256(),
        "plan": plan.model_dump(mode="json"),
        "choices": [choice.model_dump() for choice in selection.choices],
        "attested": [
            wheel.model_dump(mode="json") for wheel in selection.stack.attested_wheels(project.root)
        ],
        **commands_of(project, selection),
    }


def page(project: Project, selection: Selection) -> RenderableType:
    """Return what was chosen, the points, how the run differs, and what starts the first point's ranks."""
    recipe, plan = selection.recipe.recipe, selection.plan
    parts: list[RenderableType] = [Text(f"{recipe.title}\n{recipe.question}\n"), _choices(selection)]
    parts += [Text(""), _points(selection), *_unsaid(selection)]
    if plan.differences:
        parts += [Text(""), _differences(selection)]
    if wheels := selection.stack.attested_wheels(project.root):
        parts += [Text(""), Text("\n".join(map(str, wheels)))]
    parts += [Text(""), Text(_starts(project, selection), overflow="fold"), Text("")]
    parts.append(
        Text("Nothing was started. --dry --json prints the whole plan, with lines to paste into a shell.")
    )
    return Group(*parts)


def _choices(selection: Selection) -> Table:
    table = Table("chosen", "", "because", box=None, padding=(0, 2, 0, 0))
    for choice in selection.choices:
        table.add_row(choice.name, Text(choice.value), Text(choice.because))
    return table


def _points(selection: Selection) -> Table:
    heads = ("point", "nodes", "devices a node", "time", "predicted: a step", "memory of a device")
    table = Table(*heads, box=None, padding=(0, 2, 0, 0))
    for point in selection.plan.points:
        seconds = "not estimated" if point.seconds is None else f"about {duration(point.seconds)}"
        counts = (f"{point.nodes:,}", f"{point.devices_per_node:,}")
        table.add_row(point.id, *counts, seconds, *_predicted(point))
    return table


def _predicted(point: Point) -> tuple[str, str]:
    """Return time and memory of the first attempt."""
    if not point.predicted:
        return "-", "-"
    first = point.predicted[0]
    memory = f"{number(first.memory_bytes / GIB)} GiB"
    if first.seconds is None or first.covers is None:
        return "cannot say", memory
    low, high = map(number, first.covers)
    return f"{number(first.seconds)} s ({low} to {high})", memory


def _unsaid(selection: Selection) -> list[Text]:
    """Return why the time of a step cannot be said."""
    reasons = (one.unknown for point in selection.plan.points for one in point.predicted[:1])
    return [Text(f"Cannot say: {reason}.") for reason in dict.fromkeys(reasons) if reason]


def _differences(selection: Selection) -> Table:
    table = Table("differs", "here", "published", box=None, padding=(0, 2, 0, 0), caption_justify="left")
    for one in selection.plan.differences:
        if one.stated:
            table.add_row(one.field, Text(plain(one.found)), Text(plain(one.published)))
    silent = [f"{one.field} {plain(one.found)}" for one in selection.plan.differences if not one.stated]
    if silent:
        table.caption = Text(f"Other than the recipe's, where the publication is silent: {', '.join(silent)}")
    return table


def _starts(project: Project, selection: Selection) -> str:
    """Return what is given to the scheduler, or started on the first node, for the first point."""
    rendered, point = commands_of(project, selection), selection.plan.points[0].id
    scripts, commands = rendered.get("scripts"), rendered.get("commands")
    if isinstance(scripts, dict):
        return f"The scheduler gets for {point}:\n{scripts[point]['script']}"
    assert isinstance(commands, dict)
    return f"Ranks of {point} are started by:\n{shlex.join(commands[point][0]['arguments'])}"


# Without a question.
LONG_SECONDS = 900.0


def ask(selection: Selection, *, yes: bool) -> None:
    """Ask whether a run that takes long on a processor is to start.

    Args:
        yes: the answer was given as an option.

    Raises:
        InputError: there is no terminal to ask on.
        RunInterruptedError: the answer is no.
    """
    seconds = _long(selection)
    if yes or seconds is None:
        return
    text = f"about {duration(seconds)} on a processor, estimated"
    if not sys.stdin.isatty():
        raise InputError(
            "a run of this length is started only after a question, and there is no terminal to ask on",
            place="invoke run",
            found=text,
            allowed=f"up to {duration(LONG_SECONDS)} without a question",
            hint="--yes starts it; `--scale smoke` as the recipe has it takes about a minute",
        )
    sys.stderr.write(f"this takes {text}; start it? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise RunInterruptedError("not started", hint="--yes starts it without a question")


def warn(project: Project, selection: Selection, *, out: Path, detach: bool) -> None:
    """Print what stands against a plan that is only printed: all that a run would refuse before it starts."""
    if (seconds := _long(selection)) is not None:
        print(
            f"warning   about {duration(seconds)} on a processor: the run starts only with --yes",
            file=sys.stderr,
        )
    ready, site = partial(demand_ready, project, out=out), partial(_demand_site, detach=detach)
    for demand in (_demand_devices, site, demand_runnable, ready):
        try:
            demand(selection)
        except TwinrunError as error:
            said = f"{error}".removeprefix("error: ")
            print(f"warning   a run would be refused here: {said}", file=sys.stderr)


def _long(selection: Selection) -> float | None:
    """Return the estimated seconds on a processor, None for a run that starts without a question."""
    seconds = sum(point.seconds or 0.0 for point in selection.plan.points)
    return None if selection.plan.gpu or selection.accelerator or seconds <= LONG_SECONDS else seconds
