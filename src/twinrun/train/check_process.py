"""One check in a process of its own, which is killed when its time is over. Imports without torch."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from twinrun.protocol.checks import CheckSpec
from twinrun.protocol.measurements import Check

# Ranks of one check find the same at about the same time; to wait longer for one that gave up is in vain.
OTHERS_SECONDS = 10.0
_POLL_SECONDS = 0.2


class CheckError(Exception):
    """What a check found wrong, and what to do about it."""

    def __init__(self, reason: str, *, remedy: str | None = None, nodes: Sequence[str] = ()) -> None:
        super().__init__(reason)
        self.reason = reason
        self.remedy = remedy
        self.nodes = tuple(nodes)


class UndecidedError(Exception):
    """Why a check could find out nothing, and what would let it."""

    def __init__(self, reason: str, *, remedy: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.remedy = remedy


def run_check(
    spec: CheckSpec,
    function: Callable[[], str | None],
    *,
    place: str,
    variables: Mapping[str, str],
    is_over: Callable[[], bool] = lambda: False,
) -> Check:
    """Run `function` in a forked process with `variables` in its environment; return its outcome.

    Args:
        is_over: says whether another rank has ended this check without passing it; it is not waited for long.
    """
    began = time.monotonic()
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(function, variables, writer))
    process.start()
    writer.close()
    with contextlib.suppress(OSError):
        # Here too: whichever process is first, the group is there before anything is killed.
        os.setpgid(process.pid or 0, process.pid or 0)
    try:
        finding = _finding(reader, deadline=began + spec.timeout, is_over=is_over)
    finally:
        reader.close()
        with contextlib.suppress(ProcessLookupError):
            # With all that it has started.
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
    if finding is None:
        finding = {"outcome": "fail", "reason": f"timed out after {spec.timeout:g} s"}
    content = {"id": spec.id, "place": place, "seconds": time.monotonic() - began}
    content |= finding or {"outcome": "unknown", "reason": _described(process.exitcode or 0)}
    # As JSON, in which a list is a tuple.
    return Check.model_validate_json(json.dumps(content))


def _finding(reader: Any, *, deadline: float, is_over: Callable[[], bool]) -> dict[str, Any] | None:
    """Return what the process found, nothing where it ended without, None where its time is over."""
    others = False
    while not reader.poll(min(max(0.0, deadline - time.monotonic()), _POLL_SECONDS)):
        if time.monotonic() > deadline:
            over = {"outcome": "unknown", "reason": "not ended: another rank has, without passing"}
            return over if others else None
        if not others and is_over() and time.monotonic() + OTHERS_SECONDS < deadline:
            others, deadline = True, time.monotonic() + OTHERS_SECONDS
    try:
        # Nothing is unpickled.
        found: dict[str, Any] = json.loads(reader.recv_bytes())
    except EOFError:
        return {}
    return found


def _answer(function: Callable[[], str | None], variables: Mapping[str, str], writer: Any) -> None:
    """Say what `function` finds; in a group of its own it is killed with all that it has started."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.update(variables)
    try:
        found: dict[str, Any] = {"outcome": "pass", "reason": function() or ""}
    except CheckError as failed:
        found = {"outcome": "fail", "reason": failed.reason, "remedy": failed.remedy, "nodes": failed.nodes}
    except UndecidedError as unknown:
        found = {"outcome": "unknown", "reason": unknown.reason, "remedy": unknown.remedy}
    except BaseException as error:
        traceback.print_exc()
        found = {"outcome": "unknown", "reason": f"{type(error).__name__}: {error}"}
    writer.send_bytes(json.dumps(found).encode())


def _described(status: int) -> str:
    return f"ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
