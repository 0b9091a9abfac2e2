"""Mamba-2's SSD of one case: random inputs, float64 reference of some heads, least work."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from operation import Function, Operation, exact, random_step_bias
from torch import Tensor
from twinrun_mamba.ssd.reference import reference_chunk_scan

from twinrun.protocol.bench import COPY, Work
from twinrun.train.bench import Session

# Heads that are compared, chosen anew each run: every state of each is kept in float64.
CHECKED_HEADS = 2
# Largest decay at initialisation, as Mamba-2's authors choose it.
LARGEST_DECAY = 16.0
BY_HEAD = ("A", "D", "dt_bias")

# By phase: tensors like x that are read or written once, tensors like B, tensors like dt.
# Forward: x, z, out. Backward: x, z and the output's gradient in, two gradients out.
# Accumulated: the gradients that were there are read as well.
LEAST = {"forward": (3, 2, 1), "backward": (5, 4, 2), "accumulated": (7, 6, 3)}


class Ssd(Operation):
    """(batch, length, heads, head size) with D, z, dt_bias and softplus; groups share B and C."""

    name = "ssd"
    title = "SSD"

    def __init__(self, session: Session, settings: dict[str, Any], dtype: torch.dtype) -> None:
        self._chunk_size, heads = settings["chunk"], settings["heads"]
        inputs = self._random(session, settings, dtype)
        shape = inputs["x"].shape
        gradient = torch.randn(shape, dtype=dtype, generator=session.generator, device=session.device)
        super().__init__(inputs, gradient)
        picked = torch.randperm(heads, generator=session.generator, device=session.device)
        self._heads_chosen = picked[:CHECKED_HEADS].sort()[0]
        self._groups = self._heads_chosen // (heads // settings["groups"])
        self.chosen = (slice(None), slice(None), self._heads_chosen)
        chosen = {name: self.compared(name, tensor) for name, tensor in self.inputs.items()}
        self.expected = exact(self._reference, chosen, self.gradient[self.chosen])

    def bound(self, function: Function) -> Function:
        """Return the function with the chunk size of the case."""
        return partial(function, chunk_size=self._chunk_size)

    def work(self, phase: str, mode: str) -> Work:
        """Return the least work of a phase: every tensor once through memory.

        The products of matrices are not counted: how many there are is the implementation's choice.
        """
        counted = mode if mode == "accumulated" else phase
        amounts = (self.gradient.nbytes, self.inputs["B"].nbytes, self.inputs["dt"].nbytes)
        copied = sum(count * amount for count, amount in zip(LEAST[counted], amounts, strict=True))
        return Work(formula=f"ssd-{counted}", amounts={COPY: copied})

    def _reference(self, **tensors: Tensor) -> Tensor:
        own = {name: tensors[name][:, :, self._groups] for name in ("B", "C")}
        return reference_chunk_scan(**tensors | own, dt_softplus=True)[0]

    def _random(self, session: Session, settings: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
        """Return inputs distributed as in a Mamba-2 at its initialisation."""
        on = {"generator": session.generator, "device": session.device}
        names = ("batch", "length", "heads", "head_size")
        batch, length, heads, size = (settings[name] for name in names)
        projection = (batch, length, settings["groups"], settings["states"])
        return {
            "x": torch.randn(batch, length, heads, size, dtype=dtype, **on),
            "dt": 0.5 * torch.randn(batch, length, heads, dtype=dtype, **on),
            "A": -1 - (LARGEST_DECAY - 1) * torch.rand(heads, **on),
            "B": torch.randn(projection, dtype=dtype, **on),
            "C": torch.randn(projection, dtype=dtype, **on),
            "D": torch.randn(heads, **on),
            "z": torch.randn(batch, length, heads, size, dtype=dtype, **on),
            "dt_bias": random_step_bias(heads, on),
        }

    def compared(self, name: str, tensor: Tensor) -> Tensor:
        """Return the chosen heads of an input or its gradient; all share B and C."""
        if name in {"B", "C"}:
            return tensor
        return tensor[self._heads_chosen] if name in BY_HEAD else tensor[self.chosen]
