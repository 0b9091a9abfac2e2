"""One step of the causal convolution: random inputs, float64 reference, least work."""

from __future__ import annotations

from typing import Any

import torch
from conv import SPECIAL, nbytes, random_filter
from operation import Function, Operation, distances_of
from torch.nn.functional import silu

from twinrun.protocol.bench import COPY, Work
from twinrun.train.bench import Session
from twinrun.train.measure import poisoned


class Update(Operation):
    """(batch, channels): one new step behind a state of `width` steps, which moves on in place."""

    name = "update"
    title = "convolution"
    phases = ("step",)

    def __init__(self, session: Session, settings: dict[str, Any], dtype: torch.dtype) -> None:
        batch, channels, width = (settings[name] for name in ("batch", "channels", "width"))
        on = {"generator": session.generator, "device": session.device}
        inputs = {
            "x": torch.randn(batch, channels, dtype=dtype, **on),
            "conv_state": torch.randn(batch, channels, width, dtype=dtype, **on),
            **random_filter(channels, width, on),
        }
        super().__init__(inputs, torch.empty(0))

    def work(self, phase: str, mode: str) -> Work:
        """Return the least work of a step: x and the state in, the output and the state out."""
        elements, width = self.inputs["x"].numel(), self.inputs["weight"].shape[1]
        copied = 2 * nbytes(self.inputs, "x", "conv_state") + nbytes(self.inputs, "weight", "bias")
        amounts = {COPY: copied, "fp32": elements * width, "exp2": SPECIAL * elements}
        return Work(formula="conv-step", amounts=amounts)

    def distances(self, function: Function) -> dict[str, dict[str, float]]:
        """Return the relative distances of the output and of the state."""
        real = {name: tensor.double() for name, tensor in self.inputs.items()}
        seen = torch.cat([real["conv_state"], real["x"].unsqueeze(-1)], -1)[..., 1:]
        given = self.inputs | {"conv_state": self.inputs["conv_state"].clone()}
        with poisoned():
            out = function(**given)
        expected = {"out": silu((seen * real["weight"]).sum(-1) + real["bias"]), "conv_state": seen}
        return {"step": distances_of({"out": out, "conv_state": given["conv_state"]}, expected)}
