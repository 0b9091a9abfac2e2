"""Our kernels beside upstream's at the shapes of its tests.

`python recipes/mamba-kernels/tools/compare_upstream.py --help` lists the options.
Both take turns in one process, as the recipe times them: the device's part of a call, with cold caches. A
line for each pair that is slower than allowed and one for each group, which gives lowest, median and highest
ratio to upstream. Exit code 1 when any was slower, 2 when it could not start, 130 when it was stopped.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "kernels" / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "kernels/entry/src"))
from gpu_grid import device_of
from twinrun_mamba.launch import BACKENDS

from twinrun.train.measure import Clock

ours, upstream = import_module("ours"), import_module("upstream")
Function = Callable[..., Tensor]
# What tests of mamba-ssm and of causal-conv1d 1.7.0 go through, and shorter scans and Mamba's own channels.
SCAN_LENGTHS = (1, 8, 64, 128, 256, 512, 1024, 2048, 4096)
SCAN_SIZES = ((4, 8), (64, 16), (768, 16), (1536, 16))
CONV_LENGTHS = (1, 2, 8, 16, 32, 64, 128, 129, 130, 151, 256, 372, 512, 784, 1024, 1134, 2048, 4096)
CONV_CHANNELS = (64, 768, 4128)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BATCH, WIDTH = 2, 4


@dataclass(frozen=True)
class TimedShape:
    """What is timed: an operation of one size in one type."""

    operation: str
    dtype: str
    channels: int
    length: int
    states: int = 0
    tokens: bool = False

    @property
    def group(self) -> str:
        """Return what is summed up together."""
        layout = {"conv": " through tokens" if self.tokens else " along rows"}.get(self.operation, "")
        return f"{self.operation}{layout} {self.dtype}"

    def __str__(self) -> str:
        states = f", {self.states} states" if self.states else ""
        return f"{self.group}, {self.channels} channels, {self.length} steps{states}"

    def sequence(self, device: str) -> Tensor:
        """Return a random (batch, channels, length)."""
        dtype = DTYPES[self.dtype]
        if self.tokens:
            return torch.randn(BATCH, self.length, self.channels, dtype=dtype, device=device).transpose(1, 2)
        return torch.randn(BATCH, self.channels, self.length, dtype=dtype, device=device)

    def inputs(self, device: str) -> dict[str, Tensor]:
        """Return random inputs, in the order in which upstream takes them."""
        channels = self.channels
        if self.operation == "conv":
            weight, bias = torch.randn(channels, WIDTH, device=device), torch.randn(channels, device=device)
            return {"x": self.sequence(device), "weight": weight, "bias": bias}
        A = -torch.rand(channels, self.states, device=device)
        shape = 2, BATCH, 1, self.states, self.length
        B, C = torch.randn(shape, dtype=DTYPES[self.dtype], device=device)
        D, delta_bias = torch.rand(2, channels, device=device)
        u, delta, z = (self.sequence(device) for _ in range(3))
        return {"u": u, "delta": delta, "A": A, "B": B, "C": C, "D": D, "z": z, "delta_bias": delta_bias}


def shapes() -> Iterator[TimedShape]:
    """Return all shapes, group by group."""
    for dtype in DTYPES:
        for length, (channels, states) in product(SCAN_LENGTHS, SCAN_SIZES):
            yield TimedShape("scan", dtype, channels, length, states)
    for tokens, dtype in product((False, True), DTYPES):
        for channels, length in product(CONV_CHANNELS, CONV_LENGTHS):
            yield TimedShape("conv", dtype, channels, length, tokens=tokens)


def main(arguments: Sequence[str] | None = None) -> int:
    """Time what was asked for; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="time what has this in its name")
    parser.add_argument("--least", type=float, default=0.97, help="upstream's time over ours that is allowed")
    parser.add_argument("--repeats", type=int, default=20, help="timed calls, whose median counts")
    parser.add_argument("--device", type=device_of, default="cuda:0")
    parser.add_argument("--backend", default="native", choices=BACKENDS)
    given = parser.parse_args(arguments)
    if given.repeats < 1:
        parser.error(f"--repeats: found {given.repeats}, allowed 1 or more")
    chosen = [shape for shape in shapes() if given.only in str(shape)]
    if not chosen:
        parser.error(f"--only: found {given.only!r}, allowed a part of a name; one is: {next(shapes())}")
    try:
        theirs = {operation: upstream.function(operation) for operation in ("scan", "conv")}
    except ImportError as error:
        parser.error(f"upstream's kernels cannot be imported: {error}; hint: mamba-ssm and causal-conv1d")
    clock = Clock(torch.device(given.device), warmup=3, repeats=given.repeats)
    try:
        ratios = {
            shape: _ratios(shape, ours.function(shape.operation, given.backend), theirs, clock, given)
            for shape in _announced(chosen)
        }
    except KeyboardInterrupt:
        parser.exit(130, "compare_upstream: stopped; hint: --only has fewer shapes\n")
    return _summed_up(ratios, given.least)


def _announced(chosen: Sequence[TimedShape]) -> Iterator[TimedShape]:
    """Return the shapes, and say where it is."""
    group = ""
    for number, shape in enumerate(chosen, 1):
        if shape.group != group:
            group = shape.group
            print(f"{number} of {len(chosen)}: {group}", flush=True)
        yield shape


def _ratios(
    shape: TimedShape, mine: Function, theirs: dict[str, Function], clock: Clock, given: argparse.Namespace
) -> dict[str, float]:
    """Return upstream's time over ours by phase, and print those that are less than allowed."""
    inputs, gradient = shape.inputs(given.device), shape.sequence(given.device)
    calls: dict[str, list[Callable[[], object]]] = {"forward": [], "backward": []}
    for function in (mine, theirs[shape.operation]):
        forward, backward = _calls(function, inputs, gradient)
        calls["forward"].append(forward)
        calls["backward"].append(backward)
    found = {}
    for phase, both in calls.items():
        own, other = (statistics.median(times) * 1e3 for times in clock.times(both))
        found[phase] = other / own
        if found[phase] < given.least:
            print(f"{found[phase]:.2f} {shape}, {phase}: {own:.1f} us, upstream {other:.1f}", flush=True)
    return found


def _calls(
    function: Function, inputs: dict[str, Tensor], gradient: Tensor
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return what is timed of an implementation, forward and backward."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in inputs.items()}
    out = function(**leaves)
    given = list(leaves.values())
    return lambda: function(**leaves), lambda: torch.autograd.grad(out, given, gradient, retain_graph=True)


def _summed_up(ratios: dict[TimedShape, dict[str, float]], least: float) -> int:
    """Print a line for each group and phase; return the exit code."""
    slower = 0
    print("ratio to upstream, lowest / median / highest")
    for group, phase in product(dict.fromkeys(shape.group for shape in ratios), ("forward", "backward")):
        found = [one[phase] for shape, one in ratios.items() if shape.group == group]
        below = sum(ratio < least for ratio in found)
        slower += below
        numbers = f"{min(found):.2f} / {statistics.median(found):.2f} / {max(found):.2f}"
        print(f"{group}, {phase}: {numbers}, {below} of {len(found)} below {least:g}")
    print(f"{slower} of {2 * len(ratios)} below {least:g}")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
