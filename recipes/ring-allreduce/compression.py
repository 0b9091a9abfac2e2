"""Codecs of gradients: bytes for values, fewer than the values have, and what is lost given back later."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

# Values that share a scale: long enough that the scale is 1.6 % of the bytes, short enough that one large
# value costs few others their digits.
BLOCK = 256
# Smaller than any gradient that matters; keeps a block of zeros from dividing by zero.
LEAST_SCALE = 1e-30


class Codec(ABC):
    """Encodes floating-point values; what is not a number stays not a number."""

    @abstractmethod
    def bytes_of(self, count: int) -> int:
        """Return the bytes that `count` values are encoded in."""

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


class Bf16Codec(Codec):
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


class BlockScaleCodec(Codec):
    """Eight bits a value under one fp32 scale a block; integers, or floats of eight bits.

    The last block is padded with zeros; what a payload has of it is as long as any other block.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._most = float((torch.finfo if dtype.is_floating_point else torch.iinfo)(dtype).max)

    def bytes_of(self, count: int) -> int:
        return -(-count // BLOCK) * (BLOCK + 4)

    def encode(self, values: Tensor, *, plus: Tensor | None = None, lost: Tensor | None = None) -> Tensor:
        payload = values.new_empty(self.bytes_of(values.numel()), dtype=torch.uint8)
        digits_NB, scales_N = self._parts(payload)
        if values.is_cuda and len(scales_N):
            from scaling_kernels import encode

            second = None if plus is None else self._parts(plus)
            encode(digits_NB, scales_N, values, plus=second, lost=lost, most=self._most, least=LEAST_SCALE)
            return payload
        wanted = values.float()
        if plus is not None:
            wanted = wanted + self.decode(plus, values.numel())
        if lost is not None:
            wanted = wanted + lost
        scales_N.copy_(self._scale(digits_NB, pad(wanted, (0, -len(wanted) % BLOCK))))
        if lost is not None:
            torch.sub(wanted, self.decode(payload, len(wanted)), out=lost)
        return payload

    def decode_into(self, target: Tensor, payload: Tensor) -> None:
        digits_NB, scales_N = self._parts(payload)
        if target.is_cuda and len(scales_N):
            from scaling_kernels import decode

            decode(target, digits_NB, scales_N)
            return
        target.copy_((digits_NB.float() * scales_N[:, None]).view(-1)[: target.numel()])

    def _scale(self, digits_NB: Tensor, values: Tensor) -> Tensor:
        """Write the digits of each block and return its scale."""
        values_NB = values.view(digits_NB.shape)
        scales_N = (values_NB.abs().amax(dim=1) / self._most).clamp(min=LEAST_SCALE)
        scaled_NB = values_NB / scales_N[:, None]
        digits_NB.copy_(scaled_NB if self._dtype.is_floating_point else scaled_NB.round_())
        return scales_N

    def _parts(self, payload: Tensor) -> tuple[Tensor, Tensor]:
        """Return where a payload has the digits of each block, and its scales."""
        blocks = payload.numel() // (BLOCK + 4)
        digits = payload[: blocks * BLOCK].view(self._dtype).view(blocks, BLOCK)
        return digits, payload[blocks * BLOCK :].view(torch.float32)


CODECS: dict[str, Callable[[], Codec]] = {
    "bf16": Bf16Codec,
    "fp8": lambda: BlockScaleCodec(torch.float8_e4m3fn),
    "int8": lambda: BlockScaleCodec(torch.int8),
}
