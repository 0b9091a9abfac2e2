"""What a training will need and take, with an interval, or why that cannot be said."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any

from pydantic import Field

from twinrun.foundation.manifest import Frozen
from twinrun.predict.calibration import (
    NINETY,
    Basis,
    Calibration,
    Key,
    Subject,
    calibration,
    told,
    weights_of,
)
from twinrun.predict.kernel_times import scan_of
from twinrun.predict.memory import Memory, capacity, largest_microbatch, memory
from twinrun.predict.parallel_layout import GIGABIT, Machines, ParallelLayout
from twinrun.predict.step import IDEAL, StepTime, peak
from twinrun.protocol.models.shape import ModelShape

NETWORK = "--network, or `network_gbit_s` of a site in cluster.toml,"
# Share of an interval from which on what no row has seen is named.
NAMED = 0.3


@dataclass(frozen=True)
class Prediction:
    """One layout on one kind of machine."""

    subject: Subject
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
    def shape(self) -> ModelShape:
        """The model."""
        return self.subject.shape

    @property
    def machines(self) -> Machines:
        """What it runs on."""
        return self.subject.machines

    @property
    def layout(self) -> ParallelLayout:
        """How the devices share it."""
        return self.subject.layout

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of a device in a second."""
        if self.time is None:
            return None
        tokens = self.layout.global_batch * self.shape.sequence
        return tokens / self.time.seconds / self.machines.devices

    @property
    def interval(self) -> tuple[float, float] | None:
        """Tokens of a device in a second, nine times of ten within."""
        middle = self.tokens_per_second
        return None if middle is None else (middle * math.exp(-self.half), middle * math.exp(self.half))

    @property
    def model_flops_share(self) -> float | None:
        """Model FLOP/s by the family's formula over the dense peak."""
        middle = self.tokens_per_second
        if middle is None:
            return None
        return middle * self.shape.flops_per_token() / self.machines.gpu.device_peak_flops

    def summary(self) -> dict[str, Any]:
        """Return it for JSON: bytes, seconds, tokens of a device in a second."""
        machines, memory, time = self.machines, self.memory, self.time
        return {
            "gpu": machines.gpu.id,
            "nodes": machines.nodes,
            "devices_per_node": machines.devices_per_node,
            "network_gbit_s": None if machines.network is None else machines.network / GIGABIT,
            "model": self.shape.model_dump(),
            "parameters": self.shape.parameters(),
            "layout": asdict(self.layout),
            "software": self.subject.software.id,
            "memory_bytes": asdict(memory) | {"total": memory.bytes},
            "fit": memory.fit(machines.gpu),
            "largest_microbatch": self.largest_microbatch,
            "step_seconds": None if time is None else asdict(time) | {"total": time.seconds},
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
    seconds, factor = found.time.seconds if found.time else None, math.exp(found.half)
    return PointPrediction(
        attempt=attempt,
        memory_bytes=found.memory.bytes,
        seconds=seconds,
        low=seconds and seconds / factor,
        high=seconds and seconds * factor,
        unknown=found.unknown,
        software=found.subject.software.id,
        calibration=calibration().version,
    )


def predict(
    shape: ModelShape,
    machines: Machines,
    layout: ParallelLayout,
    basis: Basis,
    *,
    checked: bool = False,
    unknown: str | None = None,
) -> Prediction:
    """Predict one layout.

    Args:
        checked: the arithmetic of the layout was checked already.
        unknown: why the time cannot be said, where the caller knows.

    Raises:
        InputError: something does not divide.
    """
    subject = Subject(shape, machines, layout, basis.software)
    work, known = subject.work, basis.known
    if not checked:
        layout.check(work, machines)
    needed = memory(work, layout, devices=machines.devices)
    unknown = unknown or unknown_time(subject)
    if unknown is None and needed.states > capacity(machines.gpu):
        unknown = "its states alone do not fit; a layout that splits more would"
    found = None if unknown else told(subject, basis)
    words = _unseen(weights_of(subject, known), found.spread, known) if found else ()
    if found and found.half > known.wide:
        why = f"; no row has {', nor '.join(words)}" if words else ""
        wide = f"the interval would be a factor of {math.exp(found.half):.1f} either way{why}"
        unknown = f"{wide}; --measured with a run would tell"
    time = None
    if found and not unknown:
        least = subject.time(IDEAL).seconds if found.shift < 0 else 0.0
        factor = max(math.exp(found.shift), least / found.time.seconds)
        time = StepTime(**{one.name: factor * getattr(found.time, one.name) for one in fields(StepTime)})
    return Prediction(
        subject=subject,
        memory=needed,
        largest_microbatch=largest_microbatch(work, machines, layout),
        time=time,
        unknown=unknown,
        half=found.half if found else 0.0,
        half_without_runs=NINETY * found.before if found else 0.0,
        distances=words,
        runs=len(basis.runs),
    )


def unknown_time(subject: Subject) -> str | None:
    """Return why the time cannot be said, and which measurement would tell."""
    machines, layout, gpu = subject.machines, subject.layout, subject.machines.gpu
    scanned = subject.work.block.scanned and scan_of(gpu) is None
    refused = subject.software.refuses(layout)
    reasons = {
        f"images/gpus.toml has no link_gb_s of {gpu.name}; an all-reduce of two devices would tell": (
            machines.devices_per_node > 1 and gpu.link_gb_s is None
        ),
        f"nothing says how fast the network is; {NETWORK} would, in Gbit/s of a node": (
            machines.nodes > 1 and machines.network is None
        ),
        f"no selective scan was timed on {gpu.name}; recipes/mamba-kernels at node scale would tell": scanned,
        f"the matrix units of {gpu.name} have no {layout.precision}": not peak(gpu, layout.precision),
        "no transfer to the host was timed; a run of deepspeed-pretrain with offload would tell": (
            layout.offload != "none"
        ),
        f"{subject.software.id} has no {refused}; --software names another": refused,
    }
    return next((why for why, so in reasons.items() if so), None)


def _unseen(weights: Mapping[Key, float], spread: float, known: Calibration) -> tuple[str, ...]:
    """Return in words what no row has seen, where it makes much of the interval."""
    shares: dict[str, float] = {}
    for key, weight in weights.items():
        _, level, name = key
        if key not in known.effects and level in known.level:
            words = known.level[level].format(name, *name.split(" ", 1))
            shares[words] = shares.get(words, 0.0) + (weight * known.effect(key).spread) ** 2
    return tuple(words for words, square in shares.items() if math.sqrt(square) > NAMED * spread)
