"""One more time of Mamba-2's SSD, by the kernels of Mamba-1's scan: a head's columns are channels."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from twinrun_mamba import scan
from twinrun_mamba.validation import ArgumentError, like, ranks

NAMES = ("state", "x", "dt", "A", "B", "C", "D", "z", "dt_bias")
RANKS = ((4,), (3,), (3,), (3,), (3,), (3,), (2,), (3,), (2,))


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """Return SSD's output at one more time, without gradient, and bring `state` up to date in place.

    Positional arguments are upstream's. Without heads it is twinrun_mamba.selective_state_update.

    state: (batch, heads, head size, states). x, dt, z: (batch, heads, head size). B, C: (batch, groups,
        states). A: (heads, head size, states). D, dt_bias: (heads, head size); expanded tensors do.
    backend: as in selective_scan_fn.
    Raises ArgumentError, a ValueError, that names the argument; state_batch_indices is refused.
    """
    if state_batch_indices is not None:
        raise ArgumentError("state_batch_indices", "a tensor", "None: a state for each row of x")
    given = (state, x, dt, A, B, C, D, z, dt_bias)
    if isinstance(state, Tensor) and state.dim() == 3:
        return scan.selective_state_update(*given, dt_softplus, backend=backend)
    _check(given)
    out = scan.selective_state_update(
        _flat_view(state),
        x.flatten(1),
        dt.flatten(1),
        A.flatten(0, 1),
        B,
        C,
        None if D is None else D.flatten(),
        None if z is None else z.flatten(1),
        None if dt_bias is None else dt_bias.flatten(),
        dt_softplus,
        backend=backend,
    )
    return out.unflatten(1, x.shape[1:])


def _check(given: tuple[Any, ...]) -> None:
    """Raise unless shapes fit each other; the scan checks dtypes and devices."""
    ranks(*zip(NAMES, given, RANKS), required=6)
    state, x, dt, A, B, C, D, z, dt_bias = given
    (batch, heads, size), states, groups = x.shape, A.shape[2], B.shape[1]
    if groups < 1 or heads % groups:
        raise ArgumentError(
            "B", f"{groups} groups for {heads} heads", "a number of groups that divides heads"
        )
    row, projection = ("batch", "heads", "head size"), ("batch", "groups", "states")
    expected: tuple[tuple[str, Tensor | None, tuple[int, ...], tuple[str, ...]], ...] = (
        ("state", state, (batch, heads, size, states), (*row, "states")),
        ("dt", dt, (batch, heads, size), row),
        ("A", A, (heads, size, states), (*row[1:], "states")),
        ("B", B, (batch, groups, states), projection),
        ("C", C, (batch, groups, states), projection),
        ("D", D, (heads, size), row[1:]),
        ("z", z, (batch, heads, size), row),
        ("dt_bias", dt_bias, (heads, size), row[1:]),
    )
    for name, tensor, shape, dims in expected:
        if tensor is not None:
            like(name, tensor, tensor.dtype, x.device, shape, dims)


def _flat_view(state: Tensor) -> Tensor:
    """Return (batch, channels, states) of the state's own memory."""
    try:
        return state.view(len(state), -1, state.shape[-1])
    except RuntimeError:
        allowed = "heads and head size that are one dimension in memory"
        raise ArgumentError("state", f"strides {state.stride()}", allowed) from None
