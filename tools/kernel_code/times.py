"""How long a compiled kernel takes on a GPU that is not there: `python -m tools.kernel_code.times`.

A kernel's loop keeps units busy for so many clocks (mixes.csv). The wavefronts of a part of a compute unit
share its units, and each alone takes the sum of them and its waits: the longest of these bounds the loop,
and bytes at what memory really gives bound the kernel. That time is a bound from below. Measured kernels
are slower by a factor, which the rows of rows.csv that are not held out give by GPU, kernel and code; the
90 % interval is that of the factors of these rows, and no narrower than the clocks of a card under its
power limit. Without five such rows the factor is that of the same kernel of the H100, and the interval as
wide as kernels of one kind differ.
"""

from __future__ import annotations

import csv
import math
import statistics
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
UNITS = ("matrix", "vector", "transcendental", "lds", "memory")
# Rows from which a factor is taken, and by how much power limits are assumed to move clocks.
LEAST_ROWS, CLOCKS = 5, 0.08
# With fewer rows than so many the ends of an interval are not known well, and lie so much further out.
MANY_ROWS, FEW = 20, 0.3
# What a kernel by somebody else, or on a card without rows, may take beyond the H100's own factors.
ANOTHER = 3.0


@dataclass(frozen=True, kw_only=True)
class TimedDevice:
    """One device of a card: parts of compute units, GHz, and what memory really gives in GB/s."""

    units: int
    parts: int
    clock: float
    bandwidth: float
    lanes: int
    registers: int


PEAK_GHZ = {
    row["id"]: row.get("clock_mhz", 0) / 1e3
    for row in tomllib.loads((ROOT / "images" / "gpus.toml").read_text(encoding="utf-8"))["gpu"]
}
# Units and bandwidth of images/gpus.toml, by device; the H100's clock: data sheets. The share of bandwidth
# that a copy gets is measured for the H100 (3.02 of 3.35 TB/s, records of this repository), and assumed for
# the others.
DEVICES = {
    "mi250": TimedDevice(
        units=104, parts=4, clock=PEAK_GHZ["mi250"], bandwidth=1638 * 0.79, lanes=64, registers=512
    ),
    "mi300x": TimedDevice(
        units=304, parts=4, clock=PEAK_GHZ["mi300x"], bandwidth=5300 * 0.75, lanes=64, registers=512
    ),
    "h100-80gb": TimedDevice(units=132, parts=4, clock=1.755, bandwidth=3350 * 0.9, lanes=32, registers=512),
}
ARCHS = {"gfx90a": "mi250", "gfx942": "mi300x", "sm90": "h100-80gb"}
# Rows of queries and keys that one pass of the loop takes, and warps: tuning.toml of the attention kernels.
TILES = {
    ("gfx", "forward", 64): (64, 64, 4), ("gfx", "forward", 128): (64, 64, 4),
    ("gfx", "backward_keys", 64): (32, 64, 4), ("gfx", "backward_keys", 128): (32, 64, 4),
    ("gfx", "backward_queries", 64): (64, 64, 4), ("gfx", "backward_queries", 128): (64, 32, 4),
    ("sm9", "forward", 64): (128, 64, 8), ("sm9", "forward", 128): (128, 128, 8),
    ("sm9", "backward_keys", 64): (32, 64, 4), ("sm9", "backward_keys", 128): (64, 128, 8),
    ("sm9", "backward_queries", 64): (64, 64, 4), ("sm9", "backward_queries", 128): (128, 64, 8),
}  # fmt: skip
# Clocks of a warp by state element of the scan on sm_90, counted as in mixes.py in the loops of
# scan_*_fp16's SASS:
# vector and transcendental. The backward scan goes over the states twice.
SCAN_SM90 = {"scan-forward": (8.41, 8.0), "scan-backward": (3.72 + 24.75, 8.0 + 8.0)}
# With fewer blocks to a compute unit the last round, which is not full, counts as one.
WHOLE_ROUNDS = 8
# Tensors of activations that pass memory, in and out.
TENSORS = {"scan-forward": 4, "scan-backward": 8, "conv-forward": 2, "conv-backward": 3}


