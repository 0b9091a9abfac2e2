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
    def encode(self, values: Tensor) -> Tensor:
        """Return `values` as bytes."""

    @abstractmethod
    def decode(self, payload: Tensor, count: int) -> Tensor:
        """Return `count` values, in fp32."""

    def decode_into(self, target: Tensor, payload: Tensor, *, add: bool) -> None:
        """Put the values of `payload` into `target`, or add them to what it has."""
        values = self.decode(payload, target.numel())
        target.add_(values) if add else target.copy_(values)

    def encode_with_feedback(self, values: Tensor, residual: Tensor) -> Tensor:
        """Encode `values` and what was lost before; put what is lost now into `residual`."""
        wanted = values.float() + residual
        payload = self.encode(wanted)
        torch.sub(wanted, self.decode(payload, values.numel()), out=residual)
        return payload


class Rounded(Codec):
    """bf16: as many exponents as fp32 and fewer digits."""

    def bytes_of(self, count: int) -> int:
        return 2 * count

    def encode(self, values: Tensor) -> Tensor:
        return values.to(torch.bfloat16).view(torch.uint8)

    def decode(self, payload: Tensor, count: int) -> Tensor:
        return payload.view(torch.bfloat16).float()[:count]


class Scaled(Codec):
    """Eight bits a value under one fp32 scale a block; integers, or floats of eight bits.

    The last block is padded with zeros; what a payload has of it is as long as any other block.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def bytes_of(self, count: int) -> int:
        return -(-count // BLOCK) * (BLOCK + 4)

    def encode(self, values: Tensor) -> Tensor:
        return self._encode(_scale, values)

    def encode_with_feedback(self, values: Tensor, residual: Tensor) -> Tensor:
        """See Codec."""
        return self._encode(_scale_with_feedback, values, residual)

    def _encode(self, scale: Callable[..., Tensor], *given_N: Tensor) -> Tensor:
        """Return the payload of what `scale` makes of tensors of one length; it may change the second."""
        count = given_N[0].numel()
        payload = given_N[0].new_empty(self.bytes_of(count), dtype=torch.uint8)
        digits_NB, scales_N = self._parts(payload)
        whole = count // BLOCK
        blocks = [one[: whole * BLOCK].view(whole, BLOCK) for one in given_N]
        scales_N[:whole] = _of_device(scale, *blocks, digits_NB[:whole])
        if whole < len(scales_N):
            rest = [pad(one[whole * BLOCK :], (0, -count % BLOCK)).view(1, BLOCK) for one in given_N]
            scales_N[whole:] = scale(*rest, digits_NB[whole:])
            for one, padded in zip(given_N[1:], rest[1:], strict=True):
                one[whole * BLOCK :] = padded[0, : count % BLOCK]
        return payload

    def decode(self, payload: Tensor, count: int) -> Tensor:
        values = payload.new_empty(count, dtype=torch.float32)
        self.decode_into(values, payload, add=False)
        return values

    def decode_into(self, target: Tensor, payload: Tensor, *, add: bool) -> None:
        """See Codec."""
        digits_NB, scales_N = self._parts(payload)
        whole = target.numel() // BLOCK
        unscale = _add_unscaled if add else _unscale
        _of_device(unscale, digits_NB[:whole], scales_N[:whole], target[: whole * BLOCK].view(whole, BLOCK))
        if whole < len(scales_N):
            rest = target[whole * BLOCK :]
            values = (digits_NB[whole].float() * scales_N[whole])[: rest.numel()]
            rest.add_(values) if add else rest.copy_(values)

    def _parts(self, payload: Tensor) -> tuple[Tensor, Tensor]:
        """Return where a payload has the digits of each block, and its scales."""
        blocks = payload.numel() // (BLOCK + 4)
        digits = payload[: blocks * BLOCK].view(self._dtype).view(blocks, BLOCK)
        return digits, payload[blocks * BLOCK :].view(torch.float32)


# A compiled function does not write into two types of one memory: it writes digits and returns scales.
def _scale(values_NB: Tensor, digits_NB: Tensor) -> Tensor:
    """Write the digits of each block and return its scale."""
    dtype = digits_NB.dtype
    whole = not dtype.is_floating_point
    most = float(torch.iinfo(dtype).max if whole else torch.finfo(dtype).max)
    values_NB = values_NB.float()
    scales_N = (values_NB.abs().amax(dim=1) / most).clamp(min=LEAST_SCALE)
    scaled_NB = values_NB / scales_N[:, None]
    digits_NB.copy_((scaled_NB.round() if whole else scaled_NB).to(dtype))
    return scales_N


def _scale_with_feedback(values_NB: Tensor, residual_NB: Tensor, digits_NB: Tensor) -> Tensor:
    """Scale the sum of both, and put what the digits lose of it into the second."""
    wanted_NB = values_NB.float() + residual_NB
    scales_N = _scale(wanted_NB, digits_NB)
    residual_NB.copy_(wanted_NB - digits_NB.float() * scales_N[:, None])
    return scales_N


def _unscale(digits_NB: Tensor, scales_N: Tensor, target_NB: Tensor) -> None:
    target_NB.copy_(digits_NB.float() * scales_N[:, None])


def _add_unscaled(digits_NB: Tensor, scales_N: Tensor, target_NB: Tensor) -> None:
    target_NB.add_(digits_NB.float() * scales_N[:, None])


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

    def encode(self, values: Tensor) -> Tensor:
        payload = self._inner.encode(values)
        return self._changed(payload, lambda content: self._zstd.compress(content, ENTROPY_LEVEL, 1))

    def decode(self, payload: Tensor, count: int) -> Tensor:
        return self._inner.decode(self._changed(payload, self._zstd.uncompress), count)

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
