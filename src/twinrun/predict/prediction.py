"""What a training will need and take, with an interval, or why that cannot be said."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from twinrun.foundation.manifest import Frozen
from twinrun.predict.calibration import NINETY, Calibration, Key, Run, Subject, calibration, told, weights_of
from twinrun.predict.memory import Memory, capacity, largest_microbatch, memory
from twinrun.predict.step import IDEAL, StepTime, peak, scan_of

NETWORK = "--network, or `network_gbit_s` of a site in cluster.toml,"
# Share of half an interval from which on the deviation of what no row has seen is named.
NAMED = 0.3 / NINETY


@dataclass(frozen=True, kw_only=True)
class Prediction(Subject):
    """A training with what it needs, and the time of its step."""

    memory: Memory
    largest_microbatch: int
    time: StepTime | None
    """None where it cannot be said."""
    unknown: str | None
    """Why not, and what would tell."""
    half: float
    """Half of the 90 % interval of the time, as a logarithm."""
    half_without_runs: float
    """The same where no run is known of these devices."""
    distances: tuple[str, ...]
    """What no row has seen, where it makes much of the interval."""
    runs: int = 0
    """Runs that it rests on besides the calibration."""

    @property
    def rate(self) -> float:
        """Tokens of all devices in a second, 0 where it cannot be said."""
        return self.layout.global_batch * self.shape.sequence / self.time.seconds if self.time else 0.0

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of a device in a second."""
        return self.rate / self.machines.devices if self.time else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Tokens of a device in a second, nine times of ten within."""
        middle = self.tokens_per_second
        return None if middle is None else (middle * math.exp(-self.half), middle * math.exp(self.half))

    @property
    def model_flops_share(self) -> float | None:
        """Model FLOP/s by the family's formula over the dense peak."""
        middle = self.tokens_per_second
        return middle and middle * self.shape.flops_per_token() / self.machines.gpu.device_peak_flops

    def prices(self, tokens: float) -> tuple[float, float, float]:
        """Return what so many tokens cost, and its interval; device-hours where there is no price."""
        middle = tokens / (self.tokens_per_second or 0.0) / 3600 * self.machines.price
        return middle, middle * math.exp(-self.half), middle * math.exp(self.half)

    def offer(self) -> dict[str, Any]:
        """Return for JSON what a layout of a sweep has besides: rates of all devices, a price."""
        rates = {"tokens_per_second": self.rate, "sure_tokens_per_second": self.rate * math.exp(-self.half)}
        return rates | {"price_of_1e9_tokens": self.prices(1e9)[0]}

    def summary(self) -> dict[str, Any]:
        """Return it for JSON: bytes, seconds, tokens of a device in a second."""
        machines, time = self.machines, self.time
        return {
            "gpu": machines.gpu.id,
            "nodes": machines.nodes,
            "devices_per_node": machines.devices_per_node,
            "network_gbit_s": machines.network_gbit_s,
            "model": self.shape.model_dump(),
            "parameters": self.shape.parameters(),
            "layout": self.layout.model_dump(),
            "software": self.software.id,
            "memory_bytes": self.memory._asdict() | {"total": self.memory.bytes},
            "fit": self.memory.fit(machines.gpu),
            "largest_microbatch": self.largest_microbatch,
            "step_seconds": time and time._asdict() | {"total": time.seconds},
            "tokens_per_second_per_device": self.tokens_per_second,
            "interval_90_percent": self.interval,
            "model_flops_share": self.model_flops_share,
            "formula": self.shape.formula,
            "cannot_say": self.unknown,
            "distances": self.distances,
            "runs": self.runs,
            "half_of_interval": {"without_runs": self.half_without_runs, "with_runs": self.half},
        }


class PointPrediction(Frozen):
    """Memory and time of one attempt at a point, predicted before it ran; never a verdict."""

    attempt: Annotated[int, Field(ge=0)]
    """Which of the point's attempts this is of, counted from 0."""
    memory_bytes: Annotated[int, Field(gt=0)]
    """Bytes of a device at their most."""
    seconds: Annotated[float, Field(gt=0)] | None = None
    """Time of a step; null where it cannot be said."""
    low: Annotated[float, Field(gt=0)] | None = None
    """Nine times of ten the time is longer than this and shorter than `high`."""
    high: Annotated[float, Field(gt=0)] | None = None
    unknown: str | None = None
    """Why the time cannot be said, and which measurement would tell."""
    software: str
    """Generation of software that the prediction is for: a table of the calibration."""
    calibration: int
    """Version of the calibration."""

    @property
    def covers(self) -> tuple[float, float] | None:
        """The interval of the time."""
        return None if self.low is None or self.high is None else (self.low, self.high)


