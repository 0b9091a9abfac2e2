"""Arguments are wrong here, with a name, or not at all: a kernel never sees what it would misread.

All checks look at types, devices and shapes only, so none waits for a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

KERNEL_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
STATES = 256
WIDTHS = (2, 8)
SEQUENCE = ("batch", "channels", "length")
PROJECTION = ("batch", "groups", "states", "length")


class ArgumentError(ValueError):
    """An argument has a value, shape, stride or device that is not allowed."""

    def __init__(self, argument: str, found: object, allowed: object) -> None:
        super().__init__(f"{argument}: found {found}, allowed {allowed}")
        self.argument, self.found, self.allowed = argument, str(found), str(allowed)


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument has a type or a dtype that is not allowed."""


class Sizes(NamedTuple):
    """A scan's sizes, in the order of the kernels' parameters."""

    batch: int
    channels: int
    length: int
    states: int
    groups: int


def rank(name: str, value: object, allowed: Sequence[int]) -> None:
    """Raise unless `value` is a tensor of an allowed number of dimensions."""
    if not isinstance(value, Tensor):
        raise ArgumentTypeError(name, type(value).__name__, "a tensor")
    if value.dim() not in allowed:
        found = f"{value.dim()} dimensions {tuple(value.shape)}"
        raise ArgumentError(name, found, f"{' or '.join(map(str, allowed))} dimensions")


def ranks(*given: tuple[str, object, tuple[int, ...]], required: int) -> None:
    """Raise unless all are tensors of an allowed number of dimensions; None after the first `required`."""
    for place, (name, value, allowed) in enumerate(given):
        if value is not None or place < required:
            rank(name, value, allowed)


