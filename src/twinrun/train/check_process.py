"""One check in a process of its own, which is killed when its time is over. Imports without torch."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from twinrun.foundation.processes import readable
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
    deadline = began + spec.timeout
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if process == 0:
        os.environ.update(variables)
        _child(function, writer)
    os.close(writer)
    with contextlib.suppress(OSError):
        # Here too: whichever process is first, the group is there before anything is killed.
        os.setpgid(process, process)
    try:
        answer = _read_line(reader, deadline=deadline, is_over=is_over)
    finally:
        os.close(reader)
        status = _end(process)
    finding: dict[str, Any] = {"outcome": "fail", "reason": f"timed out after {spec.timeout:g} s"}
    if answer is not None:
        finding = json.loads(answer) if answer else {"outcome": "unknown", "reason": _describe(status)}
    elif time.monotonic() < deadline:
        finding = {"outcome": "unknown", "reason": "not ended: another rank has, without passing"}
    content = {"id": spec.id, "place": place, "seconds": time.monotonic() - began, **finding}
    # As JSON, in which a list is a tuple.
    return Check.model_validate_json(json.dumps(content))


def _child(function: Callable[[], str | None], writer: int) -> NoReturn:
    """Write what `function` finds as a line of JSON, and end."""
    # With a group of its own it is killed with all that it has started.
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    answer = _answer(function)
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(writer, json.dumps(answer).encode() + b"\n")
    # Exit handlers belong to the parent.
    os._exit(0)


def _answer(function: Callable[[], str | None]) -> dict[str, Any]:
    try:
        said = function()
    except CheckError as failed:
        found = {"reason": failed.reason, "remedy": failed.remedy, "nodes": failed.nodes}
        return {"outcome": "fail", **found}
    except UndecidedError as unknown:
        return {"outcome": "unknown", "reason": unknown.reason, "remedy": unknown.remedy}
    except BaseException as error:
        traceback.print_exc()
        return {"outcome": "unknown", "reason": f"{type(error).__name__}: {error}"}
    return {"outcome": "pass", "reason": said or ""}


def _read_line(reader: int, *, deadline: float, is_over: Callable[[], bool]) -> bytes | None:
    """Return the line, empty when the process ended without one, None when there is none in time."""
    line, over = b"", False
    while not line.endswith(b"\n"):
        left = deadline - time.monotonic()
        if readable(reader, seconds=min(max(0.0, left), _POLL_SECONDS)):
            part = os.read(reader, 1 << 16)
            if not part:
                return b""
            line += part
        elif left <= 0:
            return None
        elif not over and is_over():
            over, deadline = True, min(deadline, time.monotonic() + OTHERS_SECONDS)
    return line


def _end(process: int) -> int:
    """Kill what is left of the process and of those that it started; return its exit status."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def _describe(status: int) -> str:
    return f"ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
