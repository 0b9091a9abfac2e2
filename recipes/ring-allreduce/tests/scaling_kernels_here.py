"""Runs the kernels in Triton's interpreter, which TRITON_INTERPRET=1 chooses; prints nothing when right."""

from __future__ import annotations

import itertools

import scaling_kernels
import torch
from compression import BLOCK, LEAST_SCALE, BlockScaleCodec
from torch import Tensor

# From one value to blocks of two programs, the last one whole or not.
COUNTS = (1, 255, 256, 257, 9 * BLOCK, 9 * BLOCK + 100)
DTYPES = (torch.int8, torch.float8_e4m3fn)


def wide(count: int) -> Tensor:
    """Return values from below the smallest scale to large ones."""
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, generator=generator) * 10 ** torch.linspace(-34, 6, count)


def sums_are_those_of_the_processor() -> None:
    for dtype, count, plus, feedback in itertools.product(DTYPES, COUNTS, (False, True), (False, True)):
        codec, values = BlockScaleCodec(dtype), wide(count)
        coming = codec.encode(values.flip(0)) if plus else None
        losses = [torch.linspace(-0.1, 0.1, count) if feedback else None for _ in range(2)]
        expected = codec.encode(values, plus=coming, lost=losses[0])
        found = torch.full_like(expected, 7)
        digits, scales = codec._parts(found)
        second = None if coming is None else codec._parts(coming)
        limits = {"most": codec._most, "least": LEAST_SCALE}
        scaling_kernels.encode(digits, scales, values, plus=second, lost=losses[1], **limits)
        context = f"{dtype}, {count} values, plus={plus}, feedback={feedback}"
        assert torch.equal(found, expected), context
        decoded = torch.empty(count)
        scaling_kernels.decode(decoded, digits, scales)
        assert torch.equal(decoded, codec.decode(expected, count)), context
        if losses[0] is not None and losses[1] is not None:
            torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=1e-6, msg=context)


def every_float_of_eight_bits_is_itself() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    # The two codes of no number are made of none.
    codes[[0x7F, 0xFF]] = 0
    digits, ones = codes.view(1, BLOCK).view(torch.float8_e4m3fn), torch.ones(1)
    values, again, scale = torch.empty(BLOCK), torch.empty_like(digits), torch.empty(1)
    scaling_kernels.decode(values, digits, ones)
    assert torch.equal(values, digits.float().view(-1))
    scaling_kernels.encode(again, scale, values, plus=None, lost=None, most=448.0, least=LEAST_SCALE)
    assert torch.equal(again.float(), digits.float())


def what_is_no_number_stays_none() -> None:
    for bad, dtype in itertools.product((torch.nan, torch.inf, -torch.inf), DTYPES):
        values = torch.ones(600)
        values[300] = bad
        digits, scales, found = torch.empty(3, BLOCK, dtype=dtype), torch.empty(3), torch.empty(600)
        most = BlockScaleCodec(dtype)._most
        scaling_kernels.encode(digits, scales, values, plus=None, lost=None, most=most, least=LEAST_SCALE)
        scaling_kernels.decode(found, digits, scales)
        assert not torch.isfinite(found[300])
        torch.testing.assert_close(found[:256], torch.ones(256))


if __name__ == "__main__":
    sums_are_those_of_the_processor()
    every_float_of_eight_bits_is_itself()
    what_is_no_number_stays_none()
