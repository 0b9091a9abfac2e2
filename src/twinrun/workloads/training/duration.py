"""How long a point will take, before anything runs."""

from __future__ import annotations

from twinrun.protocol.models import AnyShape
from twinrun.protocol.training import Training
from twinrun.workloads.workload import Hardware

# H200s reach 0.55 to 0.61 of the dense peak, MI250s as published 0.44 to 0.46.
PEAK_SHARE = 0.45
# One core of a two-core machine reached 3e10 FLOP/s with the smoke model in fp32.
CORE_FLOPS = 2.5e10
# Ranks start, data is read, blocks are compiled: seconds.
GPU_START, CPU_START = 40.0, 10.0
# A sweep that nobody asked to be longer ends in about this time.
SWEEP_SECONDS = 360.0


def estimated_seconds(shape: AnyShape, training: Training, hardware: Hardware, *, world: int) -> float | None:
    """Estimate the wall time of one point on `world` devices; None for a GPU without a known peak."""
    flops = shape.flops_per_token() * training.global_batch * shape.sequence * training.steps
    if hardware.gpu is not None:
        speed, start = PEAK_SHARE * hardware.gpu.device_peak_flops * world, GPU_START
    elif hardware.devices:
        return None
    else:
        speed, start = CORE_FLOPS * hardware.cores, CPU_START
    if training.activation_checkpointing is True:
        flops = flops * 4 // 3
    return start + flops / speed
