"""Who computes the convolution and the scan of a state-space model; nothing falls back to somebody else.

Shape suffixes: B sequences, E channels, S tokens, T states, W width of the filter. Sequences are
(B, E, S) with channels or tokens adjacent in memory.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu, softplus

from twinrun.foundation.errors import InputError, MachineError

NAMES = ("ours", "upstream", "reference")


class Kernels(NamedTuple):
    """The two operations, and what they ask of their caller."""

    convolve: Callable[..., Tensor]
    """Causal convolution, then SiLU, of x (B, E, S) with weight (E, W) and bias (E)."""
    scan: Callable[..., Tensor]
    """Selective scan of u, delta (B, E, S), A (E, T), B, C (B, T, S), D (E), z (B, E, S), bias (E)."""
    check: Callable[[torch.device], None]
    """Raises MachineError where they would not run, or not at their speed."""
    layouts: tuple[str, ...] = ("token-major", "channel-first")
    traced: bool = True
    """Whether torch.compile sees them as operations of one graph."""


def chosen(name: str | None) -> Kernels:
    """Return the kernels of a recipe's setting; raises InputError, or MachineError where a package lacks."""
    if name == "ours":
        return _ours()
    if name == "upstream":
        return _upstream()
    if name == "reference":
        return Kernels(convolve, scan, lambda _: None)
    raise InputError("a state-space model needs kernels", place="kernels", found=name, allowed=NAMES)


def _ours() -> Kernels:
    package = _package("twinrun_mamba", "ours", 'name them in recipe.toml: kernels = ["mamba-kernels"]')

    def forward_scan(*tensors: Tensor) -> Tensor:
        out: Tensor = package.selective_scan_fn(*tensors, delta_softplus=True)
        return out

    def forward_convolution(x_BES: Tensor, weight_EW: Tensor, bias_E: Tensor) -> Tensor:
        out: Tensor = package.causal_conv1d_fn(x_BES, weight_EW, bias_E, activation="silu")
        return out

    @cache
    def check(device: torch.device) -> None:
        backend = package.describe(device)["backend"]
        if backend == "reference":
            raise MachineError(
                "the kernels would compute in operations of torch, slowly",
                place="kernels",
                found=f"ours on {device}",
                allowed="a GPU, or kernels=reference",
                hint="TWINRUN_MAMBA_BACKEND=emulated-32 runs the kernels themselves on a processor",
            )

    return Kernels(forward_convolution, forward_scan, check)


def _upstream() -> Kernels:
    hint = "install mamba_ssm and causal_conv1d"
    scans = _package("mamba_ssm.ops.selective_scan_interface", "upstream", hint)
    convolutions = _package("causal_conv1d", "upstream", hint)

    # Bound by pybind, which torch.compile cannot look into.
    @torch.compiler.disable
    def forward_scan(*tensors: Tensor) -> Tensor:
        out: Tensor = scans.selective_scan_fn(*tensors, delta_softplus=True)
        return out

    @torch.compiler.disable
    def forward_convolution(x_BES: Tensor, weight_EW: Tensor, bias_E: Tensor) -> Tensor:
        out: Tensor = convolutions.causal_conv1d_fn(x_BES, weight_EW, bias_E, activation="silu")
        return out

    def check(device: torch.device) -> None:
        if device.type != "cuda":
            raise MachineError(
                "upstream's kernels run on a GPU", place="kernels", found=f"upstream on {device}"
            )

    # The scan copies what is token-major.
    return Kernels(forward_convolution, forward_scan, check, layouts=("channel-first",), traced=False)


def _package(name: str, kernels: str, hint: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MachineError(
            f"cannot import {name}: {error}",
            place="kernels",
            found=kernels,
            allowed="kernels that are installed, or kernels=reference",
            hint=hint,
        ) from None


def convolve(x_BES: Tensor, weight_EW: Tensor, bias_E: Tensor) -> Tensor:
    """Return SiLU of the causal convolution in operations of torch."""
    channels, width = weight_EW.shape
    weight_E1W, bias_E = weight_EW[:, None].to(x_BES.dtype), bias_E.to(x_BES.dtype)
    out_BES = conv1d(x_BES, weight_E1W, bias_E, padding=width - 1, groups=channels)
    return silu(out_BES[..., : x_BES.shape[2]])


def scan(  # noqa: PLR0917 - in the order of the kernels' functions
    u_BES: Tensor,
    delta_BES: Tensor,
    A_ET: Tensor,
    B_BTS: Tensor,
    C_BTS: Tensor,
    D_E: Tensor,
    z_BES: Tensor,
    bias_E: Tensor,
) -> Tensor:
    """Return the gated scan in operations of torch, fp32, one token after the other."""
    u, b_BTS, c_BTS = u_BES.float(), B_BTS.float(), C_BTS.float()
    step_BES = softplus(delta_BES.float() + bias_E[:, None])
    decay_BETS = torch.exp(step_BES[:, :, None] * A_ET[..., None])
    entering_BETS = (step_BES * u)[:, :, None] * b_BTS[:, None]
    state_BET = torch.zeros_like(decay_BETS[..., 0])
    states = []
    for decay_BET, entering_BET in zip(decay_BETS.unbind(-1), entering_BETS.unbind(-1), strict=True):
        state_BET = decay_BET * state_BET + entering_BET
        states.append(state_BET)
    read_BES = (torch.stack(states, dim=-1) * c_BTS[:, None]).sum(2) + u * D_E[:, None]
    return (read_BES * silu(z_BES.float())).to(u_BES.dtype)
