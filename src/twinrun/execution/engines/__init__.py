"""Engines, one module each: how a stack becomes processes."""

from __future__ import annotations

import sys
from typing import Any

from twinrun.execution.engine import EngineModule
from twinrun.foundation.discovery import load_part


def load_engine(name: str) -> EngineModule:
    """Return the engine called `name`; raises InputError when there is none."""
    part: Any = load_part(sys.modules[__name__], name)
    engine: EngineModule = part
    return engine