def one_of(name: str, value: object, allowed: Sequence[object]) -> None:
    """Raise unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ArgumentError(name, repr(value), ", ".join(map(repr, allowed)))


def like(
    name: str,
    tensor: Tensor | None,
    dtype: torch.dtype,
    device: torch.device,
    shape: tuple[int, ...],
    dims: tuple[str, ...],
) -> None:
    """Raise unless a tensor, where it is given, has this dtype, device and shape."""
    if tensor is None or (tensor.dtype is dtype and tensor.shape == shape and tensor.device == device):
        return
    if tensor.dtype is not dtype:
        raise ArgumentTypeError(name, tensor.dtype, dtype)
    if tensor.device != device:
        raise ArgumentError(name, f"a tensor on {tensor.device}", device)
    raise ArgumentError(name, f"shape {tuple(tensor.shape)}", f"({', '.join(dims)}) = {tuple(shape)}")


def scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    initial_state: Tensor | None,
    seq_idx: Tensor | None,
    *,
    native: bool,
) -> Sizes:
    """Return the sizes of a scan whose arguments fit each other; `native` also restricts dtypes."""
    kind, device = u.dtype, u.device
    batch, channels, length = u.shape
    groups, states = B.shape[1], A.shape[1]
    check_dtype("u", kind, native=native)
    at_least_one("u", u.shape, SEQUENCE)
    weight = torch.float64 if kind is torch.float64 else torch.float32
    like("A", A, weight, device, (channels, states), ("channels", "states"))
    if not 0 < states <= STATES:
        raise ArgumentError("A", f"{states} states", f"1 to {STATES}")
    if groups == 0 or channels % groups:
        raise ArgumentError("B", f"{groups} groups", f"a divisor of the {channels} channels")
    like("delta", delta, kind, device, (batch, channels, length), SEQUENCE)
    like("B", B, kind, device, (batch, groups, states, length), PROJECTION)
    like("C", C, kind, device, (batch, groups, states, length), PROJECTION)
    like("D", D, weight, device, (channels,), ("channels",))
    like("z", z, kind, device, (batch, channels, length), SEQUENCE)
    like("delta_bias", delta_bias, weight, device, (channels,), ("channels",))
    shape = (batch, channels, states)
    like("initial_state", initial_state, weight, device, shape, ("batch", "channels", "states"))
    like("seq_idx", seq_idx, torch.int32, device, (batch, length), ("batch", "length"))
    return Sizes(batch, channels, length, states, groups)


def state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    *,
    native: bool,
) -> None:
    """Raise unless the arguments of a scan of one time fit each other; `native` also restricts dtypes."""
    (batch, channels), states, device = x.shape, A.shape[1], x.device
    check_dtype("x", x.dtype, native=native)
    at_least_one("x", x.shape, ("batch", "channels"))
    like("A", A, A.dtype, device, (channels, states), ("channels", "states"))
    if A.is_complex():
        raise ArgumentTypeError("A", A.dtype, "a real dtype")
    check_dtype("state", state.dtype, native=native)
    like("state", state, state.dtype, device, (batch, channels, states), ("batch", "channels", "states"))
    writable("state", state)
    for name, sequence in (("dt", dt), ("z", z)):
        like(name, sequence, x.dtype, device, (batch, channels), ("batch", "channels"))
    groups = (B.shape[1],) if B.dim() == 3 else ()
    for name, projection in (("B", B), ("C", C)):
        dims = ("batch", *("groups" for _ in groups), "states")
        like(name, projection, x.dtype, device, (batch, *groups, states), dims)
    for name, parameter in (("D", D), ("dt_bias", dt_bias)):
        if parameter is not None:
            like(name, parameter, parameter.dtype, device, (channels,), ("channels",))


def check_dtype(name: str, dtype: torch.dtype, *, native: bool) -> None:
    """Raise unless kernels, or torch when not `native`, compute in this dtype."""
    if dtype in KERNEL_TYPES or (dtype is torch.float64 and not native):
        return
    allowed = ", ".join(str(kind) for kind in KERNEL_TYPES)
    raise ArgumentTypeError(name, dtype, f'{allowed}; torch.float64 with backend="reference"')


def writable(name: str, tensor: Tensor) -> None:
    """Raise when elements of a tensor share memory."""
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape)):
        raise ArgumentError(name, f"strides {tensor.stride()}", "memory of its own for each element")


def at_least_one(name: str, shape: Sequence[int], dims: tuple[str, ...]) -> None:
    """Raise when a dimension is empty."""
    if 0 in shape:
        raise ArgumentError(name, f"shape {tuple(shape)}", f"({', '.join(dims)}) of 1 or more each")


def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_states: Tensor | None,
    seq_idx: Tensor | None,
    *,
    native: bool,
) -> None:
    """Raise unless a convolution's arguments fit each other; `native` also restricts dtypes."""
    batch, channels, length = x.shape
    width = _filter(x, weight, bias, native=native)
    shape, dims = (batch, channels, width - 1), ("batch", "channels", "width - 1")
    like("initial_states", initial_states, x.dtype, x.device, shape, dims)
    like("seq_idx", seq_idx, torch.int32, x.device, (batch, length), ("batch", "length"))


def conv_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cache_seqlens: Tensor | None,
    conv_state_indices: Tensor | None,
    *,
    native: bool,
) -> None:
    """Raise unless a step's arguments fit each other; `native` also restricts dtypes."""
    batch, channels, _ = x.shape
    width = _filter(x, weight, bias, native=native)
    kept = conv_state.shape[2]
    states = batch if conv_state_indices is None else conv_state.shape[0]
    like(
        "conv_state", conv_state, x.dtype, x.device, (states, channels, kept), ("states", "channels", "kept")
    )
    if kept < width - 1:
        raise ArgumentError("conv_state", f"{kept} inputs", f"{width - 1} or more, the width less one")
    writable("conv_state", conv_state)
    for name, tensor in (("cache_seqlens", cache_seqlens), ("conv_state_indices", conv_state_indices)):
        like(name, tensor, torch.int32, x.device, (batch,), ("batch",))


def _filter(x: Tensor, weight: Tensor, bias: Tensor | None, *, native: bool) -> int:
    """Return the width of a filter that fits x."""
    channels, width = x.shape[1], weight.shape[1]
    check_dtype("x", x.dtype, native=native)
    at_least_one("x", x.shape, SEQUENCE)
    kind = torch.float64 if x.dtype is torch.float64 else torch.float32
    like("weight", weight, kind, x.device, (channels, width), ("channels", "width"))
    if not WIDTHS[0] <= width <= WIDTHS[1]:
        raise ArgumentError("weight", f"width {width}", f"{WIDTHS[0]} to {WIDTHS[1]}")
    like("bias", bias, kind, x.device, (channels,), ("channels",))
    return int(width)
