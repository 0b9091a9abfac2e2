"""Launch options of Triton's kernels as data: a table a package, none found at run time."""

from __future__ import annotations

import csv
import functools
import warnings
from dataclasses import dataclass, fields
from pathlib import Path

import torch
import triton

# The architectures whose rows serve one of the same vendor that has none: the first that a table has.
DEFAULT_ARCHS = ("gfx942", "sm80", "sm90")
# What rows call Triton's interpreter, and tensors without memory when nobody says for which GPU they stand.
PROCESSOR = "cpu"
_TEXTS = ("kernel", "arch", "triton", "scores", "fp32")
_stands_for = PROCESSOR


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """One row of a table: block sizes, warps, stages and what a vendor's compiler takes beside them."""

    kernel: str
    arch: str
    triton: str
    """The oldest version that the row is for."""
    size: int
    """The widest that the row is for: columns of a head, or bytes of an element."""
    causal: int | None = None
    """1 or 0 for rows for one of both; None serves both."""
    scores: str | None = None
    """Rows for calls with a window to the left, or with ALiBi or a cap; None serves all."""
    block_m: int
    """Rows of output."""
    block_n: int
    """Rows of keys, or columns of the state."""
    block_k: int = 0
    """Rows of a chunk that a step of a loop takes."""
    num_warps: int
    num_stages: int
    programs: int = 2
    """Programs that a decoding call wants for each multiprocessor."""
    descriptors: int = 0
    """1 where tiles come through tensor descriptors, if strides allow it."""
    fp32: str = "ieee"
    """How fp32 is multiplied: `ieee`, or on matrix units in three parts, `tf32x3`, or in one, `tf32`."""
    waves_per_eu: int | None = None
    matrix_instr_nonkdim: int | None = None

    def compiler(self) -> dict[str, int]:
        """Return the options of the compiler."""
        names = ("num_warps", "num_stages", "waves_per_eu", "matrix_instr_nonkdim")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class Table:
    """The rows of a package."""

    def __init__(self, path: Path) -> None:
        self.name = path.parent.name
        with path.open(encoding="utf-8", newline="") as file:
            self.rows = [_row(row) for row in csv.DictReader(file)]
        self.options = functools.cache(self._options)

    def _options(
        self, kernel: str, *, arch: str, size: int, causal: bool | None = None, scores: str | None = None
    ) -> LaunchOptions:
        """Return the row of a kernel; where the table lacks the architecture, that is said once."""
        mine = [row for row in self.rows if row.kernel == kernel]
        rows = [row for row in mine if row.arch == arch]
        if not rows:
            known = {row.arch for row in mine}
            default = next(one for one in DEFAULT_ARCHS if one[:2] == arch[:2] and one in known)
            _say(f"twinrun_{self.name} has no launch options for {arch}: those of {default} are used")
            rows = [row for row in mine if row.arch == default]
        version = _number(triton.__version__)[:2]
        versions = sorted({row.triton for row in rows}, key=_number)
        chosen = max((one for one in versions if _number(one) <= version), key=_number, default=versions[0])
        fitting = [
            row
            for row in rows
            if row.triton == chosen
            and row.size >= size
            and row.causal in (None, causal)
            and row.scores in (None, scores)
        ]
        return min(fitting, key=lambda row: (row.size, row.scores is None, row.causal is None))


def architecture(device: torch.device) -> str:
    """Return what rows call the architecture of a device: `sm90`, `gfx942`, or `cpu` for the interpreter."""
    return _architecture(device) if device.type == "cuda" else _stands_for


@functools.cache
def _architecture(device: torch.device) -> str:
    properties = torch.cuda.get_device_properties(device)
    name = getattr(properties, "gcnArchName", "") if torch.version.hip else ""
    return name.partition(":")[0] or f"sm{properties.major}{properties.minor}"


def stand_for(arch: str) -> None:
    """Have tensors without memory stand for those of a GPU that is not here."""
    global _stands_for  # noqa: PLW0603
    _stands_for = arch


def _row(row: dict[str, str]) -> LaunchOptions:
    known = [one.name for one in fields(LaunchOptions)]
    found = {name: row[name] for name in known if row.get(name)}
    return LaunchOptions(**{name: value if name in _TEXTS else int(value) for name, value in found.items()})  # type: ignore[arg-type]


@functools.cache
def _say(message: str) -> None:
    warnings.warn(message, stacklevel=4)


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.partition("+")[0].split(".") if part.isdigit())
