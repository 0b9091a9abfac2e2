"""`invoke jobs`: what runs have submitted and not collected, and the jobs of a site."""

from __future__ import annotations

import time
from pathlib import Path

from twinrun.cli.console import print_json
from twinrun.execution.batch import BatchScheduler, client_of
from twinrun.execution.engine import log_folder
from twinrun.execution.pending import FOLDER, Pending, all_pending
from twinrun.execution.schedulers import load_scheduler
from twinrun.foundation.errors import InputError, MachineError, RunError, RunInterruptedError
from twinrun.foundation.terminal import say
from twinrun.manifests.cluster import load_site


def jobs(root: Path, site: str | None, *, out: Path | None, follow: str | None, cancel: str | None) -> None:
    """Print what waits to be collected, or the jobs of a site; end one, or follow one to its end."""
    if site is None:
        if follow or cancel:
            raise InputError("a job is one of a site", place="invoke jobs", found="no --cluster")
        _print_waiting(root, out or root / "runs")
        return
    client = client_of(load_site(root, site))
    for number in filter(None, (follow, cancel)):
        if not number.partition(".")[0].isdecimal():
            raise InputError("a job is named by its number", place="invoke jobs", found=number)
    if cancel:
        client.end(cancel)
    if follow:
        _follow(client, follow)
        return
    for job in client.jobs():
        where = job.nodes or job.reason
        say(f"{job.id:>8}  {job.state:12} {job.run_seconds:6.0f} s  {job.user:12} {job.name}  {where}")


def say_pending(run: Path, *, as_json: bool) -> None:
    """Print what a detached run has submitted, and how it is collected."""
    found = all_pending(run)
    if as_json:
        print_json({"run": str(run), "jobs": [one.model_dump() for one in found]})
        return
    for one in found:
        say(f"{one.handle:>8}  {one.site:12} {one.point}")
    say(f"submitted from {run}; `invoke jobs` shows them, the same command with --resume collects them")


def _print_waiting(root: Path, folder: Path) -> None:
    waiting = [(file.parent.parent, one) for file, one in _waiting(folder)]
    for run, one in waiting:
        say(f"{one.handle:>8}  {one.site:12} {_state(root, run, one):34} {one.point}  {run}")
    if not waiting:
        say(f"no job of a run in {folder} waits to be collected; --cluster SITE lists those of a site")


def _waiting(folder: Path) -> list[tuple[Path, Pending]]:
    """Return what runs below a folder have submitted and not collected, with the files that say so."""
    runs = sorted({file.parent.parent for file in folder.glob(f"*/*/{FOLDER}/*.json")})
    return [(run / FOLDER / "job", one) for run in runs for one in all_pending(run)]


def _state(root: Path, run: Path, one: Pending) -> str:
    """Return in words whether a job has ended."""
    try:
        scheduler = load_scheduler(one.scheduler, site=load_site(root, one.site))
        submission = scheduler.adopt(one.handle, point=one.point, logs=log_folder(run, one.point))
        status = submission.poll()
    except (InputError, MachineError) as error:
        return f"not known: {error.message}"
    except (RunError, RunInterruptedError) as error:
        return f"ended: {error.message}"
    if status is None:
        return f"runs on {submission.nodes[0]}" if submission.nodes else "waits for nodes"
    return "ended, --resume collects it"


def _follow(client: BatchScheduler, number: str) -> None:
    """Show what a job prints until it ends; raises RunError where the job is not known."""
    shown: dict[Path, int] = {}
    while True:
        state = client.state(number)
        if state is None:
            if not shown:
                raise RunError(f"{client.title} does not know this job", place="invoke jobs", found=number)
            say(f"{number} has ended")
            return
        # Beside what the script prints lies what each node prints.
        for file in sorted(Path(state.output).parent.glob("launcher*.log")):
            text = file.read_text(encoding="utf-8", errors="replace")
            say(text[shown.get(file, 0) :], end="")
            shown[file] = len(text)
        if state.ended:
            say(f"{state.id} {state.state}")
            return
        time.sleep(client.site.site.poll_seconds)