@dataclass(frozen=True)
class Bound:
    """The least time in ms, and what it is that takes it."""

    ms: float
    by: str


@dataclass(frozen=True)
class Time:
    """A time in ms with its 90 % interval, and what bounds it."""

    ms: float
    low: float
    high: float
    by: str


@cache
def mixes() -> dict[tuple[str, str, int], dict[str, float]]:
    """Return the loops of the attention kernels."""
    with (HERE / "mixes.csv").open(encoding="utf-8", newline="") as file:
        return {
            (row["arch"], row["kernel"], int(row["head_size"])): {
                key: float(row[key]) for key in (*UNITS, "latency", "outside", "registers")
            }
            for row in csv.DictReader(file)
        }


def bound(row: Mapping[str, Any]) -> Bound:
    """Return the bound of a row: gpu, arch, kernel, batch, heads, length, size, causal, dtype."""
    device = DEVICES[row["gpu"]]
    if row["kernel"] == "attention-forward":
        return _attention(row, device, "forward")
    if row["kernel"] == "attention-backward":
        keys, queries = (_attention(row, device, name) for name in ("backward_keys", "backward_queries"))
        return Bound(keys.ms + queries.ms, keys.by)
    elements = row["batch"] * row["heads"] * row["length"]
    memory = elements * TENSORS[row["kernel"]] * (4 if row["dtype"] == "fp32" else 2) / device.bandwidth / 1e6
    if row["kernel"].startswith("conv"):
        return Bound(memory, "HBM")
    vector, slow = _scan_clocks(row["arch"], row["kernel"])
    clocks = vector + slow if device.lanes == 64 else max(vector, slow)
    waves = elements * row["size"] / device.lanes
    compute = waves * clocks / (device.units * device.parts * device.clock) / 1e6
    if memory > compute:
        return Bound(memory, "HBM")
    return Bound(compute, "vector units" if vector > slow else "transcendental")


def _scan_clocks(arch: str, kernel: str) -> tuple[float, float]:
    if arch == "sm90":
        return SCAN_SM90[kernel]
    path = ROOT / "recipes" / "mamba-kernels" / "kernels" / "budgets.toml"
    slots = tomllib.loads(path.read_text(encoding="utf-8"))[arch][f"{kernel.replace('-', '_')}_fp16"]["slots"]
    # One exponential of four slots is in each; the backward scan goes over the states twice.
    passes = [min(slots)] if kernel == "scan-forward" else [min(slots), max(slots)]
    return 4 * (sum(passes) - 4 * len(passes)), 16.0 * len(passes)


