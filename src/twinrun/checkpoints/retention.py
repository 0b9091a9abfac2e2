"""Which checkpoints are kept: the newest, of which one at least was read back and found good."""

from __future__ import annotations

from twinrun.checkpoints.faults import DamagedError
from twinrun.checkpoints.store import Store
from twinrun.checkpoints.verification import verify
from twinrun.foundation.errors import InputError

KEPT = 2


def retire(store: Store, *, kept: int = KEPT) -> list[int]:
    """Remove all but the newest `kept` checkpoints and return their steps; none where no kept one is good."""
    steps = store.steps()
    old, new = steps[:-kept], steps[-kept:]
    if not old or not any(_is_good(store, step) for step in reversed(new)):
        return []
    for step in old:
        store.remove(step)
    return old


def _is_good(store: Store, step: int) -> bool:
    try:
        verify(store, step)
    except (DamagedError, InputError):
        return False
    return True
