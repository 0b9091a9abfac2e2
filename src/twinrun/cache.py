"""Where things that can be made again are kept between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """Return $TWINRUN_CACHE, else $XDG_CACHE_HOME/twinrun, else ~/.cache/twinrun."""
    own, shared = os.environ.get("TWINRUN_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own).expanduser().absolute()
    base = Path(shared).expanduser() if shared else Path.home() / ".cache"
    return base.absolute() / "twinrun"


def environment_folder(stack: str, lock_sha256: str) -> Path:
    """Return the virtual environment that belongs to one lock of `stack`."""
    return cache_root() / "environments" / f"{stack}-{lock_sha256[:12]}"
