"""The interpreter as it is; differences from the lock are recorded."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from twinrun.execution.engine import Engine, Workspace
from twinrun.execution.local_engines import Interpreter
from twinrun.manifests.stack import LoadedStack
from twinrun.manifests.vendor import Vendor

RUNS_IMAGES = False
ADDS_GROUPS = False


def unusable(*, stack: LoadedStack, vendor: Vendor) -> str | None:
    """Return None: the running interpreter is always there."""
    return None


def renderer(*, stack: LoadedStack, vendor: Vendor, workspace: Workspace) -> Interpreter:
    """Return the running interpreter."""
    search_path = os.environ.get("PYTHONPATH", "")
    return Interpreter(python=sys.executable, workspace=workspace, search_path=search_path)


def open_engine(
    *, stack: LoadedStack, vendor: Vendor, workspace: Workspace, say: Callable[[str], None]
) -> Engine:
    """Return the running interpreter."""
    return renderer(stack=stack, vendor=vendor, workspace=workspace)
