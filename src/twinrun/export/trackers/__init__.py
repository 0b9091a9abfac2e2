"""Experiment trackers, one module each: `write` puts a finished run into files that the tracker opens."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from twinrun.export.tracked_run import TrackedRun
from twinrun.foundation.discovery import part_names
from twinrun.foundation.errors import InputError, require_known

OPTION = "--track"


@runtime_checkable
class Tracker(Protocol):
    """What each module here offers."""

    PACKAGE: str
    """What it imports."""
    INSTALL: str
    """How that is installed."""

    def write(self, folder: Path, run: TrackedRun) -> str:
        """Write the run below `folder`, which is new; return the command that shows it."""


class ChosenTracker(NamedTuple):
    """A tracker that was asked for, and is installed."""

    name: str
    tracker: Tracker


def choose_trackers(text: str) -> tuple[ChosenTracker, ...]:
    """Return the trackers that `text` names, separated by commas; raises InputError."""
    package = sys.modules[__name__]
    names = [name.strip() for name in text.split(",")] if text else []
    chosen = []
    for name in dict.fromkeys(names):
        require_known(name, part_names(package), "unknown tracker", place=OPTION)
        module: Any = importlib.import_module(f"{__name__}.{name}")
        tracker: Tracker = module
        if find_spec(tracker.PACKAGE) is None:
            raise InputError(
                "this tracker is not installed",
                place=OPTION,
                found=name,
                allowed=[one for one in part_names(package) if _installed(one)],
                hint=tracker.INSTALL,
            )
        chosen.append(ChosenTracker(name, tracker))
    return tuple(chosen)


def _installed(name: str) -> bool:
    return find_spec(importlib.import_module(f"{__name__}.{name}").PACKAGE) is not None