def kept(found: Prediction, *, attempt: int) -> PointPrediction:
    """Return a prediction as plans keep it, without its parts."""
    seconds, factor = found.time and found.time.seconds, math.exp(found.half)
    return PointPrediction(
        attempt=attempt,
        memory_bytes=found.memory.bytes,
        seconds=seconds,
        low=seconds and seconds / factor,
        high=seconds and seconds * factor,
        unknown=found.unknown,
        software=found.software.id,
        calibration=calibration().version,
    )


def predict(subject: Subject, runs: Sequence[Run] = (), *, unknown: str | None = None) -> Prediction:
    """Predict a training whose layout was checked.

    Args:
        runs: trainings that ran, from which it learns.
        unknown: why the time cannot be said, where the caller knows.
    """
    work, machines, layout, known = subject.work, subject.machines, subject.layout, calibration()
    needed = memory(work, layout, devices=machines.devices)
    unknown = unknown or unknown_time(subject)
    if unknown is None and needed.bytes - needed.activations - needed.logits > capacity(machines.gpu):
        unknown = "its states alone do not fit; a layout that splits more would"
    found = None if unknown else told(subject, runs, known)
    words = _unseen(weights_of(subject, known), found.half, known) if found else ()
    if found and found.half > known.wide:
        why = f"; no row has {', nor '.join(words)}" if words else ""
        wide = f"the interval would be a factor of {math.exp(found.half):.1f} either way{why}"
        unknown = f"{wide}; --measured with a run would tell"
    time = None
    if found and not unknown:
        factor = max(found.seconds, subject.at(IDEAL).seconds) / found.time.seconds
        time = StepTime(*(factor * part for part in found.time))
    return Prediction(
        *(subject.shape, machines, layout, subject.software),
        memory=needed,
        largest_microbatch=largest_microbatch(work, machines, layout),
        time=time,
        unknown=unknown,
        half=found.half if found else 0.0,
        half_without_runs=found.half_without_runs if found else 0.0,
        distances=words,
        runs=len(runs),
    )


def unknown_time(subject: Subject) -> str | None:
    """Return why the time cannot be said, and which measurement would tell."""
    machines, layout, gpu = subject.machines, subject.layout, subject.machines.gpu
    refused = subject.software.refuses(layout)
    reasons = {
        f"images/gpus.toml has no link_gb_s of {gpu.name}; an all-reduce of two devices would tell": (
            machines.devices_per_node > 1 and gpu.link_gb_s is None
        ),
        f"nothing says how fast the network is; {NETWORK} would, in Gbit/s of a node": (
            machines.nodes > 1 and machines.network is None
        ),
        f"no selective scan was timed on {gpu.name}; recipes/mamba-kernels at node scale would tell": (
            subject.work.block.scanned and scan_of(gpu) is None
        ),
        f"the matrix units of {gpu.name} have no {layout.precision}": not peak(gpu, layout.precision),
        "no transfer to the host was timed; a run of deepspeed-pretrain with offload would tell": (
            layout.offload != "none"
        ),
        f"{subject.software.id} has no {refused}; --software names another": refused,
    }
    return next((why for why, so in reasons.items() if so), None)


def _unseen(weights: Mapping[Key, float], half: float, known: Calibration) -> tuple[str, ...]:
    """Return in words what no row has seen, where it makes much of the interval."""
    shares: dict[str, float] = {}
    for key, weight in weights.items():
        _, level, name = key
        if key not in known.effects and level in known.level:
            words = known.level[level].format(name, *name.split(" ", 1))
            shares[words] = shares.get(words, 0.0) + (weight * known.effect(key).spread) ** 2
    return tuple(words for words, square in shares.items() if math.sqrt(square) > NAMED * half)
