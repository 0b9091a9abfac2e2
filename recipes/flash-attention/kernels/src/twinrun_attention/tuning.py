"""Launch options as data: by kernel, architecture, Triton version and head size, none found at run time."""

from __future__ import annotations

import functools
import tomllib
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import triton

TABLE = Path(__file__).with_name("tuning.toml")
KERNELS = ("forward", "backward_keys", "backward_queries", "decode")
# The architecture whose rows serve where there is none, by vendor.
DEFAULT_ARCHS = {"hip": "gfx942", "cuda": "sm80"}


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """One row of the table: block sizes, warps, stages and what a vendor's compiler takes beside them."""

    kernel: str
    arch: str
    triton: tuple[str, ...]
    """Versions that the row is for."""
    head_size: int
    """The largest head size that the row is for."""
    causal: bool | None = None
    """Rows for one of both; None serves both."""
    scores: Literal["window", "biased"] | None = None
    """Rows for calls with a window to the left, or with ALiBi or a cap; None serves all."""
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs: int = 2
    """Programs that a decoding call wants for each multiprocessor."""
    descriptors: bool = False
    """Whether tiles come through tensor descriptors, where strides allow it."""
    waves_per_eu: int | None = None
    matrix_instr_nonkdim: int | None = None

    def compiler(self) -> dict[str, int]:
        """Return the options of the compiler."""
        found = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        extra = {"waves_per_eu": self.waves_per_eu, "matrix_instr_nonkdim": self.matrix_instr_nonkdim}
        return found | {name: value for name, value in extra.items() if value is not None}


@functools.cache
def table() -> tuple[LaunchOptions, ...]:
    """Return every row."""
    rows = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    return tuple(
        LaunchOptions(kernel=name, **row | {"triton": tuple(row["triton"])})
        for name in KERNELS
        for row in rows[name]
    )


@functools.cache
def architecture(device: torch.device) -> str:
    """Return what rows call the architecture of a device: `sm90`, `gfx942`, or `cpu` for the interpreter."""
    if device.type != "cuda":
        return "cpu"
    properties = torch.cuda.get_device_properties(device)
    name = getattr(properties, "gcnArchName", "") if torch.version.hip else ""
    return name.partition(":")[0] or f"sm{properties.major}{properties.minor}"


@functools.cache
def options(
    kernel: str, *, arch: str, head_size: int, causal: bool, scores: str | None = None
) -> LaunchOptions:
    """Return the row of a kernel; where the table lacks the architecture or version, that is said once."""
    version = ".".join(triton.__version__.split(".")[:2])
    rows = [row for row in table() if row.kernel == kernel and row.arch == arch]
    if not rows:
        default = DEFAULT_ARCHS["hip" if arch.startswith("gfx") else "cuda"]
        _say(f"twinrun_attention has no launch options for {arch}: those of {default} are used")
        rows = [row for row in table() if row.kernel == kernel and row.arch == default]
    known = sorted({one for row in rows for one in row.triton}, key=_number)
    chosen = next((one for one in reversed(known) if _number(one) <= _number(version)), known[0])
    if chosen != version:
        _say(f"twinrun_attention was tuned on {arch} for Triton {chosen}, not {version}")
    fitting = [
        row
        for row in rows
        if chosen in row.triton
        and row.head_size >= head_size
        and row.causal in (None, causal)
        and row.scores in (None, scores)
    ]
    return min(fitting, key=lambda row: (row.head_size, row.scores is None, row.causal is None))


@functools.cache
def _say(message: str) -> None:
    warnings.warn(message, stacklevel=4)


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
