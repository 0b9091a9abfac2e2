"""The frame of a recipe's checks: each in a process of its own, with a timeout. Imports without torch."""

from __future__ import annotations

import importlib
import platform
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from twinrun.foundation.errors import InputError, TwinrunError, closest
from twinrun.foundation.manifest import load_json
from twinrun.protocol.checks import CheckLine, ChecksJob, CheckSpec, ChecksResult
from twinrun.protocol.measurements import Check
from twinrun.train import rank
from twinrun.train.check_process import CheckError, UndecidedError, run_check
from twinrun.train.outcomes import Outcomes

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
        _refuse_unknown(job, functions)
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

    def load() -> None:
        try:
            importlib.import_module("torch")
        except ImportError as error:
            raise UndecidedError(str(error), remedy="install it") from None

    trial = CheckSpec(id="torch", title="torch can be imported", scope="node", timeout=IMPORT_SECONDS)
    if run_check(trial, load, place="", variables={}).outcome == "pass":
        load()


def _refuse_unknown(job: ChecksJob, functions: Mapping[str, CheckFunction]) -> None:
    for spec in job.checks:
        if spec.id not in functions:
            raise InputError(
                "the script has no function for this check",
                place=job.recipe,
                found=spec.id,
                allowed=list(functions),
                hint=closest(spec.id, functions),
            )


def _run(job: ChecksJob, spec: CheckSpec, function: CheckFunction, outcomes: Outcomes) -> Iterable[Check]:
    """Run a check where it belongs; on the first rank return, and report, what all ranks found."""
    together = spec.scope == "allocation"
    outcome = None
    if together and (missing := outcomes.meet()):
        ranks = ", ".join(map(str, missing))
        reason = f"not run: without rank {ranks}"
        outcome = Check(id=spec.id, outcome="unknown", place=_place(spec), reason=reason)
    elif spec.scope != "node" or rank.variable("LOCAL_RANK", 0) == 0:
        variables = _rendezvous(outcomes.share_port()) if together and outcomes.ranks > 1 else {}
        is_over = outcomes.is_over if together else lambda: False
        outcome = run_check(
            spec, partial(function, job), place=_place(spec), variables=variables, is_over=is_over
        )
        if outcome.outcome == "fail" and not together:
            outcome = outcome.model_copy(update={"nodes": (platform.node(),)})
    outcomes.post(spec, outcome)
    if outcomes.rank:
        return []
    by_rank = outcomes.collect(spec)
    found = [_merged(spec, by_rank)] if together else list(by_rank.values())
    for check in found:
        rank.report(CheckLine(point=job.point, attempt=job.attempt, check=check))
        sys.stdout.write(
            f"{job.point} {check.id}, {check.place}: {check.outcome} {check.reason}".rstrip() + "\n"
        )
    return found


def _place(spec: CheckSpec) -> str:
    if spec.scope == "allocation":
        return "allocation"
    host = platform.node()
    return host if spec.scope == "node" else f"{host}, device {rank.variable('LOCAL_RANK', 0)}"


def _rendezvous(port: int) -> dict[str, str]:
    """Return what lets the processes of one check find each other.

    torchrun's own store, which lives as long as the ranks, has the addresses of the check before.
    """
    return {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}


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
