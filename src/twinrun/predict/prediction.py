"""What a training will need and take, with an interval, or why that cannot be said."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from twinrun.manifests.vendor import Gpu
from twinrun.predict.calibration import Calibration, Software
from twinrun.predict.kernel_times import predicted_scan
from twinrun.predict.memory import Memory, largest_microbatch, memory
from twinrun.predict.parallel_layout import GIGABIT, Machines, ParallelLayout
from twinrun.predict.step import IMBALANCE, StepTime, step_time
from twinrun.protocol.models.shape import ModelShape, ModelWork

WORDS: dict[bool, Literal["none", "whole"]] = {True: "whole", False: "none"}
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
            "software": self.software.id,
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
        }


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
    needed = memory(work, layout, devices=machines.devices)
    half, distances, far = distance(shape, machines, layout, software, calibration)
    unknown = unknown or unknown_time(shape, machines, layout, software) or far
    scan = None
    if unknown is None and work.block.scanned and machines.gpu.id not in software.scan:
        scan = predicted_scan(software, machines.gpu)
    if scan:
        middle, fast, slow = (
            timed(work, machines, layout, one, calibration).seconds
            for one in (scan.middle, scan.fast, scan.slow)
        )
        half = math.hypot(half, math.log(max(middle / fast, slow / middle)))
        said = f"a selective scan that compiled code predicts for {scan.gpu}, and nobody timed"
        software, distances = scan.middle, (*distances, said)
        unknown = _too_wide(half, distances, calibration)
    return Prediction(
        shape=shape,
        machines=machines,
        layout=layout,
        software=software,
        memory=needed,
        largest_microbatch=largest_microbatch(work, machines, layout),
        time=None if unknown else timed(work, machines, layout, software, calibration),
        unknown=unknown,
        half=half,
        distances=distances,
    )


def timed(
    work: ModelWork, machines: Machines, layout: ParallelLayout, software: Software, calibration: Calibration
) -> StepTime:
    """Return the time of a step; where a software never ran, it is no slower than older software."""
    everything, gpu = [software], machines.gpu
    if gpu.arch not in software.products and not work.block.scanned:
        everything += [one for one in calibration.known(gpu) if one.year < software.year]
    times = (step_time(work, machines, layout, software=one, calibration=calibration) for one in everything)
    return min(times, key=lambda one: one.seconds)


def unknown_time(
    shape: ModelShape, machines: Machines, layout: ParallelLayout, software: Software
) -> str | None:
    """Return why the time cannot be said, and which measurement would tell."""
    gpu = machines.gpu
    if machines.devices_per_node > 1 and gpu.link_gb_s is None:
        return f"images/gpus.toml has no link_gb_s of {gpu.name}; an all-reduce of two devices would tell"
    if machines.nodes > 1 and machines.network is None:
        return f"nothing says how fast the network is; {NETWORK} would, in Gbit/s of a node"
    if shape.work().block.scanned and (
        shape.family not in software.families
        or (gpu.id not in software.scan and predicted_scan(software, gpu) is None)
    ):
        return f"no selective scan was timed on {gpu.name}; recipes/mamba-kernels at node scale would tell"
    if layout.fp8 and not gpu.fp8:
        return f"the matrix units of {gpu.name} have no fp8"
    if layout.offload != "none":
        return "no transfer to the host was timed; a run of deepspeed-pretrain with offload would tell"
    return None


def distance(
    shape: ModelShape,
    machines: Machines,
    layout: ParallelLayout,
    software: Software,
    calibration: Calibration,
) -> tuple[float, tuple[str, ...], str | None]:
    """Return half of the interval, what makes it wider, and why it is too wide to be said."""
    known, gpu = calibration.distance, machines.gpu
    width = getattr(shape, "width", 1)
    tokens = layout.microbatch * shape.sequence / layout.context
    spread = max(
        software.off_by(width, layout.tensor, tokens)[1],
        software.spreads.get(gpu.id, software.spreads.get(gpu.arch, 0.0)),
    )
    parts = [spread, software.stage_spread * math.log2(layout.pipeline)]
    words, far = list[str](), None

    def add(part: float, text: str) -> None:
        parts.append(part)
        words.append(text)

    if far_gpu := _unseen(gpu, software, calibration):
        add(*far_gpu)
    if shape.family not in software.families:
        add(known.family, f"no row of the family {shape.family}")
    figures = {"parameters": shape.parameters(), "sequence": shape.sequence, "tokens": round(tokens)}
    figures["devices"] = machines.devices
    for name, value in figures.items():
        fitted = software.fitted[name]
        if doublings := fitted.doublings(value):
            text = f"{name} {value:,}, fitted from {fitted.low:,.0f} to {fitted.high:,.0f}"
            add(known.doubling[name] * doublings, text)
            if doublings > known.most[name]:
                far = f"{text}: more than {known.most[name]:.0f} doublings away; a nearer run would tell"
    if max(layout.tensor, layout.pipeline, layout.context) > 1 and not software.cuts:
        add(known.layout, "no row with tensor, pipeline or context parallelism")
    again = WORDS[layout.recomputation] if isinstance(layout.recomputation, bool) else layout.recomputation
    if again not in software.recomputations:
        add(known.recomputation, f"no row with recomputation {again}")
    if layout.fp8 and gpu.id not in software.fp8:
        add(known.precision, f"no row in fp8 on {gpu.name}")
    if any(one.experts > 1 for one in shape.work().block.products):
        add(known.experts, f"no row with experts; the fullest is taken to have {IMBALANCE} times its tokens")
    half = math.hypot(*parts)
    return half, tuple(words), far or _too_wide(half, words, calibration)


def _too_wide(half: float, words: Sequence[str], calibration: Calibration) -> str | None:
    if half <= calibration.distance.half:
        return None
    return f"the interval would be a factor of {math.exp(half):.1f} either way; {'; '.join(words)}"


def _unseen(gpu: Gpu, software: Software, calibration: Calibration) -> tuple[float, str] | None:
    """Return what a GPU adds that the software was not fitted on, and in words; None for one that it was."""
    known = calibration.distance
    if gpu.id in software.products:
        return None
    if gpu.arch in software.products:
        return known.architecture, f"{gpu.name} only by another GPU of {gpu.arch}"
    if elsewhere := calibration.known(gpu):
        return known.software, f"{gpu.name} only with {elsewhere[0].title}"
    return known.gpu, f"no row on {gpu.name}, nor on a GPU of {gpu.arch}"
