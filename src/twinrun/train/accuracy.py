"""How far a result is from its reference, what it left unwritten, and what it keeps."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor


def distance(found: Tensor, reference: Tensor) -> float:
    """Return ||found - reference|| over ||reference||, computed in float64; infinite where not a number."""
    found, reference = found.detach().double(), reference.detach().double()
    norm = float(torch.linalg.vector_norm(reference))
    difference = float(torch.linalg.vector_norm(found - reference))
    relative = difference / norm if norm else difference
    return relative if math.isfinite(relative) else math.inf


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fill memory that is handed out uninitialised with NaN, so that what is not written shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.utils.deterministic.fill_uninitialized_memory = True
    # Filling goes with this mode; kernels without a deterministic form are not our concern here.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def kept_bytes(forward: Callable[[], Tensor], device: torch.device) -> int | None:
    """Return the memory that `forward` keeps beside its output; None where it cannot be known."""
    if device.type != "cuda":
        return None
    before = torch.cuda.memory_allocated(device)
    out = forward()
    return int(torch.cuda.memory_allocated(device) - before - out.nbytes)
