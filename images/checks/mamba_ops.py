"""The Mamba kernels that are baked in give what their reference gives, which is what the equations say."""

from __future__ import annotations

from collections.abc import Callable

import torch
from device import first_device, named
from torch import Tensor
from torch.nn.functional import conv1d, silu, softplus
from twinrun_mamba import causal_conv1d_fn, describe, selective_scan_fn
from twinrun_mamba.registry import code_objects, folder

NEEDS = ("torch", "mamba-kernels")
BATCH, CHANNELS, STATES, LENGTH, WIDTH = 2, 32, 16, 96, 4
TOLERANCE = 1e-4

Operation = Callable[[list[Tensor], str], Tensor]


def main() -> None:
    device = first_device()
    torch.manual_seed(0)
    compare("selective scan", scan, scan_inputs(device), scan_equations)
    compare("causal convolution", convolution, convolution_inputs(device), convolution_equations)


def compare(
    name: str, operation: Operation, inputs: list[Tensor], equations: Callable[[list[Tensor]], Tensor]
) -> None:
    """End the check when the reference is not the equations, or a kernel's values or gradients not its."""
    device = inputs[0].device
    weight = torch.randn_like(inputs[0])
    expected = with_gradients(operation, inputs, weight, "reference")
    judge(f"{name}, reference on {named(device)}", [expected[0]], [equations(inputs)])
    for backend in backends(device):
        found = with_gradients(operation, inputs, weight, backend)
        judge(f"{name}, {backend} {describe(device, backend)['arch']} on {named(device)}", found, expected)


def judge(name: str, found: list[Tensor], expected: list[Tensor]) -> None:
    pairs = zip(found, expected, strict=True)
    error = max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)
    print(f"{name}: relative error {error:.1e}")
    if not error <= TOLERANCE:
        raise SystemExit(f"{name} is wrong, tolerance {TOLERANCE:g}")


def backends(device: torch.device) -> tuple[str, ...]:
    """Return what runs the kernels here: the GPU, or the emulator in warps as wide as either vendor's."""
    if device.type == "cuda":
        return ("native",)
    if "cpu" in code_objects(folder()):
        return ("emulated-32", "emulated-64")
    print(f"the kernels are for {', '.join(code_objects(folder()))}: nothing runs them here")
    return ()


def with_gradients(operation: Operation, inputs: list[Tensor], weight: Tensor, backend: str) -> list[Tensor]:
    leaves = [part.detach().clone().requires_grad_() for part in inputs]
    output = operation(leaves, backend)
    (output * weight).sum().backward()
    return [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def scan(inputs: list[Tensor], backend: str) -> Tensor:
    output: Tensor = selective_scan_fn(*inputs, delta_softplus=True, backend=backend)
    return output


def scan_inputs(device: torch.device) -> list[Tensor]:
    """Return u, delta, A, B, C and D."""
    u, delta = torch.randn(2, BATCH, CHANNELS, LENGTH, device=device)
    a = -torch.rand(CHANNELS, STATES, device=device) - 0.1
    b, c = torch.randn(2, BATCH, STATES, LENGTH, device=device)
    return [u, delta, a, b, c, torch.randn(CHANNELS, device=device)]


def scan_equations(inputs: list[Tensor]) -> Tensor:
    """Return the scan one time step after the other, in double precision."""
    u, delta, a, b, c, d = (part.double() for part in inputs)
    delta = softplus(delta)
    state = torch.zeros(BATCH, CHANNELS, STATES, dtype=torch.float64, device=u.device)
    outputs = []
    for step in range(LENGTH):
        kept = torch.exp(delta[:, :, step, None] * a)
        state = kept * state + (delta * u)[:, :, step, None] * b[:, None, :, step]
        outputs.append((state * c[:, None, :, step]).sum(-1) + d * u[:, :, step])
    return torch.stack(outputs, -1).float()


def convolution(inputs: list[Tensor], backend: str) -> Tensor:
    output: Tensor = causal_conv1d_fn(*inputs, activation="silu", backend=backend)
    return output


def convolution_inputs(device: torch.device) -> list[Tensor]:
    """Return x, the weight and the bias."""
    x = torch.randn(BATCH, CHANNELS, LENGTH, device=device)
    return [x, torch.randn(CHANNELS, WIDTH, device=device), torch.randn(CHANNELS, device=device)]


def convolution_equations(inputs: list[Tensor]) -> Tensor:
    """Return PyTorch's own convolution of each channel, in double precision."""
    x, weight, bias = (part.double() for part in inputs)
    return silu(conv1d(x, weight[:, None], bias, padding=WIDTH - 1, groups=CHANNELS)[..., :LENGTH]).float()


if __name__ == "__main__":
    main()
