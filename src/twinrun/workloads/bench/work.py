"""The least work of a call, computed again from the settings of its case, by the formula that it names.

Each formula is that of the recipe whose script counts by it; what they count, the recipe's README says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from twinrun.protocol.bench import COPY

BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
Amounts = dict[str, float]
CaseSettings = Mapping[str, Any]
# Sequences and projections through memory; then instructions and exponentials of a state.
SCAN = {"forward": (4, 2, 4, 3), "backward": (7, 4, 17, 5), "accumulated": (10, 6, 17, 5)}
# Sequences through memory, and passes of the filter.
CONVOLUTION = {"forward": (2, 1), "backward": (3, 3), "accumulated": (5, 3)}
# Tensors like the output, like B and like the step sizes, through memory.
SSD = {"forward": (3, 2, 1), "backward": (5, 4, 2), "accumulated": (7, 6, 3)}
# An element's silu, or its derivative.
SPECIAL = 2


def amounts_of(formula: str, settings: CaseSettings, labels: Mapping[str, str]) -> Amounts | None:
    """Return the least work by resource; None for a formula that is not known here.

    Args:
        settings: of the case.
        labels: of the call, for its `dtype` and what else it is of.
    """
    kind, _, counted = formula.partition("-")
    count: Callable[[str, CaseSettings, Mapping[str, str]], Amounts] | None = _FORMULAS.get(kind)
    try:
        return count(counted, settings, labels) if count else None
    except (KeyError, TypeError):
        return None


def _scan(counted: str, settings: CaseSettings, labels: Mapping[str, str]) -> Amounts:
    sequences, projections, instructions, special = SCAN[counted]
    width, states, channels = BYTES[labels["dtype"]], settings["states"], settings["channels"]
    steps = settings["batch"] * settings["length"]
    elements, projected = steps * channels, steps * settings["groups"] * states
    moved = (sequences * elements + projections * projected) * width + 4 * channels * (states + 2)
    return {COPY: moved, "fp32": elements * states * instructions, "exp2": elements * (states + special)}


def _convolution(counted: str, settings: CaseSettings, labels: Mapping[str, str]) -> Amounts:
    width, channels, taps = BYTES[labels["dtype"]], settings["channels"], settings["width"]
    filters = 4 * channels * (taps + 1)
    if counted == "step":
        elements = settings["batch"] * channels
        moved = 2 * elements * (1 + taps) * width + filters
        return {COPY: moved, "fp32": elements * taps, "exp2": SPECIAL * elements}
    sequences, passes = CONVOLUTION[counted]
    elements = settings["batch"] * settings["length"] * channels
    moved = sequences * elements * width + filters
    return {COPY: moved, "fp32": elements * passes * taps, "exp2": SPECIAL * elements}


def _ssd(counted: str, settings: CaseSettings, labels: Mapping[str, str]) -> Amounts:
    width, steps = BYTES[labels["dtype"]], settings["batch"] * settings["length"]
    sizes = (
        steps * settings["heads"] * settings["head_size"],
        steps * settings["groups"] * settings["states"],
        steps * settings["heads"],
    )
    return {COPY: sum(n * size * width for n, size in zip(SSD[counted], sizes, strict=True))}


def _attention(counted: str, settings: CaseSettings, labels: Mapping[str, str]) -> Amounts:
    phase, dtype, mask = counted.partition("/")[0], labels["dtype"], labels["mask"]
    batch, heads, length, size = (settings[name] for name in ("batch", "heads", "length", "head_size"))
    if phase == "decode":
        keys = batch * length * (settings["kv_heads"] or heads) * size
        rows = 1 if tuple(settings["phases"]) == ("decode",) else length
        return {COPY: (2 * keys + 2 * batch * rows * heads * size) * BYTES[dtype]}
    seen = length**2 * (1.0 if mask == "full" else 0.5)
    if mask == "window":
        width = min(settings["window"], length)
        seen = length * width - width**2 / 2
    products = 4.0 * batch * heads * seen * size
    return {f"{dtype}-products": products * (2.5 if phase == "backward" else 1.0)}


def _read_and_write(_counted: str, settings: CaseSettings, labels: Mapping[str, str]) -> Amounts:
    return {COPY: 2 * settings["rows"] * settings["columns"] * BYTES[labels["dtype"]]}


_FORMULAS = {
    "read": _read_and_write,
    "scan": _scan,
    "conv": _convolution,
    "ssd": _ssd,
    "attention": _attention,
}


def same(found: object, value: float) -> bool:
    """Say whether a fact is a number that equals another but for rounding."""
    return (
        isinstance(found, (int, float))
        and not isinstance(found, bool)
        and math.isclose(found, value, rel_tol=1e-9)
    )
