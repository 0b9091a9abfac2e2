"""Schedulers, a module each: what gets nodes and starts a task on them."""

from __future__ import annotations

from twinrun.execution.batch import BatchJob, BatchScheduler
from twinrun.execution.schedulers.gridengine import GridEngine
from twinrun.execution.schedulers.local import Local, LocalSubmission
from twinrun.execution.schedulers.pbs import Pbs
from twinrun.execution.schedulers.skypilot import SkyPilot
from twinrun.execution.schedulers.slurm import Slurm
from twinrun.foundation.errors import require_known
from twinrun.manifests.cluster import LoadedSite

Scheduler = Local | BatchScheduler
# A task that a scheduler has taken.
Submission = LocalSubmission | BatchJob
SCHEDULERS: dict[str, type[Scheduler]] = {one.name: one for one in (GridEngine, Local, Pbs, SkyPilot, Slurm)}


def load_scheduler(name: str, *, site: LoadedSite | None = None) -> Scheduler:
    """Return the scheduler called `name`; raises InputError when there is none, or the site lacks a key."""
    require_known(name, list(SCHEDULERS), "unknown scheduler", place="--scheduler")
    scheduler = SCHEDULERS[name](site=site)
    scheduler.demand()
    return scheduler


def client_of(site: LoadedSite) -> BatchScheduler:
    """Return what the scheduler of a site is asked through, whatever its jobs would lack."""
    name, place = site.site.scheduler, f"{site.place}.scheduler"
    known = [one for one in SCHEDULERS if one != Local.name]
    require_known(name, known, "no scheduler of jobs", place=place)
    client = SCHEDULERS[name](site=site)
    assert isinstance(client, BatchScheduler)
    return client
