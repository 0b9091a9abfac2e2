"""What is wrong with a checkpoint: which file, what it should hold and what it holds."""

from __future__ import annotations

from twinrun.foundation.errors import RunError


class DamagedError(RunError):
    """A checkpoint, or a part of it, is not what was written."""
