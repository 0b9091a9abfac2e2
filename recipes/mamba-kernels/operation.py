"""What the benchmarked operations have in common: inputs, a float64 reference, modes of calling them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from twinrun.protocol.bench import Work
from twinrun.train.bench import CheckedCall
from twinrun.train.measure import distance, kept_bytes, poisoned

Function = Callable[..., Tensor]
"""An implementation, which takes the inputs by name."""

# By phase, what can be timed of it. `kernels`: the device's part, with what training keeps. `inference`:
# likewise, and nothing is kept. `accumulated`: `out.backward(gradient)` onto gradients that are there.
# `call`: from call to call, the host's part included.
MODES = {
    "forward": ("kernels", "inference", "call"),
    "backward": ("kernels", "accumulated", "call"),
    "step": ("kernels", "call"),
}
# Smallest and largest step size at initialisation, as Mamba's authors choose them.
STEP_SIZES = (1e-3, 1e-1)


@dataclass(frozen=True)
class CheckedFunction:
    """An implementation, compared with the reference on the inputs of one operation."""

    implementation: str
    version: str
    function: Function
    distances: dict[str, dict[str, float]]
    kept_bytes: int | None
    """None of what has no backward pass."""

    def call(self, operation: Operation, phase: str, mode: str) -> CheckedCall:
        """Return what is timed of it."""
        return CheckedCall(
            implementation=self.implementation,
            version=self.version,
            call=operation.call(self.function, phase, mode),
            errors=self.distances[phase],
            kept_bytes=self.kept_bytes if (phase, mode) == ("forward", "kernels") else None,
        )


class Operation:
    """One operation at one shape in one dtype; subclasses say which."""

    name: str
    title: str
    phases: Sequence[str] = ("forward", "backward")
    chosen: Any = ...
    """What of output and gradient is compared, as an index; all where a subclass says nothing."""
    expected: dict[str, Tensor]
    """The reference's output and gradients of that."""

    def __init__(self, inputs: dict[str, Tensor], gradient: Tensor) -> None:
        self.inputs = inputs
        self.gradient = gradient

    def work(self, phase: str, mode: str) -> Work:
        """Return the least work of a phase."""
        raise NotImplementedError

    def distances(self, function: Function) -> dict[str, dict[str, float]]:
        """Return by phase how far the output, and of each input the gradient, is from the reference."""
        # Inputs that are shared get gradients from everywhere: only what is compared may give any.
        masked = torch.zeros_like(self.gradient)
        masked[self.chosen] = self.gradient[self.chosen]
        out, gradients = self._outcome(function, masked)
        backward = {name: self.compared(name, tensor) for name, tensor in gradients.items()}
        forward = distances_of({"out": out[self.chosen]}, self.expected)
        return {"forward": forward, "backward": distances_of(backward, self.expected)}

    def compared(self, name: str, tensor: Tensor) -> Tensor:
        """Return what of an input or its gradient is compared."""
        return tensor

    def bound(self, function: Function) -> Function:
        """Return a function with what it takes beside tensors."""
        return function

    def check(self, function: Function, implementation: str, version: str) -> CheckedFunction:
        """Compare an implementation with the reference, before anything is timed."""
        function = self.bound(function)
        return CheckedFunction(
            implementation, version, function, self.distances(function), self.kept_bytes(function)
        )

    def measured(self, modes: Sequence[str]) -> list[tuple[str, str]]:
        """Return phases with the modes of them that are among `modes`."""
        return [(phase, mode) for phase in self.phases for mode in MODES[phase] if mode in modes]

    def leaves(self) -> dict[str, Tensor]:
        """Return the inputs as leaves of their own, whose gradients nobody else adds to."""
        return {name: tensor.detach().requires_grad_() for name, tensor in self.inputs.items()}

    def kept_bytes(self, function: Function) -> int | None:
        """Return what a forward call keeps for the backward one, None where there is none."""
        if "backward" not in self.phases:
            return None
        leaves = self.leaves()
        return kept_bytes(lambda: function(**leaves), leaves.values())

    def call(self, function: Function, phase: str, mode: str) -> Callable[[], object]:
        """Return what is timed."""
        if phase == "step" or mode == "inference":
            return torch.no_grad()(lambda: function(**self.inputs))
        leaves = self.leaves()
        if phase == "forward":
            return lambda: function(**leaves)
        out = function(**leaves)
        if mode == "accumulated":
            return lambda: out.backward(self.gradient, retain_graph=True)
        return lambda: torch.autograd.grad(out, list(leaves.values()), self.gradient, retain_graph=True)

    def _outcome(self, function: Function, gradient: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return output and gradients by name, in memory that was poisoned."""
        leaves = self.leaves()
        with poisoned():
            out = function(**leaves)
            gradients = torch.autograd.grad(out, list(leaves.values()), gradient)
        return out.detach(), dict(zip(leaves, gradients, strict=True))


def random_step_bias(count: int, on: dict[str, Any]) -> Tensor:
    """Return biases that softplus makes step sizes of, as Mamba is initialised."""
    low, high = (torch.tensor(size, device=on["device"]).log() for size in STEP_SIZES)
    steps = torch.exp(low + (high - low) * torch.rand(count, **on))
    # The inverse of softplus.
    return steps + torch.log(-torch.expm1(-steps))


def exact(function: Function, inputs: dict[str, Tensor], gradient: Tensor) -> dict[str, Tensor]:
    """Return output and gradients of `function` in float64, from the very inputs that were rounded."""
    leaves = {name: tensor.double().requires_grad_() for name, tensor in inputs.items()}
    out = function(**leaves)
    gradients = torch.autograd.grad(out, list(leaves.values()), gradient.double())
    return {"out": out.detach(), **dict(zip(leaves, gradients, strict=True))}


def distances_of(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Return the relative distance of each tensor."""
    return {name: distance(tensor, expected[name]) for name, tensor in found.items()}
