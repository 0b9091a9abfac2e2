"""Checks of the machine, one function each; `twinrun.doctor` puts them together."""

from __future__ import annotations

from typing import Literal

from twinrun.manifest import Frozen

GIB = 1 << 30


class Check(Frozen):
    """One finding."""

    name: str
    status: Literal["ok", "warn", "fail", "unknown"]
    """`unknown` when the check itself could not be made."""
    found: str
    needed: str
    hint: str | None = None
