"""Kernels repeat every bit while other processes keep the device busy, forward and backward."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator

import torch
from device import first_device, named
from torch import Tensor

NEEDS = ("torch", "mamba-kernels")
# On a processor kernels are emulated, and there is nothing that they share.
PASSES, PASSES_ON_CPU, OTHERS = 300, 2, 2
BUSY = """
import torch
a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
while True:
    for _ in range(50):
        a = (a @ a).tanh()
    a.float().sort()
    torch.cuda.synchronize()
"""

Call = Callable[..., Tensor]


def main() -> None:
    device = first_device()
    torch.manual_seed(0)
    on_gpu = device.type == "cuda"
    passes = PASSES if on_gpu else PASSES_ON_CPU
    others = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(OTHERS if on_gpu else 0)]
    try:
        for name, call, shapes in calls(on_gpu):
            inputs = [random(shape, dtype, device) for shape, dtype in shapes]
            first = outcome(call, inputs)
            differ = sum(not same(outcome(call, inputs), first) for _ in range(passes))
            beside = f" beside {OTHERS} busy processes" if on_gpu else ""
            print(f"{name} on {named(device)}{beside}: {passes - differ} of {passes} passes repeat every bit")
            if differ or any(other.poll() is not None for other in others):
                raise SystemExit(f"{name} does not repeat, or nothing else was running")
    finally:
        for other in others:
            other.kill()


def calls(on_gpu: bool) -> Iterator[tuple[str, Call, list[tuple[tuple[int, ...], torch.dtype]]]]:
    """Yield kernels with shapes and types of what they take."""
    from twinrun_mamba import causal_conv1d_fn, mamba_chunk_scan_combined, selective_scan_fn
    from twinrun_mamba.registry import code_objects, folder

    if not on_gpu and "cpu" not in code_objects(folder()):
        print(f"the kernels are for {', '.join(code_objects(folder()))}: nothing runs them here")
        return
    half, full = torch.bfloat16, torch.float32
    # Longer rows are cut into parts that are added up.
    batch, length, channels = (2, 1000, 256) if on_gpu else (1, 40, 32)
    backend = None if on_gpu else "emulated-64"
    row, projection = ((batch, channels, length), half), ((batch, 16, length), half)
    rates = ((channels, 16), full)

    def scan(u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        out: Tensor = selective_scan_fn(u, delta, -a.exp(), b, c, delta_softplus=True, backend=backend)
        return out

    def convolution(x: Tensor, weight: Tensor) -> Tensor:
        out: Tensor = causal_conv1d_fn(x, weight, activation="silu", backend=backend)
        return out

    yield "selective scan", scan, [row, row, rates, projection, projection]
    yield "causal convolution", convolution, [row, ((channels, 4), full)]
    if not on_gpu or not importlib.util.find_spec("triton"):
        return

    def ssd(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        out: Tensor = mamba_chunk_scan_combined(x, dt, -a.exp(), b, c, 128, dt_softplus=True)
        return out

    heads, states = ((batch, length, 8, 64), half), ((batch, length, 1, 64), half)
    yield "SSD", ssd, [heads, ((batch, length, 8), half), ((8,), full), states, states]
    if importlib.util.find_spec("twinrun_attention"):
        from twinrun_attention import flash_attn_func

        yield "attention", lambda q, k, v: flash_attn_func(q, k, v, causal=True), [heads] * 3


def random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(shape, device=device).to(dtype).requires_grad_()


def outcome(call: Call, inputs: list[Tensor]) -> list[Tensor]:
    """Return the output and the gradients of all inputs."""
    out = call(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, torch.ones_like(out))]


def same(found: list[Tensor], first: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, first, strict=True))


if __name__ == "__main__":
    main()
