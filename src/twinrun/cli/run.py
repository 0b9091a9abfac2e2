"""`invoke run` and `invoke data`: from a request to the printed plan, or to the record and its exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from twinrun.cli import consent
from twinrun.cli.console import print_json
from twinrun.foundation.errors import InputError, RunInterruptedError
from twinrun.foundation.terminal import say
from twinrun.planning.project import Project
from twinrun.runs.preconditions import demand_ready
from twinrun.runs.selection import Request, Selection, select
from twinrun.workloads.settings import NOT_RECORDED

if TYPE_CHECKING:
    from twinrun.report.trackers import ChosenTracker
    from twinrun.results.record import Record

__all__ = ["Request", "data", "run"]


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
        consent.warn(selection)
        return 0
    _print_choices(selection)
    if detach and selection.site is None:
        hint = "add --cluster SITE; on this machine a run ends with the command that started it"
        raise InputError("nothing would go on with the run", place="--detach", found="no site", hint=hint)
    from twinrun.cli.records import offer, write_run_report
    from twinrun.foundation.files import write_atomically
    from twinrun.results.verdicts import FAILURES
    from twinrun.runs.progress import Display
    from twinrun.runs.run import execute

    demand_ready(project, selection, out=(out or root / "runs").absolute())
    consent.ask(selection, yes=yes)
    with Display() as display:
        record, folder = execute(
            project=project, selection=selection, out=out, resume=resume, display=display, detach=detach
        )
    if record is None:
        from twinrun.cli.jobs import say_pending

        say_pending(folder, as_json=as_json)
        return 0
    page = write_run_report(project, record, folder / "report.html")
    for name, text in record.workload.show(record.shown()).files.items():
        write_atomically(folder / name, text)
    form = offer(project, record, folder)
    if as_json:
        print_json(summary(record, folder))
    else:
        _show(project, record, page)
        say(form, end="")
    _track(project, record, folder, chosen)
    failed = any(check.outcome == "fail" for point in record.points for check in point.checks)
    return int(failed or any(verdict.final in FAILURES for verdict in record.verdicts))


def _trackers(text: str) -> tuple[ChosenTracker, ...]:
    """Return the trackers that `--track` names; what they need is slow to import."""
    if not text:
        return ()
    from twinrun.report.trackers import choose_trackers

    return choose_trackers(text)


def _track(project: Project, record: Record, folder: Path, chosen: Sequence[ChosenTracker]) -> None:
    """Write the run for each tracker, and say how it is opened."""
    if not chosen:
        return
    from twinrun.report.tracking import tracked_run

    run = tracked_run(record, folder, project.metrics)
    for name, tracker in chosen:
        say(f"{name}: {tracker.write(folder / 'trackers' / name, run)}", file=sys.stderr)


def _print_choices(selection: Selection) -> None:
    """Say what was chosen and where the run is not the published configuration."""
    for choice in selection.choices:
        say(f"{choice.name:9} {choice.value}  ({choice.because})", file=sys.stderr)
    differences = selection.plan.differences
    for item in differences:
        if item.found != NOT_RECORDED:
            say(f"differs   {item.field} is {item.found}, published {item.published}", file=sys.stderr)
    if absent := [item.field for item in differences if item.found == NOT_RECORDED]:
        say(f"differs   published, and nothing of this run: {', '.join(absent)}", file=sys.stderr)


def _print_plan(project: Project, selection: Selection, *, as_json: bool) -> None:
    from twinrun.cli import dry
    from twinrun.report.terminal import show

    if as_json:
        _print_choices(selection)
        print_json(dry.everything(project, selection))
    else:
        show(dry.page(project, selection))


def summary(record: Record, folder: Path) -> dict[str, object]:
    """Return what `--json` prints: where the record is, its points and verdicts."""
    from twinrun.report.words import headline

    numbers = {"id", "nodes", "devices", "cards", "hosts", "measurements", "checks", "facts"}
    return {
        "headline": headline(record),
        "run": record.run,
        "record": str(folder / "record.json"),
        "report": str(folder / "report.html"),
        "points": [point.model_dump(mode="json", include=numbers) for point in record.points],
        "verdicts": [one.model_dump() | {"final": one.final, "why": one.why} for one in record.verdicts],
    }


def _show(project: Project, record: Record, page: Path) -> None:
    from twinrun.report.tables import beside_published, record_tables, verdict_table
    from twinrun.report.terminal import show
    from twinrun.report.words import headline
    from twinrun.workloads.workload import PictureContext

    say(headline(record))
    say()
    if record.verdicts:
        show(verdict_table(record.verdicts))
    show(record_tables(record))
    recipe = project.recipe(record.plan.recipe)
    show(beside_published(record, PictureContext(recipe=recipe, gpus=project.gpus)))
    say(f"report: {page}")


def data(root: Path, name: str, *, recipe: str, engine: str, files: int | None, endpoint: str | None) -> None:
    """Fetch and prepare a data set, or fetch a model, and print its folder."""
    from twinrun.runs.data import acquire
    from twinrun.runs.models import fetch_model
    from twinrun.runs.progress import Display

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
