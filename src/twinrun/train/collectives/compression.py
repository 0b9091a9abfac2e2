"""Codecs of gradients: bytes for values, fewer than the values have, and what is lost given back later."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from twinrun.foundation.errors import MachineError

# Values that share a scale: long enough that the scale is 1.6 % of the bytes, short enough that one large
# value costs few others their digits.
BLOCK = 256
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
    """Eight bits a value under one fp32 scale a block; integers, or floats of eight bits."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._whole = not dtype.is_floating_point
        self._most = float(torch.iinfo(dtype).max if self._whole else torch.finfo(dtype).max)

    def bytes_of(self, count: int) -> int:
        blocks = -(-count // BLOCK)
        return blocks * (BLOCK + 4)

    def encode(self, values: Tensor) -> Tensor:
        payload = values.new_empty(self.bytes_of(values.numel()), dtype=torch.uint8)
        blocks = payload.numel() // (BLOCK + 4)
        padded = pad(values.float(), (0, blocks * BLOCK - values.numel())).view(blocks, BLOCK)
        scales = (padded.abs().amax(dim=1, keepdim=True) / self._most).clamp(min=LEAST_SCALE)
        scaled = padded / scales
        digits = payload[: blocks * BLOCK].view(self._dtype).view(blocks, BLOCK)
        digits.copy_(scaled.round() if self._whole else scaled)
        payload[blocks * BLOCK :].view(torch.float32).copy_(scales.view(-1))
        return payload

    def decode(self, payload: Tensor, count: int) -> Tensor:
        blocks = payload.numel() // (BLOCK + 4)
        digits = payload[: blocks * BLOCK].view(self._dtype).view(blocks, BLOCK)
        scales = payload[blocks * BLOCK :].view(torch.float32)
        return (digits.float() * scales[:, None]).view(-1)[:count]


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
