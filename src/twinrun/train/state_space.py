"""Who computes the convolution and the scan of a state-space model; nothing falls back to somebody else.

Shape suffixes: B sequences, E channels, S tokens, T states, W width of the filter. Sequences are
(B, E, S) with channels or tokens adjacent in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu, softplus

from twinrun.foundation.errors import InputError, MachineError
from twinrun.train.attention import package

# Modules of the scan and of the convolution by the setting's name, and where they come from.
UPSTREAM = "mamba_ssm.ops.selective_scan_interface", "causal_conv1d", "install mamba_ssm and causal_conv1d"
OURS = "twinrun_mamba", "twinrun_mamba", 'name them in recipe.toml: kernels = ["mamba-kernels"]'
PACKAGES = {"ours": OURS, "upstream": UPSTREAM}


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
    if name == "reference":
        return Kernels(convolve, scan, lambda _: None)
    if name not in PACKAGES:
        message, allowed = "a state-space model needs kernels", (*PACKAGES, "reference")
        raise InputError(message, place="kernels", found=name, allowed=allowed)
    *modules, hint = PACKAGES[name]
    told = {"found": name, "allowed": "kernels that are installed, or kernels=reference", "hint": hint}
    scans, convolutions = (package(one, place="kernels", **told) for one in modules)

    def forward_scan(*tensors: Tensor) -> Tensor:
        out: Tensor = scans.selective_scan_fn(*tensors, delta_softplus=True)
        return out

    def forward_convolution(x_BES: Tensor, weight_EW: Tensor, bias_E: Tensor) -> Tensor:
        out: Tensor = convolutions.causal_conv1d_fn(x_BES, weight_EW, bias_E, activation="silu")
        return out

    @cache
    def check(device: torch.device) -> None:
        ours = name == "ours"
        if scans.describe(device)["backend"] == "reference" if ours else device.type != "cuda":
            message = "these kernels would not run here, or in operations of torch, slowly"
            hint = "TWINRUN_MAMBA_BACKEND=emulated-32 runs our kernels themselves on a processor"
            told = {"found": f"{name} on {device}", "allowed": "a GPU, or kernels=reference", "hint": hint}
            raise MachineError(message, place="kernels", **told)

    if name == "ours":
        return Kernels(forward_convolution, forward_scan, check)
    # Bound by pybind, which torch.compile cannot look into; the scan copies what is token-major.
    untraced = torch.compiler.disable
    layouts = ("channel-first",)
    return Kernels(untraced(forward_convolution), untraced(forward_scan), check, layouts, traced=False)


def convolve(x_BES: Tensor, weight_EW: Tensor, bias_E: Tensor) -> Tensor:
    """Return SiLU of the causal convolution in operations of torch."""
    channels, width = weight_EW.shape
    weight_E1W, bias_E = weight_EW[:, None].to(x_BES.dtype), bias_E.to(x_BES.dtype)
    out_BES = conv1d(x_BES, weight_E1W, bias_E, padding=width - 1, groups=channels)
    return silu(out_BES[..., : x_BES.shape[2]])


def scan(u_BES: Tensor, delta_BES: Tensor, A_ET: Tensor, B_BTS: Tensor, *rest: Tensor) -> Tensor:
    """Return the gated scan in operations of torch, fp32, one token after the other; see `Kernels.scan`."""
    C_BTS, D_E, z_BES, bias_E = rest
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
