"""`twinrun run`, `data` and `recipes`: from a request to the printed plan, or to the record."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Group
from rich.constrain import Constrain

from twinrun import api
from twinrun.cli.console import Shown, listed, resumable, tell
from twinrun.cli.program import LONG_SECONDS, Count, Out, unasked
from twinrun.execution.ranks import all_pending
from twinrun.export import tracked_run, trackers
from twinrun.foundation.cache import project_root
from twinrun.foundation.text import duration
from twinrun.planning.project import Project
from twinrun.report.plan import choice_lines, everything, page
from twinrun.report.words import headline
from twinrun.results.reading import FinishedRun
from twinrun.results.verdicts import FAILURES
from twinrun.runs.data import acquire, fetch_model
from twinrun.runs.prepared import prepare
from twinrun.runs.selection import Request, select

_LEFT_OPEN = Request()


def run(
    recipe: str,
    /,
    *,
    request: Annotated[Request, Parameter("*")] = _LEFT_OPEN,
    controls: Count = None,
    trace: bool = False,
    out: Out = None,
    track: str | None = None,
    resume: bool = False,
    detach: bool = False,
    yes: bool = False,
) -> Shown:
    """Run a published experiment and judge its claims.

    Args:
        recipe: folder of the recipe, for example recipes/mpt7b-scaling
        controls: control runs of the first point, which sum in other orders: 8 or more for a parity
        trace: write digests by step and layer, for `parity --trace`; nothing is compiled then
        out: folder for the run instead of runs/
        track: trackers to write the run for, separated by commas: tensorboard, mlflow, wandb
        resume: go on with the newest unfinished run of the same plan, and with the jobs that it has
        detach: submit the jobs of all points and return; the same command with --resume collects them
        yes: start also what takes long on a processor
    """
    settings = [f"controls={controls}"] if controls else []
    settings += ["trace=true", "compile=false"] if trace else []
    request = replace(request, recipe=recipe, set=(*request.set, *settings))
    chosen = trackers.choose_trackers(track) if track else {}
    project = Project(project_root())
    selection = select(project, request)
    points = () if selection.plan.gpu or selection.hardware.devices else selection.plan.points
    seconds = sum(point.seconds or 0.0 for point in points)
    text = f"about {duration(seconds)} on a processor, estimated"
    long = [unasked(text, place="twinrun run")] if seconds > LONG_SECONDS else []
    prepared = prepare(project, selection, out=out, resume=resume, detach=detach, dry=request.dry)
    if request.dry:
        for one in (*long, *prepared.refusals):
            tell(f"warning   a run would be refused here: {str(one).removeprefix('error: ')}")
        return Shown(page(prepared), everything(prepared))
    tell("\n".join(choice_lines(selection)))
    for refusal in () if yes else long:
        raise refusal
    from twinrun.runs.run import Display, execute

    with Display() as display:
        finished = execute(prepared, display=display, detach=detach)
    if isinstance(finished, Path):
        jobs = all_pending(finished)
        tell(f"submitted; `twinrun jobs` shows them, the same command with --resume collects: {finished}")
        view = listed(jobs, "handle", "site", "point", none="nothing was submitted").view
        return Shown(view, {"run": finished, "jobs": jobs})
    shown = _ended(finished)
    for name, write in chosen.items():
        place = finished.folder / "trackers" / name
        tell(f"{name}: {write(place, tracked_run.tracked_run(finished))}")
    return shown


def _ended(run: FinishedRun) -> Shown:
    """Write what a run has found, and return it; the code is 1 where a claim or a check failed."""
    from twinrun.export.check_files import write_check_files
    from twinrun.report.page import write_report
    from twinrun.report.tables import offer, run_tables, verdict_table
    from twinrun.report.terminal import RUN_COLUMNS

    record, report = run.record, write_report(run.folder / "report.html", run)
    write_check_files(run)
    data = {"headline": headline(record), "run": record.run, "record": run.file, "report": report}
    data["points"] = [point.summary() for point in record.points]
    data["verdicts"] = [one.shown() for one in record.verdicts]
    tables: list[Any] = [run_tables(run), f"{data['headline']}\n"]
    tables += [verdict_table(record.verdicts)] if record.verdicts else []
    failed = any(check.outcome == "fail" for point in record.points for check in point.checks)
    failed |= any(verdict.final in FAILURES for verdict in record.verdicts)
    view = Group(*tables, f"report: {report}", offer(run).rstrip())
    return Shown(Constrain(view, RUN_COLUMNS), data, int(failed))


def data(
    name: str,
    /,
    *,
    recipe: str = "recipes/mpt7b-scaling",
    engine: str = "venv",
    sequence: Count = None,
    files: Count = None,
    endpoint: str | None = None,
) -> Shown:
    """Fetch, verify and tokenise a data set, or fetch a model; goes on where it was stopped.

    Args:
        name: a data set of the recipe, for example c4, or a model as OWNER/NAME@COMMIT
        recipe: folder of the recipe
        engine: where it is tokenised: venv, docker or host
        sequence: tokens of a sequence of a training; those of the published model when left out
        files: how many files of the data set to take; all when left out
        endpoint: server to fetch from instead of the public hub
    """
    project = Project(project_root())
    typed: dict[str, Any] = {"recipe": recipe, "engine": engine, "sequence": sequence, "files": files}
    server: dict[str, Any] = {"endpoint": endpoint, "say": tell}
    with resumable(name):
        found = fetch_model(name, **server) if "/" in name else acquire(project, name, **typed, **server)
    return Shown(str(found), {"name": name, "folder": found})


def recipes() -> Shown:
    """List the recipes, what each asks, and what it would do on this machine; 2 where one is broken.

    Of more than 50 recipes only what each asks is listed.
    """
    rows, faults = api.recipes(root=project_root())
    for fault in faults:
        tell(fault)
    columns = ("recipe", "question", *(("here",) if rows and "here" in rows[0] else ()))
    return listed(rows, *columns, none="no recipe", code=faults[-1].exit_code if faults else 0)
