"""Launch options as data: by kernel, architecture, Triton version and size, none found at run time."""

from __future__ import annotations

import csv
import functools
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import triton

TABLE = Path(__file__).with_name("tuning.csv")
KERNELS = (
    "chunk_states",
    "chunk_products",
    "chunk_outputs",
    "value_gradients",
    "product_gradients",
    "projection_gradients",
)
# The architecture whose rows serve where there is none, by the start of its name.
DEFAULT_ARCHS = {"gfx": "gfx942", "sm": "sm90"}
# The interpreter needs more than one block in a chunk, not speed.
INTERPRETER = "cpu"


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """One row of the table: block sizes, warps, stages and what a vendor's compiler takes beside them."""

    kernel: str
    arch: str
    triton: str
    """The oldest version that the row is for."""
    bytes: int
    """The widest element that the row is for."""
    fp32: str
    """How fp32 is multiplied: `ieee`, or on matrix units in three parts, `tf32x3`."""
    block_m: int
    """Rows of output, or heads where a kernel has no such rows."""
    block_k: int
    """Rows of a chunk that a step of the loop takes."""
    block_n: int
    """Columns of the state."""
    num_warps: int
    num_stages: int
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
    with TABLE.open(encoding="utf-8", newline="") as file:
        return tuple(_row(row) for row in csv.DictReader(file))


def _row(row: dict[str, str]) -> LaunchOptions:
    texts = {name: row[name] for name in ("kernel", "arch", "triton", "fp32")}
    numbers = {name: int(value) for name, value in row.items() if name not in texts and value}
    return LaunchOptions(**texts, **numbers)  # type: ignore[arg-type]


@functools.cache
def architecture(device: torch.device) -> str:
    """Return what rows call the architecture of a device: `sm90`, `gfx942`, or `cpu` for the interpreter."""
    if device.type != "cuda":
        return INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    name = getattr(properties, "gcnArchName", "") if torch.version.hip else ""
    return name.partition(":")[0] or f"sm{properties.major}{properties.minor}"


@functools.cache
def options(kernel: str, *, arch: str, element_bytes: int, tf32: bool = False) -> LaunchOptions:
    """Return the row of a kernel; where the table lacks the architecture, that is said once.

    tf32: fp32 is multiplied in one part of TF32 where it is in three else.
    """
    rows = [row for row in table() if row.kernel == kernel and row.arch == arch]
    if not rows:
        default = DEFAULT_ARCHS["gfx" if arch.startswith("gfx") else "sm"]
        _say(f"twinrun_mamba has no launch options of SSD for {arch}: those of {default} are used")
        rows = [row for row in table() if row.kernel == kernel and row.arch == default]
    rows = [row for row in rows if row.bytes >= element_bytes]
    version = _number(triton.__version__)[:2]
    older = [row for row in rows if _number(row.triton) <= version]
    found = max(older or rows, key=lambda row: (_number(row.triton), -row.bytes))
    return replace(found, fp32="tf32") if tf32 and found.fp32 == "tf32x3" else found


@functools.cache
def _say(message: str) -> None:
    warnings.warn(message, stacklevel=4)


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.partition("+")[0].split(".") if part.isdigit())
