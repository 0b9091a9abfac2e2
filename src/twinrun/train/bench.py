"""What benchmark scripts share: calls that are checked, then timed in turns, on one rank or on many."""

from __future__ import annotations

import math
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from twinrun.foundation.errors import RunError, require_known
from twinrun.protocol import bench as protocol
from twinrun.train import device as devices
from twinrun.train import rank, ranks
from twinrun.train.measure import Clock, Function, TimedOn


@dataclass(frozen=True, kw_only=True)
class CheckedCall:
    """A call of one implementation, compared with the reference already."""

    implementation: str
    version: str
    call: Function
    errors: Mapping[str, float]
    """Relative distance from the float64 reference of each tensor that is returned, of one at least; may be
    infinite."""
    kept_bytes: int | None = None


class Session:
    """The calls of one case; every rank of the job takes part in each."""

    def __init__(self, job: protocol.BenchJob) -> None:
        self.job = job
        self.device = devices.device_of(job)
        ranks.join(job)
        # Inputs that are the same in every run would let a kernel pass by luck for ever.
        drawn = random.SystemRandom().getrandbits(31) if job.timing.seed is None else job.timing.seed
        self.seed = int(ranks.largest([drawn], self.device)[0])
        # Ranks differ: a sum of equal inputs is right in any order of ranks.
        self.generator = torch.Generator(self.device).manual_seed(self.seed + rank.number())
        self._clock = Clock(self.device, warmup=job.timing.warmup, repeats=job.timing.repeats)
        self._calls: list[protocol.Call] = []

    @property
    def timed(self) -> bool:
        """Whether this run times what it checks."""
        return self.job.timing.repeats > 0

    def measure(
        self,
        *,
        labels: Mapping[str, str],
        title: str,
        allowed_error: float,
        ours: CheckedCall,
        baselines: Sequence[CheckedCall] = (),
        absent: Mapping[str, str] | None = None,
        clock: TimedOn = "device",
        refuse: bool = True,
        **known: Any,
    ) -> None:
        """Time ours and the baselines in turns, once ours is right.

        Args:
            labels: a value for each label that the job declares, defaults may be left out.
            absent: baselines that could not run, and why.
            clock: see `Clock.times`.
            refuse: whether a wrong result ends the run; else claims about errors judge it.
            known: `work`, the least that the call must do; of a collective `bus_bytes`, those that each link
                must move, so that short ones are timed in a row; and `traffic`, what a link was counted to
                move in one call of ours, which claims judge.

        Raises:
            InputError: the recipe declares other labels.
            RunError: ours is further from the reference than `allowed_error`.
        """
        labels = self._complete(labels)
        name = protocol.name_of(self.job.labels, labels)
        if any(one.name == name for one in self._calls):
            raise RunError("two calls have the same labels", place=self.job.point, found=name)
        rank.beat(name, step=len(self._calls) + 1)
        checked = [self._with_largest_errors(one) for one in (ours, *baselines)]
        tensor, error = protocol.largest_error(checked[0].errors)
        if refuse and error > allowed_error:
            message, found = "the result is not the reference's", f"relative distance {error:.3g} of {tensor}"
            place = f"{self.job.point}, {name}"
            raise RunError(message, place=place, found=found, allowed=f"at most {allowed_error:g}")
        times: Sequence[tuple[float, ...]] = [()] * len(checked)
        if self.timed:
            calls = [one.call for one in checked]
            times = self._clock.times(calls, clock=clock, between_ranks=known.get("bus_bytes") is not None)
        first, *others = (_implementation(one, spent) for one, spent in zip(checked, times, strict=True))
        call = protocol.Call(
            name=name,
            title=title,
            labels=labels,
            allowed_error=allowed_error,
            ours=first,
            baselines=tuple(others),
            absent=dict(absent or {}),
            **{"work": None, **known},
        )
        self._calls.append(call)
        if rank.number() == 0:
            rank.report(protocol.CallLine(point=self.job.point, attempt=self.job.attempt, call=call))
            summary = "; ".join(_summary(one) for one in (call.ours, *call.baselines))
            sys.stdout.write(f"{self.job.point} {name}: {summary}\n")

    def result(self, peak_rates: Sequence[protocol.PeakRate] = ()) -> protocol.BenchResult:
        """Return what this case measured, beside the `peak_rates` of the device; every rank must call it."""
        return protocol.BenchResult(
            point=self.job.point,
            seed=self.seed,
            peak_rates=tuple(peak_rates),
            calls=tuple(self._calls),
            **devices.measured(self.device),
        )

    def _complete(self, given: Mapping[str, str]) -> dict[str, str]:
        """Return a value for each label of the job, in order; raises InputError."""
        declared, place = {one.name: one for one in self.job.labels}, f"{self.job.point}, label"
        for name in given:
            require_known(name, declared, "no label of this recipe", place=f"{place} {name}")
        labels = {name: str(given.get(name, one.default)) for name, one in declared.items()}
        for name, value in labels.items():
            require_known(value, declared[name].values, "no value of this label", place=f"{place} {name}")
        return labels

    def _with_largest_errors(self, checked: CheckedCall) -> CheckedCall:
        """Return the largest errors of any rank, so that every rank refuses what one would."""
        found = ranks.largest(list(checked.errors.values()), self.device)
        return replace(checked, errors=dict(zip(checked.errors, found, strict=True)))


def bus_bytes_of_all_reduce(buffer_bytes: int, world_size: int) -> float:
    """Return the bytes that each link moves by the formula `bus-bandwidth/all-reduce`."""
    return 2 * (world_size - 1) / world_size * buffer_bytes


def _implementation(checked: CheckedCall, milliseconds: tuple[float, ...]) -> protocol.Implementation:
    return protocol.Implementation(
        name=checked.implementation,
        version=checked.version,
        milliseconds=milliseconds,
        # A record holds finite numbers.
        errors={name: error if math.isfinite(error) else None for name, error in checked.errors.items()},
        kept_bytes=checked.kept_bytes,
    )


def _summary(one: protocol.Implementation) -> str:
    spent = f"{statistics.median(one.milliseconds):.4f} ms" if one.milliseconds else "not timed"
    tensor, error = protocol.largest_error(one.errors)
    return f"{one.name} {spent}, error {error:.2g} of {tensor}"
