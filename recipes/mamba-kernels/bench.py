"""One case of the kernel table: each kernel checked against float64, then timed in turns with upstream's."""

from __future__ import annotations

import subprocess
from typing import Any

import conv
import ours
import scan
import ssd
import torch
import update
import upstream
from operation import MODES, CheckedFunction, Operation

from twinrun.foundation.errors import InputError
from twinrun.protocol.bench import EAGER, BenchJob, BenchResult, PeakRate
from twinrun.train import rank
from twinrun.train.bench import Session
from twinrun.train.measure import copy_rate

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
ALLOWED_ERRORS = {"fp32": 1e-5, "fp16": 1e-3, "bf16": 5e-3}
OPERATIONS = {"scan": scan.Scan, "conv": conv.Conv, "update": update.Update, "ssd": ssd.Ssd}


def bench(job: BenchJob) -> BenchResult:
    """Measure every operation of a case in every dtype, by every backend."""
    session = Session(job)
    settings: dict[str, Any] = job.settings
    check(settings)
    for dtype in settings["dtypes"]:
        for name in settings["operations"]:
            operation = OPERATIONS[name](session, settings, DTYPES[dtype])
            for backend in ours.backends(session.device, name):
                measure(session, operation, dtype, backend)
    return session.result(peak_rates(session))


def check(settings: dict[str, Any]) -> None:
    """Raise InputError unless every option that lists names has names that there are."""
    modes = dict.fromkeys(mode for of_phase in MODES.values() for mode in of_phase)
    for option, known in (("dtypes", DTYPES), ("operations", OPERATIONS), ("modes", modes)):
        unknown = [name for name in settings[option] if name not in known]
        if unknown:
            raise InputError("unknown", place=f"--set options.{option}", found=unknown, allowed=list(known))


def measure(session: Session, operation: Operation, dtype: str, backend: str) -> None:
    """Measure the modes that the case names of one operation."""
    function = ours.function(operation.name, backend)
    implementation = ours.implementation(session.device, operation.name, backend)
    checked = operation.check(function, implementation, ours.version())
    baselines, absent = beside(session, operation)
    for phase, mode in operation.measured(session.job.settings["modes"]):
        named = {"operation": operation.name, "phase": phase, "dtype": dtype}
        session.measure(
            labels=named | {"backend": backend, "mode": mode},
            title=f"{operation.title}, {phase}",
            clock="host" if mode == "call" else "device",
            work=operation.work(phase, mode),
            allowed_error=ALLOWED_ERRORS[dtype],
            ours=checked.call(operation, phase, mode),
            baselines=[one.call(operation, phase, mode) for one in baselines],
            absent=absent,
        )


def beside(session: Session, operation: Operation) -> tuple[list[CheckedFunction], dict[str, str]]:
    """Return the baselines, upstream's and where asked for the eager one, and why one is absent."""
    name, baselines, absent = upstream.implementation(operation.name), list[CheckedFunction](), {}
    if session.device.type == "cpu":
        absent[name] = "upstream's kernels need a GPU"
    else:
        try:
            function = upstream.function(operation.name)
        except ImportError as error:
            absent[name] = f"cannot be imported: {error}"
        else:
            baselines.append(operation.check(function, name, upstream.package_version(operation.name)))
    if session.job.settings["eager"] and (eager := ours.EAGER.get(operation.name)):
        baselines.append(operation.check(eager, EAGER, torch.__version__))
    return baselines, absent


def peak_rates(session: Session) -> list[PeakRate]:
    """Measure what this device does at most; nothing where nothing is timed."""
    if session.device.type == "cpu" or not session.timed:
        return []
    found = [copy_rate(session.device)]
    try:
        from peak_rates import arithmetic  # noqa: PLC0415 - Triton, which a CPU's torch has not

        return [*found, *arithmetic(session.device)]
    except (ImportError, OSError, RuntimeError, subprocess.CalledProcessError) as error:
        # Triton compiles its launcher in C, for which a machine may have no compiler or no headers.
        print(f"peak rates of arithmetic are not measured: {error}")
        return found


if __name__ == "__main__":
    rank.run(bench, BenchJob)
