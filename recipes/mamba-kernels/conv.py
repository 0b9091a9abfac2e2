"""The causal convolution of one case: random inputs, float64 reference, least work."""

from __future__ import annotations

from typing import Any

import torch
from operation import Operation, exact
from ours import reference_conv
from torch import Tensor

from twinrun.protocol.bench import COPY, Work
from twinrun.train.bench import Session

# By phase: tensors like x that are read or written once, and products with the whole filter an element.
# Forward: x in, out. Backward: x and the output's gradient in, one gradient out; the filter is applied
# again, to the gradient, and summed into its own. Accumulated: the gradient that was there is read as well.
LEAST = {"forward": (2, 1), "backward": (3, 3), "accumulated": (5, 3)}
# An element's silu, or its derivative.
SPECIAL = 2


class Conv(Operation):
    """(batch, length, channels), a filter of `width` steps, with bias and silu."""

    name = "conv"
    title = "causal convolution"

    def __init__(self, session: Session, settings: dict[str, Any], dtype: torch.dtype) -> None:
        batch, channels, length = (settings[name] for name in ("batch", "channels", "length"))
        on = {"generator": session.generator, "device": session.device}

        def sequence() -> Tensor:
            if settings["token_major"]:
                return torch.randn(batch, length, channels, dtype=dtype, **on).transpose(1, 2)
            return torch.randn(batch, channels, length, dtype=dtype, **on)

        inputs = {"x": sequence(), **random_filter(channels, settings["width"], on)}
        super().__init__(inputs, sequence())
        expected = exact(reference_conv, self.inputs, self.gradient)
        # All of the case is compared; fp32 rounds far less than is allowed.
        self.expected = {name: tensor.float() for name, tensor in expected.items()}

    def work(self, phase: str, mode: str) -> Work:
        """Return the least work of a phase: every tensor once through memory."""
        counted = mode if mode == "accumulated" else phase
        sequences, filters = LEAST[counted]
        elements, width = self.gradient.numel(), self.inputs["weight"].shape[1]
        copied = sequences * self.gradient.nbytes + nbytes(self.inputs, "weight", "bias")
        amounts = {COPY: copied, "fp32": elements * filters * width, "exp2": SPECIAL * elements}
        return Work(formula=f"conv-{counted}", amounts=amounts)


def random_filter(channels: int, width: int, on: dict[str, Any]) -> dict[str, Tensor]:
    """Return weight and bias in fp32."""
    return {"weight": torch.randn(channels, width, **on), "bias": torch.randn(channels, **on)}


def nbytes(tensors: dict[str, Tensor], *names: str) -> int:
    """Return the bytes of the tensors with these names together."""
    return sum(tensors[name].nbytes for name in names)
