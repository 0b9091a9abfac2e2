"""Why a launch failed, and for which rank, as logs and the ranks' pulses tell."""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from twinrun.execution.engine import log_folder, point_folder
from twinrun.execution.launchers import Launcher, node_logs
from twinrun.foundation.errors import MachineError, RunError, RunInterruptedError, TwinrunError
from twinrun.foundation.manifest import load_json
from twinrun.foundation.processes import end_of, last_lines
from twinrun.protocol.allocation import Placement
from twinrun.protocol.job import OUT_OF_MEMORY, REFUSED, STOPPED
from twinrun.protocol.signals import PULSE, RankState, interval

# What the interpreter's watchdog writes before the traceback of each thread, the newest call first.
_HANG = re.compile(r"^Timeout \(\d+:\d\d:\d\d", re.MULTILINE)
_PLACE = re.compile(r"\(most recent call first\):\n\s*File (.+)$", re.MULTILINE)
# A rank that has not written for so many intervals, while others have, was stopped or lost its machine.
_QUIET_INTERVALS = 5
_GONE = "its process was stopped, or its machine is gone"
# So long a file system may hide what was written.
_STALE_SECONDS, _FRESH_SECONDS, _LOOK_SECONDS = 45.0, 20.0, 2.0
# How srun names the command of a node that ended badly.
_AGENT = re.compile(r"^srun: error: (\S+): task \d+: (.+)$", re.MULTILINE)
_HINT = "after mending the cause, --resume goes on"


def failure_of(
    placement: Placement, run: Path, logs: Sequence[Path], *, launcher: Launcher, status: int
) -> TwinrunError | None:
    """Return what to say of a launch that ended with `status`; None where a device ran out of memory.

    A rank whose machine refused something is an error of the machine; one whose file system does not answer
    was stopped, and goes on later.

    Args:
        logs: files that the commands of the nodes print to.
        launcher: finds in them the rank that failed first.
    """
    states, texts = rank_states(point_folder(run, placement.id)), [end_of(log) for log in logs]
    if error := hang(states, placement, log_folder(run, placement.id)):
        return error
    failed = launcher.culprit(texts)
    if failed is None:
        agents = [f"the agent of {host}: {end}" for text in texts for host, end in _AGENT.findall(text)]
        cut = [described(one) for one in _mute(states) or states if one.end is None]
        found = "; ".join([*agents[:1], *cut[:1]]) + (last_lines("\n".join(texts)) or "the log is empty")
        message = f"the ranks could not be started or ended with {_end(status)}"
        hint = f"the whole log is {', '.join(map(str, logs)) or 'empty'}"
        return RunError(message, place=placement.id, found=found, hint=hint)
    if failed.status == OUT_OF_MEMORY:
        return None
    log = _log_of(log_folder(run, placement.id), placement, failed.rank) or logs[0]
    where = "".join(described(one) for one in states if one.rank == failed.rank)
    message = f"rank {failed.rank} of {placement.world_size} failed with {_end(failed.status)}"
    found = where + (last_lines(end_of(log)) or "the log is empty")
    killed = "memory may have run out; " if failed.status == -signal.SIGKILL else ""
    kind = {REFUSED: MachineError, STOPPED: RunInterruptedError}.get(failed.status, RunError)
    return kind(message, place=placement.id, found=found, hint=f"the whole log is {log}; {killed}{_HINT}")


class Pulses:
    """When the ranks of a point last wrote their pulse, by the clock of this machine."""

    def __init__(self, folder: Path, *, point: str) -> None:
        """Take the folder of a point."""
        self._folder, self._point = folder / PULSE, point
        self._seen: dict[Path, tuple[int, float]] = {}
        self._looked = 0.0

    def demand_fresh(self) -> None:
        """Raise RunError with host and rank where one was stopped, or its machine says nothing any more.

        That is told only while others write: a file system that hangs is no rank's fault.
        """
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        for file in self._folder.glob("*.json"):
            with contextlib.suppress(FileNotFoundError):
                if self._seen.get(file, (0, 0.0))[0] != (written := file.stat().st_mtime_ns):
                    self._seen[file] = written, now
        ages = {file: now - at for file, (_, at) in self._seen.items() if file.exists()}
        fresh = min(ages.values(), default=0.0) < _FRESH_SECONDS
        for file in (file for file, age in ages.items() if fresh and age > _STALE_SECONDS):
            state = load_json(file, RankState)
            if state.end is None:
                message = f"rank {state.rank} on {state.host} has said nothing for {ages[file]:.0f} s"
                raise RunError(message, place=self._point, found=f"{described(state)}; {_GONE}", hint=_HINT)


