"""Whether two training logs show one curve: readers of logs, control runs, traces, and the answer.

`twinrun.parity.renumber(model, seed)` and `twinrun.parity.Tracer` need torch alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twinrun.parity.controls import renumber
    from twinrun.protocol.digests import Tracer

__all__ = ["Tracer", "renumber"]


_HOMES = {"renumber": "twinrun.parity.controls", "Tracer": "twinrun.protocol.digests"}


def __getattr__(name: str) -> Any:
    """Import what needs torch when it is asked for: the host side works without."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
