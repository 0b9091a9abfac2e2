"""The checks of the machine; `twinrun.machine.doctor` puts them together."""

from __future__ import annotations

from typing import Literal

from twinrun.foundation.manifest import Frozen

GIB = 1 << 30


class HostCheck(Frozen):
    """The result of one check."""

    name: str
    status: Literal["ok", "absent", "warn", "fail", "unknown"]
    """`absent` is needed only for what `needed` names; `unknown` means that the check could not be made."""
    found: str
    needed: str
    hint: str | None = None
