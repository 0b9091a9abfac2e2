"""Starts of Triton's kernels: what does not depend on addresses is found once and then repeated.

Triton looks for the compiled kernel and at each argument anew in every call: tens of microseconds.
What it looks at beside numbers is the type of each tensor and whether it begins at 16 bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from twinrun_kernels.tuning import LaunchOptions

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Triton 3.4 or newer, and not its interpreter.
DESCRIPTORS = find_spec("triton.tools.tensor_descriptor") is not None and not INTERPRETED
# So many forms of calls are remembered: packed sequences have another longest one in each batch.
REMEMBERED = 4096
_HERE = nullcontext()
# Where targets.py takes down what would be started.
taken_down: list[tuple[Launch, tuple[Tensor, ...]]] | None = None


class Described(NamedTuple):
    """A tensor that is read through a descriptor: its form, and the tile that is read at once."""

    shape: Sequence[int]
    strides: Sequence[int]
    tile: Sequence[int]


class Launch:
    """A kernel, its programs, and all that it takes but its tensors, which are its first parameters."""

    def __init__(
        self,
        kernel: Any,
        programs: int | tuple[int, ...],
        values: Mapping[str, Any],
        *,
        row: LaunchOptions | None = None,
        described: Mapping[int, Described] | None = None,
    ) -> None:
        """Prepare it.

        values: its parameters by name, among any others; tensors may be left out.
        described: tensors that are read through descriptors, by their place.
        """
        self.kernel, self.described = kernel, described or {}
        self.grid = programs if isinstance(programs, tuple) else (programs,)
        given = (values[name] for name in kernel.arg_names if name in values)
        self.rest = tuple(one for one in given if not isinstance(one, Tensor))
        self.compiler = row.compiler() if row else {}
        # What starts the compiled kernel, by type and device of the first tensor.
        self._started: dict[tuple[torch.dtype, torch.device], Callable[..., None]] = {}

    def __call__(self, *tensors: Tensor) -> None:
        """Start it on torch's current stream."""
        if taken_down is not None:
            taken_down.append((self, tensors))
            return
        begins = 0
        for one in tensors:
            begins |= one.data_ptr()
        key = tensors[0].dtype, tensors[0].device
        start = None if begins & 15 else self._started.get(key)
        if start is not None:
            if self.described:
                start(*self._through(tensors, _Known), *self.rest)
            else:
                start(*tensors, *self.rest)
            return
        given = self._through(tensors, _descriptor) if self.described else tensors
        compiled = self.kernel[self.grid](*given, *self.rest, **self.compiler)
        # The interpreter compiles nothing.
        if compiled is not None and not begins & 15:
            self._started[key] = compiled[(*self.grid, 1, 1)[:3]]

    def _through(self, tensors: tuple[Tensor, ...], describe: Callable[..., Any]) -> list[Any]:
        given: list[Any] = list(tensors)
        for place, form in self.described.items():
            given[place] = describe(tensors[place], *form)
        return given


class _Known:
    """What a launcher reads of Triton's TensorDescriptor, without its checks."""

    __slots__ = ("base", "padding", "shape", "strides")

    def __init__(self, base: Tensor, shape: Sequence[int], strides: Sequence[int], _tile: Any) -> None:
        self.base, self.shape, self.strides, self.padding = base, shape, strides, "zero"


def _descriptor(tensor: Tensor, shape: Sequence[int], strides: Sequence[int], tile: Sequence[int]) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: PLC0415 - Triton 3.4 or newer

    return TensorDescriptor(tensor.as_strided(shape, strides), list(shape), list(strides), list(tile))


_launches: dict[Any, Launch] = {}


def start(kernel: Any, programs: int, values: Mapping[str, Any], row: LaunchOptions | None = None) -> None:
    """Start a kernel of so many programs; it takes its parameters from `values` by their names."""
    given = [values[name] for name in kernel.arg_names]
    tensors = [one for one in given if isinstance(one, Tensor)]
    rest = given[len(tensors) :]
    # Rows live as long as their table.
    key = (kernel, programs, id(row), *(one.dtype for one in tensors), *rest)
    launch = _launches.get(key)
    if launch is None:
        if len(_launches) >= REMEMBERED:
            _launches.clear()
        launch = _launches[key] = Launch(kernel, programs, values, row=row)
    launch(*tensors)


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which kernels start on a device; entering one takes longer than to look."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _HERE
    entered: AbstractContextManager[Any] = torch.cuda.device(device)
    return entered


def widened(tensor: Tensor) -> Tensor:
    """Return a tensor in fp32 in Triton's interpreter, which multiplies bf16 wrongly."""
    return tensor.float() if INTERPRETED and tensor.device.type == "cpu" else tensor
