"""What a training will need and take, with an interval, or why that cannot be said."""

from __future__ import annotations

import math
from dataclasses import dataclass

from twinrun.predict.calibration import Calibration, Software
from twinrun.predict.memory import Memory, largest_microbatch, memory
from twinrun.predict.parallel_layout import Machines, ParallelLayout
from twinrun.predict.step import StepTime, step_time
from twinrun.protocol.models.shape import ModelShape

# The largest numbers of nodes among the rows that the software was fitted on.
FITTED_NODES = 4
NETWORK = "--network, or `network_gbit_s` of a site in cluster.toml,"


@dataclass(frozen=True)
class Prediction:
    """One layout on one kind of machine."""

    shape: ModelShape
    machines: Machines
    layout: ParallelLayout
    software: Software
    memory: Memory
    largest_microbatch: int
    time: StepTime | None
    """None where it cannot be said."""
    unknown: str | None
    """Why not, and what would tell."""
    half: float
    """Half of the 90 % interval of the time, as a logarithm."""
    distances: tuple[str, ...]
    """In what the prediction is further away than a size that was not fitted."""

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
    def seconds_interval(self) -> tuple[float, float] | None:
        """Seconds of a step, nine times of ten within."""
        if self.time is None:
            return None
        return self.time.seconds * math.exp(-self.half), self.time.seconds * math.exp(self.half)

    @property
    def model_flops_share(self) -> float | None:
        """Model FLOP/s by the family's formula over the dense peak."""
        middle = self.tokens_per_second
        if middle is None:
            return None
        return middle * self.shape.flops_per_token() / self.machines.gpu.device_peak_flops


def predict(
    shape: ModelShape,
    machines: Machines,
    layout: ParallelLayout,
    *,
    software: Software,
    calibration: Calibration,
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
    work = shape.work()
    if not checked:
        layout.check(work, machines)
    unknown = unknown or unknown_time(shape, machines, layout, software)
    half, distances = _distance(shape, machines, layout, software, calibration)
    return Prediction(
        shape=shape,
        machines=machines,
        layout=layout,
        software=software,
        memory=memory(work, layout, devices=machines.devices),
        largest_microbatch=largest_microbatch(work, machines, layout),
        time=None
        if unknown
        else step_time(work, machines, layout, software=software, calibration=calibration),
        unknown=unknown,
        half=half,
        distances=distances,
    )


def unknown_time(
    shape: ModelShape, machines: Machines, layout: ParallelLayout, software: Software
) -> str | None:
    """Return why the time cannot be said, and which measurement would tell."""
    gpu = machines.gpu
    if machines.devices_per_node > 1 and gpu.link_gb_s is None:
        return f"images/gpus.toml has no link_gb_s of {gpu.name}; an all-reduce of two devices would tell"
    if machines.nodes > 1 and machines.network is None:
        return f"nothing says how fast the network is; {NETWORK} would, in Gbit/s of a node"
    if shape.work().block.scanned and gpu.id not in software.scan:
        return f"no selective scan was timed on {gpu.name}; recipes/mamba-kernels at node scale would tell"
    if layout.offload != "none":
        return "no transfer to the host was timed; a run of deepspeed-pretrain with offload would tell"
    if layout.experts > 1 or any(one.experts > 1 for one in shape.work().block.products):
        return "no row with experts was fitted; a run of deepspeed-pretrain with experts would tell"
    return None


def _distance(
    shape: ModelShape,
    machines: Machines,
    layout: ParallelLayout,
    software: Software,
    calibration: Calibration,
) -> tuple[float, tuple[str, ...]]:
    """Return half of the interval, and what makes it wider."""
    parts, words = [software.spread], []
    distance, gpu = calibration.distance, machines.gpu
    if gpu.id not in software.products:
        elsewhere = [one.title for one in calibration.software if gpu.id in one.products]
        kin = gpu.vendor in calibration.vendors
        parts.append(distance.software if elsewhere else distance.gpu if kin else distance.vendor)
        unseen = f"no row on {gpu.name}" if kin else f"no row on {gpu.name}, nor on a GPU of its vendor"
        words.append(f"{gpu.name} only with {elsewhere[0]}" if elsewhere else unseen)
    if shape.family not in software.families:
        parts.append(distance.family)
        words.append(f"no row of the family {shape.family}")
    if machines.nodes > FITTED_NODES:
        parts.append(distance.scale_out * math.log2(machines.nodes / FITTED_NODES))
        words.append(f"{machines.nodes} nodes, fitted up to {FITTED_NODES}")
    if (layout.tensor > 1 or layout.pipeline > 1) and not software.cuts:
        parts.append(distance.layout)
        words.append("no row with tensor or pipeline parallelism")
    return math.hypot(*parts), tuple(words)
