"""The frame of a recipe's checks: each in a process of its own, with a timeout. Imports without torch."""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import platform
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from twinrun.foundation.errors import TwinrunError, require_known
from twinrun.foundation.files import write_atomically
from twinrun.foundation.manifest import load_json
from twinrun.protocol.checks import CheckLine, ChecksJob, CheckSpec, ChecksResult
from twinrun.protocol.measurements import Check
from twinrun.train import rank

__all__ = ["CheckError", "CheckFunction", "UndecidedError", "main"]

CheckFunction = Callable[[ChecksJob], str | None]
# Of the outcomes of all ranks together the first counts.
SEVERITY = ("fail", "unknown", "pass")
# On a file system that many nodes read at once.
IMPORT_SECONDS = 120.0


def main(functions: Mapping[str, CheckFunction]) -> None:
    """Run the checks of the job that the command line names; the first rank writes the result.

    A function passes by returning None, or what it saw, fails by raising `CheckError`, and finds out nothing
    by raising `UndecidedError` or any other exception.
    """
    # Unwinding ends the check that runs, which has a process group of its own.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        job = load_json(rank.job_argument(), ChecksJob)
        rank.introduce(job)
        for spec in job.checks:
            require_known(spec.id, functions, "the script has no function for this check", place=job.recipe)
        _import_torch()
        outcomes = Outcomes(job)
        found = [check for spec in job.checks for check in _run(job, spec, functions[spec.id], outcomes)]
        if outcomes.rank == 0:
            name, libraries = _software(job)
            result = ChecksResult(point=job.point, device_name=name, libraries=libraries, checks=tuple(found))
            rank.write_result(job, result)
    except TwinrunError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(1)


def _import_torch() -> None:
    """Import torch once for all checks, whose processes are forks of this one; it opens no device.

    A process of its own tries first: a torch that hangs or crashes is the checks' to tell, one by one.
    """

    trial = CheckSpec(id="torch", title="torch can be imported", scope="node", timeout=IMPORT_SECONDS)
    load: Any = partial(importlib.import_module, "torch")
    if run_check(trial, lambda: str(load()), place="", variables={}).outcome == "pass":
        load()


def _run(job: ChecksJob, spec: CheckSpec, function: CheckFunction, outcomes: Outcomes) -> Iterable[Check]:
    """Run a check where it belongs; on the first rank return, and report, what all ranks found."""
    together = spec.scope == "allocation"
    outcome = None
    if together and (missing := outcomes.meet()):
        reason = f"not run: without rank {', '.join(map(str, missing))}"
        outcome = Check(id=spec.id, outcome="unknown", place=_place(spec), reason=reason)
    elif spec.scope != "node" or rank.variable("LOCAL_RANK", 0) == 0:
        variables = {}
        if together and outcomes.ranks > 1:
            # torchrun's own store, which lives as long as the ranks, has the addresses of the check before.
            variables = {"MASTER_PORT": outcomes.share_port(), "TORCHELASTIC_USE_AGENT_STORE": "False"}
        is_over = outcomes.is_over if together else lambda: False
        kind: dict[str, Any] = {"place": _place(spec), "variables": variables, "is_over": is_over}
        outcome = run_check(spec, partial(function, job), **kind)
        if outcome.outcome == "fail" and not together:
            outcome = outcome.model_copy(update={"nodes": (platform.node(),)})
    outcomes.post(spec, outcome)
    if outcomes.rank:
        return []
    by_rank = outcomes.collect(spec)
    found = [_merged(spec, by_rank)] if together else list(by_rank.values())
    for check in found:
        rank.report(CheckLine(point=job.point, attempt=job.attempt, check=check))
        said = f"{job.point} {check.id}, {check.place}: {check.outcome} {check.reason}"
        sys.stdout.write(f"{said.rstrip()}\n")
    return found


def _place(spec: CheckSpec) -> str:
    if spec.scope == "allocation":
        return "allocation"
    host = platform.node()
    return host if spec.scope == "node" else f"{host}, device {rank.variable('LOCAL_RANK', 0)}"


def _merged(spec: CheckSpec, by_rank: Mapping[int, Check]) -> Check:
    """Return one outcome of all ranks together, with the reasons of those that decide."""
    worst = min((one.outcome for one in by_rank.values()), key=SEVERITY.index)
    deciding = {number: one for number, one in by_rank.items() if one.outcome == worst}
    ranks: dict[str, list[int]] = {}
    for number, one in deciding.items():
        ranks.setdefault(one.reason, []).append(number)
    return Check(
        id=spec.id,
        outcome=worst,
        place=_place(spec),
        reason="; ".join(f"rank {', '.join(map(str, of))}: {why}" for why, of in ranks.items() if why),
        remedy=next((one.remedy for one in deciding.values() if one.remedy), None),
        nodes=tuple(dict.fromkeys(node for one in by_rank.values() for node in one.nodes)),
        seconds=max((one.seconds for one in by_rank.values() if one.seconds is not None), default=None),
    )


