"""The interpreter as it is; differences from the lock are recorded."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from twinrun.engine import Engine, Site
from twinrun.hardware import Vendor
from twinrun.interpreter import Interpreter
from twinrun.stack import LoadedStack

RUNS_IMAGES = False


def unusable(*, stack: LoadedStack, vendor: Vendor) -> str | None:
    """Return None: the running interpreter is always there."""
    return None


def open_engine(*, stack: LoadedStack, vendor: Vendor, site: Site, say: Callable[[str], None]) -> Engine:
    """Return the running interpreter."""
    return Interpreter(python=sys.executable, site=site, search_path=os.environ.get("PYTHONPATH", ""))
