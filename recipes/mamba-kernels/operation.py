"""What the benchmarked operations have in common: inputs, a float64 reference, and the ways to call them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twinrun.benchmark import Work
from twinrun.train.bench import Call, Candidate, Session, distance, kept_bytes, poisoned

Function = Callable[..., Tensor]
"""An implementation, which takes the inputs by name."""

# By phase, what can be timed of it. `kernels`: the device's part, with what training keeps. `inference`:
# likewise, and nothing is kept. `accumulated`: `out.backward(gradient)` onto gradients that are there.
# `call`: from call to call, the host's part included.
WAYS = {
    "forward": ("kernels", "inference", "call"),
    "backward": ("kernels", "accumulated", "call"),
    "step": ("kernels", "call"),
}


@dataclass(frozen=True)
class Contender:
    """An implementation, and what it does to the inputs of one operation."""

    implementation: str
    version: str
    function: Function
    distances: dict[str, dict[str, float]]
    kept_bytes: int | None

    def candidate(self, operation: Operation, phase: str, way: str) -> Candidate:
        """Return what is timed of it."""
        return Candidate(
            implementation=self.implementation,
            version=self.version,
            call=operation.call(self.function, phase, way),
            errors=self.distances[phase],
            kept_bytes=self.kept_bytes if (phase, way) == ("forward", "kernels") else None,
        )


class Operation:
    """One operation at one shape in one element type; subclasses say which."""

    name: str
    title: str
    phases: Sequence[str] = ("forward", "backward")

    def __init__(self, session: Session, inputs: dict[str, Tensor], gradient: Tensor) -> None:
        self.inputs = inputs
        self.gradient = gradient
        self._device = session.device

    def work(self, phase: str, way: str) -> Work:
        """Return the least work of a phase."""
        raise NotImplementedError

    def distances(self, function: Function) -> dict[str, dict[str, float]]:
        """Return by phase how far the output, and of each input the gradient, is from the reference."""
        raise NotImplementedError

    def check(self, function: Function, implementation: str, version: str) -> Contender:
        """Compare an implementation with the reference, before anything is timed."""
        return Contender(
            implementation, version, function, self.distances(function), self.kept_bytes(function)
        )

    def measurements(self, ways: Sequence[str]) -> list[tuple[str, str]]:
        """Return phases with the ways of them that are among `ways`."""
        return [(phase, way) for phase in self.phases for way in WAYS[phase] if way in ways]

    def leaves(self) -> dict[str, Tensor]:
        """Return the inputs as leaves of their own, whose gradients nobody else adds to."""
        return {name: tensor.detach().requires_grad_() for name, tensor in self.inputs.items()}

    def kept_bytes(self, function: Function) -> int | None:
        """Return what a forward call keeps for the backward one, None where there is none."""
        if "backward" not in self.phases:
            return None
        leaves = self.leaves()
        return kept_bytes(lambda: function(**leaves), self._device)

    def call(self, function: Function, phase: str, way: str) -> Call:
        """Return what is timed."""
        if phase == "step" or way == "inference":
            return torch.no_grad()(lambda: function(**self.inputs))
        leaves = self.leaves()
        if phase == "forward":
            return lambda: function(**leaves)
        out = function(**leaves)
        if way == "accumulated":
            return lambda: out.backward(self.gradient, retain_graph=True)
        return lambda: torch.autograd.grad(out, list(leaves.values()), self.gradient, retain_graph=True)

    def _outcome(self, function: Function, gradient: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return output and gradients by name, in memory that was poisoned."""
        leaves = self.leaves()
        with poisoned():
            out = function(**leaves)
            gradients = torch.autograd.grad(out, list(leaves.values()), gradient)
        return out.detach(), dict(zip(leaves, gradients, strict=True))


def exact(function: Function, inputs: dict[str, Tensor], gradient: Tensor) -> dict[str, Tensor]:
    """Return output and gradients of `function` in float64, from the very inputs that were rounded."""
    leaves = {name: tensor.double().requires_grad_() for name, tensor in inputs.items()}
    out = function(**leaves)
    gradients = torch.autograd.grad(out, list(leaves.values()), gradient.double())
    return {"out": out.detach(), **dict(zip(leaves, gradients, strict=True))}


def distances_of(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Return the relative distance of each tensor."""
    return {name: distance(tensor, expected[name]) for name, tensor in found.items()}
