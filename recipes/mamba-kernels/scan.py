"""The selective scan of one case: random inputs, float64 reference of some channels, least work."""

from __future__ import annotations

from typing import Any

import torch
from operation import Operation, exact, random_step_bias
from ours import reference_scan
from torch import Tensor

from twinrun.protocol.bench import COPY, Work
from twinrun.train.bench import Session

# Channels that are compared; every channel is computed alike, and they are chosen anew each run.
CHECKED_CHANNELS = 64

# By phase: tensors like u that are read or written once, tensors like B, fp32 instructions for a state
# element, and special functions for an element beside one exponential for each of its states.
# Forward: u, delta, z, out; two products and two sums; softplus, its logarithm a polynomial, with one special
# function and silu with two.
# Backward: also the output's gradient in and three gradients out; 11 products and sums and, counted in
# compiled code, 6 slots for the sums over channels; the derivatives' two special functions.
# Accumulated: the gradients that were there are read as well.
LEAST = {"forward": (4, 2, 4, 3), "backward": (7, 4, 17, 5), "accumulated": (10, 6, 17, 5)}


class Scan(Operation):
    """(batch, length, channels, states) with D, z, delta_bias and softplus; groups share B and C."""

    name = "scan"
    title = "selective scan"

    def __init__(self, session: Session, settings: dict[str, Any], dtype: torch.dtype) -> None:
        names = ("batch", "channels", "length", "states", "groups")
        self._batch, self._channels, self._length, self._states, self._groups = map(settings.get, names)
        inputs = self._random(session, dtype)
        shape = inputs["u"].shape
        gradient = torch.randn(shape, dtype=dtype, generator=session.generator, device=session.device)
        super().__init__(inputs, gradient)
        self._channels_chosen = self._choose(session)
        self.chosen = (slice(None), self._channels_chosen)
        chosen = {name: self.compared(name, tensor) for name, tensor in self.inputs.items()}
        self.expected = exact(reference_scan, chosen, self.gradient[self.chosen])

    def work(self, phase: str, mode: str) -> Work:
        """Return the least work of a phase: every tensor once through memory, states in registers."""
        counted = mode if mode == "accumulated" else phase
        sequences, projections, instructions, special = LEAST[counted]
        elements = self.gradient.numel()
        copied = sequences * self.gradient.nbytes + projections * self.inputs["B"].nbytes
        parameters = 4 * self._channels * (self._states + 2)
        amounts = {
            COPY: copied + parameters,
            "fp32": elements * self._states * instructions,
            "exp2": elements * (self._states + special),
        }
        return Work(formula=f"scan-{counted}", amounts=amounts)

    def _random(self, session: Session, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return inputs distributed as in a Mamba at its initialisation."""
        on = {"generator": session.generator, "device": session.device}
        sequence = (self._batch, self._channels, self._length)
        projection = (self._batch, self._groups, self._states, self._length)
        decays = torch.arange(1, self._states + 1, device=session.device)
        return {
            "u": torch.randn(sequence, dtype=dtype, **on),
            "delta": 0.5 * torch.randn(sequence, dtype=dtype, **on),
            "A": -decays * (1 + 0.1 * torch.rand(self._channels, self._states, **on)),
            "B": torch.randn(projection, dtype=dtype, **on),
            "C": torch.randn(projection, dtype=dtype, **on),
            "D": torch.randn(self._channels, **on),
            "z": torch.randn(sequence, dtype=dtype, **on),
            "delta_bias": random_step_bias(self._channels, on),
        }

    def _choose(self, session: Session) -> Tensor:
        """Return channels to compare: as many of each group, anywhere in it."""
        size = self._channels // self._groups
        count = min(size, CHECKED_CHANNELS // self._groups)
        on = {"generator": session.generator, "device": session.device}
        picked = [torch.randperm(size, **on)[:count].sort()[0] for _ in range(self._groups)]
        return torch.cat([group * size + one for group, one in enumerate(picked)])

    def compared(self, name: str, tensor: Tensor) -> Tensor:
        """Return the chosen channels of an input or its gradient; all share B and C."""
        if name in {"B", "C"}:
            return tensor
        return tensor[self.chosen] if tensor.dim() == 3 else tensor[self._channels_chosen]
