"""One case of attention: ours checked against float64, then timed in turns with PyTorch's own kernels."""

from __future__ import annotations

import itertools
from typing import Any

import attention
import ours
import peak_rates
from baselines import baselines

from twinrun.foundation.errors import InputError
from twinrun.protocol.bench import BenchJob, BenchResult, PeakRate
from twinrun.train import rank
from twinrun.train.bench import CheckedCall, Session
from twinrun.train.measure import TimedOn, copy_rate

ALLOWED_ERRORS = {"fp16": 1e-3, "bf16": 5e-3}
# What is timed: the device's part of a call, or calls in a row with the host's part of each.
CLOCKS: dict[str, TimedOn] = {"kernels": "device", "call": "host"}


def bench(job: BenchJob) -> BenchResult:
    """Measure every mask of a case in every dtype, by every phase."""
    settings: dict[str, Any] = job.settings
    check(settings)
    session = Session(job)
    backend = ours.backend(session.device)
    for dtype, mask in itertools.product(settings["dtypes"], settings["masks"]):
        measure(session, attention.AttentionCase(session, settings, dtype=dtype, mask=mask), backend)
    return session.result(rates(session))


def check(settings: dict[str, Any]) -> None:
    """Raise InputError unless every option that lists names has names that there are."""
    known_by = {
        "dtypes": ALLOWED_ERRORS,
        "masks": attention.MASKS,
        "phases": attention.PHASES,
        "modes": CLOCKS,
    }
    for option, known in known_by.items():
        unknown = [name for name in settings[option] if name not in known]
        if unknown:
            raise InputError("unknown", place=f"--set options.{option}", found=unknown, allowed=list(known))
    if settings["kv_heads"] and settings["heads"] % settings["kv_heads"]:
        raise InputError(
            "heads of queries are no multiple of those of keys",
            place="--set options.kv_heads",
            found=settings["kv_heads"],
            allowed=f"a divisor of {settings['heads']}, or 0 for as many",
        )


def measure(session: Session, one: attention.AttentionCase, backend: str) -> None:
    """Measure the phases of one case beside what else computes the same here."""
    others, absent = baselines(one, session.device)
    named = [(ours.function(one, backend), ours.name(backend), ours.version()), *others]
    # All are checked before any is timed.
    errors = [one.errors(function) for function, _, _ in named]
    modes: Any = session.job.settings["modes"]
    for phase, mode in itertools.product(one.phases, modes):
        first, *rivals = (
            CheckedCall(
                implementation=name, version=version, call=one.call(function, phase), errors=found[phase]
            )
            for (function, name, version), found in zip(named, errors, strict=True)
        )
        session.measure(
            labels=one.labels(phase) | {"mode": mode, "backend": backend},
            title=f"attention, {one.mask}, {phase}",
            clock=CLOCKS[mode],
            work=one.work(phase),
            allowed_error=ALLOWED_ERRORS[one.dtype],
            ours=first,
            baselines=rivals,
            absent=absent,
        )


def rates(session: Session) -> list[PeakRate]:
    """Measure what this device does at most; nothing where nothing is timed."""
    if session.device.type == "cpu" or not session.timed:
        return []
    dtypes: Any = session.job.settings["dtypes"]
    return [copy_rate(session.device), *(peak_rates.products(session.device, one) for one in dtypes)]


if __name__ == "__main__":
    rank.run(bench, BenchJob)
