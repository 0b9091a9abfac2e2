"""Which rank a failed start failed for, as the processes beside the ranks have written it down."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from twinrun.foundation.errors import RunError
from twinrun.foundation.manifest import load_json
from twinrun.protocol.pulse import FOLDER, RankState

# How the kernel calls the state of a process that was stopped, or is traced.
_HALTED = ("T", "t")


def rank_states(folder: Path) -> list[RankState]:
    """Return what is known of the ranks of a point, in their order."""
    found = [load_json(path, RankState) for path in (folder / FOLDER).glob("*.json")]
    return sorted(found, key=lambda one: one.rank)


def hang(states: Sequence[RankState], *, point: str, logs: Path) -> RunError | None:
    """Return what to say where ranks were killed because they made no progress, else None."""
    hung = [one for one in states if one.end == "hung"]
    if not hung:
        return None
    rank, reason = _first_to_hang(hung, [one for one in states if one.end is None])
    longest = max(one.silent_seconds for one in hung)
    return RunError(
        f"the ranks made no progress for {longest:.0f} s and were killed",
        place=point,
        found=f"{described(rank)}; {reason}",
        hint=f"the logs are in {logs}; after mending the cause, --resume goes on",
    )


def silent(states: Sequence[RankState]) -> str:
    """Return the ranks whose machine had no time to say how they end; empty for none."""
    return "; ".join(described(one) for one in states if one.end is None)


def described(state: RankState) -> str:
    """Return in words where a rank was, and what it did."""
    at = f"at step {state.step}: {state.operation}" if state.step else state.operation
    return f"rank {state.rank} on {state.host}, pid {state.pid}, {at}"


def _first_to_hang(hung: Sequence[RankState], mute: Sequence[RankState]) -> tuple[RankState, str]:
    """Return the rank that the others waited for, as far as that can be told, and why it is that one."""
    for one in hung:
        if one.process.startswith(_HALTED):
            return one, "its process was stopped"
    if mute:
        return mute[0], "its machine says nothing any more"
    cut = [one for one in hung if one.reaches_first is False]
    hosts, cut_hosts = {one.host for one in hung}, {one.host for one in cut}
    if cut and 2 * len(cut_hosts) <= len(hosts):
        return cut[0], "its machine does not reach that of rank 0"
    if cut:
        return hung[0], f"its machine is not reached from {', '.join(sorted(cut_hosts))}"
    last = min(hung, key=lambda one: (one.step, one.since))
    return last, f"it is the first of {len(hung)} that fell silent"