def _attention(row: Mapping[str, Any], device: TimedDevice, kernel: str) -> Bound:
    mix = mixes()[row["arch"], kernel, row["size"]]
    queries, keys, warps = TILES[row["arch"][:3], kernel, row["size"]]
    own, other = (keys, queries) if kernel == "backward_keys" else (queries, keys)
    blocks = row["batch"] * row["heads"] * math.ceil(row["length"] / own)
    passes = math.ceil(row["length"] / other) * (0.5 + 0.5 * own / row["length"] if row["causal"] else 1)
    resident = max(1, int(device.registers // mix["registers"]) * device.parts // warps)
    # With few blocks a compute unit has fewer than fit.
    resident = min(resident, math.ceil(blocks / device.units))
    waves = resident * warps / device.parts
    clocks = {unit: waves * mix[unit] for unit in ("matrix", "vector", "transcendental")}
    if device.lanes == 64:
        # Transcendental instructions are issued to the same units.
        clocks["vector"] += clocks["transcendental"]
    clocks |= {unit: waves * device.parts * mix[unit] for unit in ("lds", "memory")}
    alone = sum(mix[unit] for unit in (*UNITS[:3], "latency"))
    by, longest = max((*clocks.items(), ("latency", alone)), key=lambda item: item[1])
    rounds = blocks / (device.units * resident)
    if blocks < WHOLE_ROUNDS * device.units:
        rounds = math.ceil(rounds)
    ms = rounds * (passes * longest + mix["outside"]) / device.clock / 1e6
    names = {"matrix": "matrix units", "vector": "vector units", "lds": "LDS", "memory": "first cache"}
    return Bound(ms, names.get(by, by))


@cache
def rows() -> list[dict[str, Any]]:
    """Return the measured rows."""
    with (HERE / "rows.csv").open(encoding="utf-8", newline="") as file:
        table = list(csv.DictReader(file))
    numbers = ("batch", "heads", "length", "size")
    return [
        {
            **row,
            **{key: int(row[key]) for key in numbers},
            "ms": float(row["ms"]),
            "causal": row["causal"] == "True",
        }
        for row in table
    ]


@cache
def _factors(gpu: str, kernel: str, code: str) -> tuple[float, float, float]:
    """Return factor, and the ends of its 90 % interval, by rows that are not held out."""

    def found(gpu: str, code: str) -> list[float]:
        return sorted(
            row["ms"] / bound(row).ms
            for row in rows()
            if row["half"] == "fit" and (row["gpu"], row["kernel"], row["code"]) == (gpu, kernel, code)
        )

    own = found(gpu, code)
    if len(own) >= LEAST_ROWS:
        middle = statistics.median(own)
        ends = own if len(own) < MANY_ROWS else own[len(own) // 20 : -(len(own) // 20)]
        widen = CLOCKS if len(own) >= MANY_ROWS else FEW
        return middle, min(ends[0], middle) / (1 + widen), max(ends[-1], middle) * (1 + widen)
    other = found("h100-80gb", "ours") or [1.0]
    middle = statistics.median(other)
    return middle, other[0] / (1 + CLOCKS), max(other[-1], middle) * ANOTHER


def time(row: Mapping[str, Any]) -> Time:
    """Return the time of a row; `code` says whose kernel it is, ours where nobody measured it."""
    least = bound(row)
    factor, low, high = _factors(row["gpu"], row["kernel"], row.get("code", "ours"))
    return Time(least.ms * factor, least.ms * low, least.ms * high, least.by)


@dataclass(frozen=True)
class Score:
    """Of some held-out rows: how many, the median factor of prediction and of bound, the share inside."""

    rows: int
    factor: float
    bound_factor: float
    inside: float


def score(some: Iterable[Mapping[str, Any]]) -> Score:
    """Return how good the times of rows are."""
    judged = [(row, time(row), bound(row)) for row in some]
    away = [max(t.ms / row["ms"], row["ms"] / t.ms) for row, t, _ in judged]
    below = [max(b.ms / row["ms"], row["ms"] / b.ms) for row, _, b in judged]
    inside = [t.low <= row["ms"] <= t.high for row, t, _ in judged]
    return Score(len(judged), statistics.median(away), statistics.median(below), sum(inside) / len(judged))


def main(_: Sequence[str]) -> int:
    """Print the score by GPU, code and kernel."""
    held = [row for row in rows() if row["half"] == "held-out"]
    groups = sorted({(row["gpu"], row["code"], row["kernel"]) for row in held})
    keys = [(gpu,) for gpu in dict.fromkeys(group[0] for group in groups)] + groups
    for key in keys:
        some = [row for row in held if (row["gpu"], row["code"], row["kernel"])[: len(key)] == key]
        one = score(some)
        print(
            f"{' '.join(key):45} {one.rows:3} rows  factor {one.factor:.2f}  bound {one.bound_factor:.2f}  "
            f"inside {one.inside:.0%}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
