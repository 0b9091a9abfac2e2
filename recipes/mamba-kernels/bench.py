"""One case of the kernel table: each kernel checked against float64, then timed in turns with upstream's."""

from __future__ import annotations

import subprocess
from functools import partial
from typing import Any

import conv
import ours
import scan
import torch
import upstream
from operation import WAYS, Contender, Operation

from twinrun.benchmark import BenchJob, BenchResult, Ceiling
from twinrun.errors import InputError
from twinrun.train import worker
from twinrun.train.bench import Session, copy_ceiling

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
ALLOWED_ERRORS = {"fp32": 1e-5, "fp16": 1e-3, "bf16": 5e-3}
OPERATIONS = {
    "scan": partial(scan.Scan, reference=ours.reference_scan),
    "conv": conv.Conv,
    "update": conv.Step,
}


def bench(job: BenchJob) -> BenchResult:
    """Measure every operation of a case in every element type, by every backend."""
    session = Session(job)
    settings: dict[str, Any] = job.settings
    check(settings)
    backends = ours.backends(session.device)
    for element in settings["elements"]:
        for name in settings["operations"]:
            operation = OPERATIONS[name](session, settings, DTYPES[element])
            for backend in backends:
                measure(session, operation, element, backend)
    return session.result(ceilings(session))


def check(settings: dict[str, Any]) -> None:
    """Raise InputError unless every option that lists names has names that there are."""
    ways = dict.fromkeys(way for of_phase in WAYS.values() for way in of_phase)
    for option, known in (("elements", DTYPES), ("operations", OPERATIONS), ("ways", ways)):
        unknown = [name for name in settings[option] if name not in known]
        if unknown:
            raise InputError("unknown", place=f"--set options.{option}", found=unknown, allowed=list(known))


def measure(session: Session, operation: Operation, element: str, backend: str) -> None:
    """Measure the ways that the case names of one operation."""
    function = ours.function(operation.name, backend)
    mine = operation.check(function, ours.implementation(session.device, backend), ours.version())
    theirs, absent = beside(session, operation)
    for phase, way in operation.measurements(session.job.settings["ways"]):
        marks = (operation.name, phase, element, *_unless(backend, "native"), *_unless(way, "kernels"))
        session.measure(
            name="-".join(marks),
            operation=f"{operation.title}, {phase}",
            element=element,
            way=way,
            work=operation.work(phase, way),
            allowed_error=ALLOWED_ERRORS[element],
            ours=mine.candidate(operation, phase, way),
            baseline=theirs.candidate(operation, phase, way) if theirs else None,
            absent=absent,
        )


def beside(session: Session, operation: Operation) -> tuple[Contender | None, str | None]:
    """Return upstream's implementation, or why there is none."""
    if session.device.type == "cpu":
        return None, "upstream's kernels need a GPU"
    try:
        function = upstream.function(operation.name)
    except ImportError as error:
        return None, f"cannot be imported: {error}"
    name, version = upstream.implementation(operation.name), upstream.package_version(operation.name)
    return operation.check(function, name, version), None


def ceilings(session: Session) -> list[Ceiling]:
    """Measure what this device does at most; nothing where nothing is timed."""
    if session.device.type == "cpu" or not session.timed:
        return []
    found = [copy_ceiling(session.device)]
    try:
        from ceilings import arithmetic  # noqa: PLC0415 - Triton, which a CPU's torch has not

        return [*found, *arithmetic(session.device)]
    except (ImportError, OSError, RuntimeError, subprocess.CalledProcessError) as error:
        # Triton compiles its launcher in C, for which a machine may have no compiler or no headers.
        print(f"what the device computes at most is not measured: {error}")
        return found


def _unless(word: str, usual: str) -> tuple[str, ...]:
    return () if word == usual else (word,)


if __name__ == "__main__":
    worker.run(bench, BenchJob)
