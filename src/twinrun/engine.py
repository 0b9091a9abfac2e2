"""What an engine is: a stack provisioned so that commands run in it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from twinrun.hardware import Vendor
from twinrun.manifest import Frozen
from twinrun.stack import LoadedStack

# The word that stands for the stack's interpreter in every rendered command.
PYTHON = "python"
_POLL_SECONDS = 0.1


class Site(Frozen):
    """The folders of this machine that a run uses."""

    root: Path
    """The project, read only."""
    run: Path
    """The run's own folder."""
    data: Path
    """Prepared data sets."""
    packages: tuple[Path, ...] = ()
    """Folders of the project that ranks import from, beside its own package."""


class Command(Frozen):
    """One process to start: an argument list, never a shell string."""

    arguments: tuple[str, ...]
    """The first is PYTHON; paths are as the process sees them."""
    variables: dict[str, str]
    """Added to the environment."""
    writes_data: bool = False
    """Whether it prepares data sets; all others only read them."""


class Running(Protocol):
    """A started process and all its children."""

    def poll(self) -> int | None:
        """Return the exit status, or None while it runs."""

    def stop(self) -> None:
        """End the process and its children, politely first; returns when they are gone."""


class Engine(Protocol):
    """A provisioned environment that commands run in."""

    image_digest: str | None
    """What really runs, where it is an image."""

    def inside(self, path: Path) -> str:
        """Return `path` as processes of this engine see it."""

    def start(self, command: Command, *, log: Path) -> Running:
        """Start `command` with its output in `log`."""

    def read(self, command: Command) -> str:
        """Run a short `command` and return its standard output; raises RunError."""


def run_to_end(engine: Engine, command: Command, *, log: Path) -> int:
    """Run `command` with its output in `log` and return its exit status; nothing of it is left behind."""
    running = engine.start(command, log=log)
    try:
        while (status := running.poll()) is None:
            time.sleep(_POLL_SECONDS)
    finally:
        running.stop()
    return status


class Opener(Protocol):
    """What an engine module offers as `open_engine`."""

    def __call__(
        self, *, stack: LoadedStack, vendor: Vendor, site: Site, say: Callable[[str], None]
    ) -> Engine:
        """Provision the stack and return the engine; raises MachineError."""