def _software(job: ChecksJob) -> tuple[str, dict[str, str]]:
    """Return the device's name and the libraries, as far as they can be known without torch."""
    try:
        # Only now: a device that this process has opened is of no use in forked ones.
        devices = importlib.import_module("twinrun.train.device")
        device = devices.device_of(job)
        return devices.name(device), devices.libraries(device)
    except (ImportError, OSError, RuntimeError, AssertionError):
        return platform.machine(), {"python": platform.python_version()}


# One check in a process of its own, which is killed when its time is over. Imports without torch.
# Ranks of one check find the same at about the same time; to wait longer for one that gave up is in vain.
OTHERS_SECONDS = 10.0
_POLL_SECONDS = 0.2


class CheckError(Exception):
    """What a check found wrong, and what to do about it."""

    outcome: ClassVar[str] = "fail"

    def __init__(self, reason: str, *, remedy: str | None = None, nodes: Sequence[str] = ()) -> None:
        super().__init__(reason)
        self.reason, self.remedy, self.nodes = reason, remedy, tuple(nodes)


class UndecidedError(CheckError):
    """Why a check could find out nothing, and what would let it."""

    outcome = "unknown"


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
    status = process.exitcode or 0
    ended = f"ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    content: dict[str, Any] = {"id": spec.id, "place": place, "seconds": time.monotonic() - began}
    content |= finding or {"outcome": "unknown", "reason": ended}
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
    except CheckError as one:
        found = {"outcome": one.outcome, **vars(one)}
    except BaseException as error:
        traceback.print_exc()
        found = {"outcome": "unknown", "reason": f"{type(error).__name__}: {error}"}
    writer.send_bytes(json.dumps(found).encode())


# How ranks tell each other the outcomes of checks: files in the folder of the job. Imports without torch.
# Beyond the timeouts: ranks do not start at once, and a shared file system shows a file late.
GRACE_SECONDS = 60.0
POLL_SECONDS = 0.02


class Outcomes:
    """The outcomes of all ranks, each posted by its rank as soon as it is known."""

    def __init__(self, job: ChecksJob) -> None:
        rank.demand_world_size(job)
        self.rank, self.ranks = rank.number(), job.world_size
        # An earlier attempt may have left files in the folder.
        self._folder = Path(job.out) / f"outcomes-{job.attempt}"
        # No rank is later than this: each check before ended within its timeout.
        self._patience = GRACE_SECONDS
        self._ended = 0
        self._write(self._name, "")

    @property
    def _name(self) -> str:
        """The check that this rank has ended last; 0 is its start."""
        return f"check-{self._ended}"

    def share_port(self) -> str:
        """Return a port that is free on the first rank's host, the same on all ranks; after `meet`."""
        name = f"port-{self._ended}"
        if self.rank == 0:
            with contextlib.closing(socket.create_server(("", 0))) as server:
                self._write(name, str(server.getsockname()[1]))
        self._wait_for(name, {0})
        return self._file(name, 0).read_text()

    def is_over(self) -> bool:
        """Say whether a rank has ended the check that this one is at without passing it."""
        return self._file("over", self._ended).exists()

    def post(self, spec: CheckSpec, outcome: Check | None) -> None:
        """Say what this rank found, None where it takes no part."""
        if outcome and outcome.outcome != "pass":
            # One file of all ranks: asked often, by each.
            write_atomically(self._file("over", self._ended), "")
        self._ended += 1
        self._write(self._name, outcome.model_dump_json() if outcome else "")
        self._patience += spec.timeout

    def collect(self, spec: CheckSpec) -> dict[int, Check]:
        """Return by rank what the check posted last has found; `unknown` for a rank that is silent."""
        silent = partial(Check, id=spec.id, outcome="unknown", reason="this rank reported nothing")
        found = {number: silent(place=f"rank {number}") for number in self.meet()}
        for number in sorted(set(range(self.ranks)) - found.keys()):
            if self._file(self._name, number).stat().st_size:
                found[number] = load_json(self._file(self._name, number), Check)
        return dict(sorted(found.items()))

    def meet(self) -> list[int]:
        """Wait until every rank has ended the check before; return the ranks that did not."""
        return sorted(self._wait_for(self._name, set(range(self.ranks))))

    def _wait_for(self, name: str, ranks: set[int]) -> set[int]:
        """Wait for the file of each rank; return the ranks without one when patience ends."""
        deadline = time.monotonic() + self._patience
        while missing := {one for one in ranks if not self._file(name, one).exists()}:
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_SECONDS)
        return missing

    def _write(self, name: str, text: str) -> None:
        write_atomically(self._file(name, self.rank), text)

    def _file(self, name: str, rank: int) -> Path:
        return self._folder / f"{name}.{rank}"
