"""Codecs of gradients: bytes for values, fewer than the values have, and what is lost given back later."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from twinrun.foundation.errors import MachineError

# Values that share a scale: long enough that the scale is 1.6 % of the bytes, short enough that one large
# value costs few others their digits.
BLOCK = 256
# Blocks that kernels are compiled with first. Below 1,024 Inductor of PyTorch 2.11 computes one at a time,
# above several (torch/_inductor/runtime/triton_heuristics.py, _persistent_reduction_configs).
COMPILED_BLOCKS = 1 << 15
# Smaller than any gradient that matters; keeps a block of zeros from dividing by zero.
LEAST_SCALE = 1e-30
# Of Zstandard's levels the fastest that has entropy codes.
ENTROPY_LEVEL = 1


class Codec(ABC):
    """Encodes floating-point values; what is not a number stays not a number."""

    @abstractmethod
    def bytes_of(self, count: int) -> int | None:
        """Return the bytes that `count` values are encoded in; None where that follows from the values."""

    @abstractmethod
    def encode(self, values: Tensor, *, plus: Tensor | None = None, lost: Tensor | None = None) -> Tensor:
        """Return the bytes of a sum.

        Args:
            values: the first summand.
            plus: bytes of as many values, the second.
            lost: what was lost before, in fp32, the third; replaced by what is lost now.
        """

    @abstractmethod
    def decode_into(self, target: Tensor, payload: Tensor) -> None:
        """Put the values of `payload` into `target`, which has as many."""

    def decode(self, payload: Tensor, count: int) -> Tensor:
        """Return the `count` values of `payload`, in fp32."""
        values = payload.new_empty(count, dtype=torch.float32)
        self.decode_into(values, payload)
        return values


class Rounded(Codec):
    """bf16: as many exponents as fp32 and fewer digits."""

    def bytes_of(self, count: int) -> int:
        return 2 * count

    def encode(self, values: Tensor, *, plus: Tensor | None = None, lost: Tensor | None = None) -> Tensor:
        rounded = torch.empty_like(values, dtype=torch.bfloat16)
        second = None if plus is None else plus.view(torch.bfloat16)
        if lost is not None:
            wanted = lost + values
            if second is not None:
                wanted.add_(second)
            torch.sub(wanted, rounded.copy_(wanted), out=lost)
        elif second is not None:
            torch.add(values, second, out=rounded)
        else:
            rounded.copy_(values)
        return rounded.view(torch.uint8)

    def decode_into(self, target: Tensor, payload: Tensor) -> None:
        target.copy_(payload.view(torch.bfloat16))


class Scaled(Codec):
    """Eight bits a value under one fp32 scale a block; integers, or floats of eight bits.

    The last block is padded with zeros; what a payload has of it is as long as any other block.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def bytes_of(self, count: int) -> int:
        return -(-count // BLOCK) * (BLOCK + 4)

    def encode(self, values: Tensor, *, plus: Tensor | None = None, lost: Tensor | None = None) -> Tensor:
        count = values.numel()
        payload = values.new_empty(self.bytes_of(count), dtype=torch.uint8)
        digits_NB, scales_N = self._parts(payload)
        second = () if plus is None else self._parts(plus)
        summed = [values] if lost is None else [values, lost]
        scale = _SCALES[plus is not None, lost is not None]
        whole = count // BLOCK
        blocks = [one[: whole * BLOCK].view(whole, BLOCK) for one in summed]
        scales_N[:whole] = _of_device(scale, digits_NB[:whole], *blocks, *(one[:whole] for one in second))
        if whole < len(scales_N):
            rest = [pad(one[whole * BLOCK :], (0, -count % BLOCK)).view(1, BLOCK) for one in summed]
            scales_N[whole:] = scale(digits_NB[whole:], *rest, *(one[whole:] for one in second))
            if lost is not None:
                lost[whole * BLOCK :] = rest[1][0, : count % BLOCK]
        return payload

    def decode_into(self, target: Tensor, payload: Tensor) -> None:
        digits_NB, scales_N = self._parts(payload)
        whole = target.numel() // BLOCK
        _of_device(_unscale, target[: whole * BLOCK].view(whole, BLOCK), digits_NB[:whole], scales_N[:whole])
        if whole < len(scales_N):
            rest = target[whole * BLOCK :]
            rest.copy_(_values(digits_NB[whole:], scales_N[whole:])[0, : rest.numel()])

    def _parts(self, payload: Tensor) -> tuple[Tensor, Tensor]:
        """Return where a payload has the digits of each block, and its scales."""
        blocks = payload.numel() // (BLOCK + 4)
        digits = payload[: blocks * BLOCK].view(self._dtype).view(blocks, BLOCK)
        return digits, payload[blocks * BLOCK :].view(torch.float32)


# A compiled function does not write into two types of one memory: it writes digits and returns scales.
# One function for each set of summands: what is compiled for many of them is no longer compiled at all
# (torch._dynamo.config.recompile_limit, 8).
def _scale(digits_NB: Tensor, values_NB: Tensor) -> Tensor:
    """Write the digits of each block and return its scale."""
    dtype = digits_NB.dtype
    whole = not dtype.is_floating_point
    most = float(torch.iinfo(dtype).max if whole else torch.finfo(dtype).max)
    values_NB = values_NB.float()
    scales_N = (values_NB.abs().amax(dim=1) / most).clamp(min=LEAST_SCALE)
    scaled_NB = values_NB / scales_N[:, None]
    digits_NB.copy_((scaled_NB.round() if whole else scaled_NB).to(dtype))
    return scales_N


def _scale_sum(digits_NB: Tensor, values_NB: Tensor, plus_NB: Tensor, plus_scales_N: Tensor) -> Tensor:
    return _scale(digits_NB, values_NB.float() + _values(plus_NB, plus_scales_N))


def _scale_with_feedback(digits_NB: Tensor, values_NB: Tensor, lost_NB: Tensor) -> Tensor:
    wanted_NB = values_NB.float() + lost_NB
    scales_N = _scale(digits_NB, wanted_NB)
    lost_NB.copy_(wanted_NB - _values(digits_NB, scales_N))
    return scales_N


def _scale_sum_with_feedback(
    digits_NB: Tensor, values_NB: Tensor, lost_NB: Tensor, plus_NB: Tensor, plus_scales_N: Tensor
) -> Tensor:
    return _scale_with_feedback(digits_NB, values_NB.float() + _values(plus_NB, plus_scales_N), lost_NB)


# By whether a payload is added, and whether what is lost is kept.
_SCALES: dict[tuple[bool, bool], Callable[..., Tensor]] = {
    (False, False): _scale,
    (True, False): _scale_sum,
    (False, True): _scale_with_feedback,
    (True, True): _scale_sum_with_feedback,
}


def _unscale(target_NB: Tensor, digits_NB: Tensor, scales_N: Tensor) -> None:
    target_NB.copy_(_values(digits_NB, scales_N))


def _values(digits_NB: Tensor, scales_N: Tensor) -> Tensor:
    return digits_NB.float() * scales_N[:, None]


def _of_device(function: Callable[..., Any], *given_NB: Tensor) -> Any:
    """Call `function`, compiled on a GPU: alone, each of its operations reads and writes all values."""
    # What has no rows or one is compiled for that number alone.
    if not given_NB[0].is_cuda or len(given_NB[0]) < 2:
        return function(*given_NB)
    kinds = tuple((one.dtype, *one.shape[1:]) for one in given_NB)
    return _compiled(function, given_NB[0].device, kinds)(*given_NB)


@functools.cache
def _compiled(function: Callable[..., Any], device: torch.device, kinds: tuple[tuple[Any, ...], ...]) -> Any:
    """Return `function` compiled for tensors of these types and row lengths, and any number of rows.

    The first call chooses the kernel, so it has many rows.
    """
    compiled = torch.compile(function, dynamic=True)
    compiled(*(torch.zeros(COMPILED_BLOCKS, *row, dtype=dtype, device=device) for dtype, *row in kinds))
    return compiled


class Entropy(Codec):
    """What another codec makes, frequent bytes in fewer bits by Zstandard on the host: for slow links."""

    def __init__(self, inner: Codec) -> None:
        """Take the other codec; raises MachineError where the package zstd is missing."""
        # Ranks that do not ask for it start without.
        try:
            import zstd
        except ImportError:
            hint = "install zstd; it comes with mosaicml-streaming"
            raise MachineError("entropy codes need Zstandard", found="no package zstd", hint=hint) from None

        self._inner, self._zstd = inner, zstd

    def bytes_of(self, _count: int) -> int | None:
        return None

    def encode(self, values: Tensor, *, plus: Tensor | None = None, lost: Tensor | None = None) -> Tensor:
        second = None if plus is None else self._changed(plus, self._zstd.uncompress)
        payload = self._inner.encode(values, plus=second, lost=lost)
        return self._changed(payload, lambda content: self._zstd.compress(content, ENTROPY_LEVEL, 1))

    def decode_into(self, target: Tensor, payload: Tensor) -> None:
        self._inner.decode_into(target, self._changed(payload, self._zstd.uncompress))

    @staticmethod
    def _changed(payload: Tensor, change: Callable[[bytes], bytes]) -> Tensor:
        if not payload.numel():
            return payload
        content = bytearray(change(payload.cpu().numpy().tobytes()))
        return torch.frombuffer(content, dtype=torch.uint8).to(payload.device)


CODECS: dict[str, Callable[[], Codec]] = {
    "bf16": Rounded,
    "fp8": lambda: Scaled(torch.float8_e4m3fn),
    "int8": lambda: Scaled(torch.int8),
    "int8-entropy": lambda: Entropy(Scaled(torch.int8)),
}
