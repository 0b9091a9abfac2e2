"""Apptainer, for clusters without a daemon."""

from __future__ import annotations

from collections.abc import Callable

from twinrun.execution import sif
from twinrun.execution.engine import Engine, Renderer, Workspace
from twinrun.manifests.stack import LoadedStack
from twinrun.manifests.vendor import Vendor

PROGRAM = sif.Program("apptainer", "APPTAINERENV_")
RUNS_IMAGES = True
ADDS_GROUPS = False


def unusable(*, stack: LoadedStack, vendor: Vendor) -> str | None:
    """Return why the stack's file cannot be run here, or None."""
    return sif.unusable(PROGRAM, stack)


def renderer(*, stack: LoadedStack, vendor: Vendor, workspace: Workspace) -> Renderer:
    """Return what writes the commands, whether the file is there or not."""
    return sif.renderer(PROGRAM, stack=stack, vendor=vendor, workspace=workspace)


def open_engine(
    *, stack: LoadedStack, vendor: Vendor, workspace: Workspace, say: Callable[[str], None]
) -> Engine:
    """Return the engine for the file of the stack's image; raises MachineError where it cannot be run."""
    return sif.open_engine(PROGRAM, stack=stack, vendor=vendor, workspace=workspace)