def _end(status: int) -> str:
    """Return an exit status in words; a negative one is a signal."""
    if status == -signal.SIGBUS:
        return f"signal {-status}: /dev/shm ran out; in a container --shm-size=8g"
    return f"signal {-status}" if status < 0 else f"exit status {status}"


def with_last_words(error: RunError, *, run: Path, placement: Placement) -> RunError:
    """Return the error of a scheduler with what is known of the ranks."""
    states = rank_states(point_folder(run, placement.id))
    told, alive = str(error.found or "").strip(), [one for one in states if one.end is None]
    # A job that ends with its node silences all ranks at once: the scheduler's words name the host.
    lost = [one for one in alive if re.search(rf"\b{re.escape(one.host)}\b", told)]
    found = hang(states, placement, log_folder(run, placement.id))
    words = str(found.found) if found else "; ".join(map(described, _mute(states) or lost or alive))
    both = "; ".join(filter(None, (told, words)))
    return RunError(error.message, place=error.place, found=both, hint=error.hint)


def rank_states(folder: Path) -> list[RankState]:
    """Return what is known of the ranks of a point, in their order."""
    written = {file: file.stat().st_mtime for file in (folder / PULSE).glob("*.json")}
    newest = max(written.values(), default=0.0)
    quiet = [(load_json(file, RankState), newest - time) for file, time in written.items()]
    found = [state.model_copy(update={"quiet": seconds}) for state, seconds in quiet]
    return sorted(found, key=lambda one: one.rank)


def hang(states: Sequence[RankState], placement: Placement, logs: Path) -> RunError | None:
    """Return what to say where a rank ended itself because it made no progress, else None."""
    working = [one for one in states if one.end is None]
    if not working or not any(_HANG.search(end_of(log)) for log in logs.rglob("*.log")):
        return None
    rank, reason = _first_to_hang(working)
    log = _log_of(logs, placement, rank.rank)
    # The main thread is the last of a traceback.
    place = "".join(f"; in {one}" for one in _PLACE.findall(end_of(log))[-1:]) if log else ""
    message = f"the ranks made no progress for {rank.limit:.0f} s and were killed"
    hint = f"the logs in {logs} have each thread's traceback; {_HINT}"
    return RunError(message, place=placement.id, found=f"{described(rank)}; {reason}{place}", hint=hint)


def described(state: RankState) -> str:
    """Return in words where a rank was, and what it did."""
    at = f"at step {state.step}: {state.operation}" if state.step else state.operation
    return f"rank {state.rank} on {state.host}, pid {state.pid}, {at}"


def _first_to_hang(working: Sequence[RankState]) -> tuple[RankState, str]:
    """Return the rank that the others waited for, as far as that can be told, and why it is that one."""
    cut = [one for one in working if one.reaches_first is False]
    hosts, cut_hosts = {one.host for one in working}, {one.host for one in cut}
    few, many = (cut, []) if 2 * len(cut_hosts) <= len(hosts) else ([], working)
    last = min(working, key=lambda one: (one.step, one.since))
    reasons = (
        (_mute(working), _GONE),
        (few, "its machine does not reach that of rank 0"),
        (many, f"its machine is not reached from {', '.join(sorted(cut_hosts))}"),
        ([last], f"it is the first of {len(working)} that fell silent"),
    )
    return next((found[0], reason) for found, reason in reasons if found)


def _mute(states: Sequence[RankState]) -> list[RankState]:
    """Return the ranks that had stopped to write before the others had."""
    return [one for one in states if one.end is None and one.quiet > _QUIET_INTERVALS * interval(len(states))]


def _log_of(logs: Path, placement: Placement, rank: int) -> Path | None:
    """Return the log of a rank below `logs`, wherever the launcher's version puts it; None for none."""
    node, local = divmod(rank, placement.devices_per_node)
    folder = Path(node_logs(str(logs), placement=placement, node=str(node)))
    found = [path for name in ("stderr.log", "stdout.log") for path in folder.rglob(name)]
    return next((path for path in found if path.parent.name == str(local) and path.stat().st_size), None)
