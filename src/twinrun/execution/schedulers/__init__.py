"""Schedulers, one module each: what gets nodes and starts a task on them."""

from __future__ import annotations

import sys
from typing import Any

from twinrun.execution.batch import BatchJob, BatchScheduler
from twinrun.execution.schedulers.local import Local, LocalSubmission
from twinrun.foundation.discovery import load_part
from twinrun.foundation.errors import InputError
from twinrun.manifests.cluster import LoadedSite

Scheduler = Local | BatchScheduler
# A task that a scheduler has taken.
Submission = LocalSubmission | BatchJob


def load_scheduler(name: str, *, site: LoadedSite | None = None) -> Scheduler:
    """Return the scheduler called `name`; raises InputError when there is none, or the site lacks a key."""
    part: Any = load_part(sys.modules[__name__], name)
    scheduler: Scheduler = part.open_scheduler(site=site)
    scheduler.demand()
    return scheduler


def client_of(site: LoadedSite) -> BatchScheduler:
    """Return what the scheduler of a site is asked through, whatever its jobs would lack."""
    client = load_part(sys.modules[__name__], site.site.scheduler).open_scheduler(site=site)
    if not isinstance(client, BatchScheduler):
        raise InputError("no scheduler of jobs", place=f"{site.place}.scheduler", found=site.site.scheduler)
    return client
