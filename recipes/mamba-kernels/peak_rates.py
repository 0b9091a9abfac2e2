"""What a device computes at most, measured by chains in registers: one Triton source for every vendor."""

from __future__ import annotations

import statistics

import torch
import triton
import triton.language as tl

from twinrun.protocol.bench import PeakRate
from twinrun.train.measure import Clock

LANES = 1024
ROUNDS = 2048
# Programs for each multiprocessor or compute unit: several fit at a time, and the last ones weigh little.
PROGRAMS = 64
REPEATS = 10


@triton.jit
def exponentials(out, rounds, LANES: tl.constexpr):
    """Take 2^-x again and again, which stays near its fixed point 0.64."""
    x = tl.arange(0, LANES) * 1e-3
    for _ in range(rounds):
        x = tl.exp2(-x)
    tl.store(out + tl.program_id(0) * LANES + tl.arange(0, LANES), x)


@triton.jit
def products(out, rounds, factor, LANES: tl.constexpr):
    """Multiply and add again and again."""
    x = tl.arange(0, LANES) * 1e-3
    for _ in range(rounds):
        x = x * factor + 0.5
    tl.store(out + tl.program_id(0) * LANES + tl.arange(0, LANES), x)


def arithmetic(device: torch.device) -> list[PeakRate]:
    """Measure exponentials and fp32 multiply-adds of `device`, each a second."""
    programs = PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count
    out = torch.empty(programs * LANES, device=device)
    clock = Clock(device, warmup=3, repeats=REPEATS)
    calls = [
        lambda: exponentials[(programs,)](out, ROUNDS, LANES=LANES, num_warps=4),
        lambda: products[(programs,)](out, ROUNDS, 0.5, LANES=LANES, num_warps=4),
    ]
    done = programs * LANES * ROUNDS
    rates = [done / statistics.median(spent) * 1e3 for spent in clock.times(calls)]
    how = f"in a chain of {ROUNDS} in registers, Triton {triton.__version__}, median"
    return [
        PeakRate(resource="exp2", rate=rates[0], how=f"exponentials {how}"),
        PeakRate(resource="fp32", rate=rates[1], how=f"fp32 multiply-adds, an instruction each, {how}"),
    ]
