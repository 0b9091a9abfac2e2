"""Cases of the kernels' tests, and their distance from float64 on the CPU; needs torch, not pytest."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from twinrun_mamba import causal_conv1d_fn, selective_scan_fn

# Both grids as a whole, for both emulated backends; else every case of the shorter lengths for one of them.
WHOLE_GRID = os.environ.get("TWINRUN_WHOLE_GRID") == "1"
EMULATED_BACKENDS = ("emulated-32", "emulated-64")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# ||out - reference|| / ||reference||, for outputs and every gradient.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}
# Upstream's lengths, those that it comments out, and what lies beside a chunk or a vector.
SHORT = (1, 2, 3, 7, 8, 16, 31, 32, 33, 64, 65, 128, 130)
LENGTHS = (*SHORT, 151, 256, 372, 512, 784, 1024, 1134, 2048, 4096, 8192)
TESTED_LENGTHS = LENGTHS if WHOLE_GRID else SHORT
STATES = (1, 2, 4, 5, 8, 15, 16, 17, 32, 33, 64, 100, 128, 256)
CHANNELS = (1, 2, 3, 4, 31, 32, 33, 40, 64, 130)
SCAN_OPTIONS = frozenset({"D", "z", "delta_bias", "softplus", "initial_state", "last_state", "seq_idx"})
CONV_OPTIONS = frozenset({"bias", "silu", "initial_states", "final_states", "seq_idx"})
# What models train with; it has kernels of its own.
TRAINING_OPTIONS = frozenset({"bias", "silu"})


@dataclass(frozen=True)
class ScanCase:
    """One call of the scan."""

    dtype: torch.dtype
    batch: int = 2
    channels: int = 4
    length: int = 64
    states: int = 8
    groups: int = 1
    options: frozenset[str] = SCAN_OPTIONS - {"seq_idx"}
    layout: str = "channel-first"

    def __str__(self) -> str:
        return _named(self, f"scan N{self.states} G{self.groups}")

    def inputs(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Return the tensors of a call, on the CPU."""
        b, d, t, n, g = self.batch, self.channels, self.length, self.states, self.groups
        normal, softplus = partial(torch.randn, generator=generator), "softplus" in self.options
        made = {
            "u": normal(b, d, t).to(self.dtype),
            "delta": (normal(b, d, t) - 2 if softplus else normal(b, d, t).abs() / 4).to(self.dtype),
            "A": -torch.rand((d, n), generator=generator) * n - 0.05,
            "B": normal(b, g, n, t).to(self.dtype),
            "C": normal(b, g, n, t).to(self.dtype),
        }
        optional = {
            "D": normal(d),
            "z": normal(b, d, t).to(self.dtype),
            "delta_bias": normal(d) / 2 if softplus else normal(d).abs() / 4,
            "initial_state": normal(b, d, n),
        }
        return made | {name: tensor for name, tensor in optional.items() if name in self.options}

    def call(self, tensors: dict[str, Tensor], *, backend: str, seq_idx: Tensor | None) -> dict[str, Tensor]:
        """Return the outputs, in the order (batch, channels, length) whatever the layout."""
        softplus, last = "softplus" in self.options, "last_state" in self.options
        options: dict[str, Any] = {"backend": backend, "seq_idx": seq_idx, "delta_softplus": softplus}
        return _outputs(self, selective_scan_fn, tensors, "last_state", return_last_state=last, **options)


@dataclass(frozen=True)
class ConvCase:
    """One call of the convolution."""

    dtype: torch.dtype
    batch: int = 2
    channels: int = 8
    length: int = 64
    width: int = 4
    options: frozenset[str] = CONV_OPTIONS - {"seq_idx"}
    layout: str = "channel-first"

    def __str__(self) -> str:
        return _named(self, f"conv W{self.width}")

    def inputs(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Return the tensors of a call, on the CPU."""
        b, d, t, w = self.batch, self.channels, self.length, self.width
        normal = partial(torch.randn, generator=generator)
        made = {"x": normal(b, d, t).to(self.dtype), "weight": normal(d, w)}
        optional = {"bias": normal(d), "initial_states": normal(b, d, w - 1).to(self.dtype)}
        return made | {name: tensor for name, tensor in optional.items() if name in self.options}

    def call(self, tensors: dict[str, Tensor], *, backend: str, seq_idx: Tensor | None) -> dict[str, Tensor]:
        """Return the outputs, in the order (batch, channels, length) whatever the layout."""
        silu, last = "silu" if "silu" in self.options else None, "final_states" in self.options
        options: dict[str, Any] = {"backend": backend, "seq_idx": seq_idx, "activation": silu}
        return _outputs(self, causal_conv1d_fn, tensors, "final_states", return_final_states=last, **options)


Case = ScanCase | ConvCase


def _outputs(
    case: Case, function: Callable[..., Any], tensors: dict[str, Tensor], state: str, **options: Any
) -> dict[str, Tensor]:
    tokens = case.layout == "token-major"
    given = {name: _turned(tensor, name) for name, tensor in tensors.items()} if tokens else tensors
    found = function(**given, layout=case.layout, **options)
    out, *states = found if state in case.options else (found,)
    return dict(zip(("out", state), (out.transpose(1, 2) if tokens else out, *states), strict=False))


def _turned(tensor: Tensor, name: str) -> Tensor:
    """Return a view of a tensor in the order that tokens have."""
    if tensor.dim() < 3 or name in {"initial_state", "initial_states"}:
        return tensor
    return tensor.permute((0, 2, 1) if tensor.dim() == 3 else (0, 3, 1, 2))


def results(
    case: Case, tensors: dict[str, Tensor], backend: str, seq_idx: Tensor | None, seed: int
) -> dict[str, Tensor]:
    """Return outputs and, by `grad NAME`, the gradients of all tensors for fixed random output gradients."""
    given = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
    outputs = case.call(given, backend=backend, seq_idx=seq_idx)
    generator = torch.Generator().manual_seed(seed + 1)
    weights = []
    for output in outputs.values():
        random = torch.randn(tuple(output.shape), generator=generator)
        # Rounded as the gradient of the lower precision is, so that both see the same.
        weights.append(random.to(case.dtype).to(output.dtype).to(output.device))
    gradients = torch.autograd.grad(tuple(outputs.values()), tuple(given.values()), weights)
    named = {f"grad {name}": gradient for name, gradient in zip(given, gradients, strict=True)}
    return {name: output.detach() for name, output in outputs.items()} | named


def in_layout(tensor: Tensor, name: str, case: Case) -> Tensor:
    """Return a tensor with the memory order in which a user of the layout has it."""
    if case.layout == "channel-first" or (turned := _turned(tensor, name)) is tensor:
        return tensor
    return turned.contiguous().permute((0, 2, 1) if tensor.dim() == 3 else (0, 2, 3, 1))


def packed(case: Case, generator: torch.Generator) -> Tensor:
    """Return a seq_idx with boundaries at random places, one of them the second step where there is one."""
    starts = torch.rand((case.batch, case.length), generator=generator) < 3 / max(case.length, 6)
    starts[:, 1:2] = True
    starts[:, :1] = False
    return starts.cumsum(1).int()


def distance(found: Tensor, expected: Tensor) -> float:
    """Return ||found - expected|| / ||expected||; infinite where only one of them is zero or not finite."""
    assert found.shape == expected.shape, f"shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
    exact = found.detach().double().cpu()
    size, away = float(expected.norm()), float((exact - expected).norm())
    if away == 0:
        return 0.0
    return away / size if size > 0 and away < float("inf") else float("inf")


def scan_grid(lengths: tuple[int, ...] = LENGTHS) -> Iterator[ScanCase]:
    """Return the scan's cases: lengths with everything and nothing, then one thing changed at a time."""
    for dtype, length in itertools.product(DTYPES, lengths):
        case = ScanCase(dtype, length=length)
        yield from (case, replace(case, options=frozenset()), replace(case, options=SCAN_OPTIONS))
        yield replace(case, options=SCAN_OPTIONS, layout="token-major")
    for dtype in DTYPES:
        case = ScanCase(dtype, length=61)
        for option in sorted(SCAN_OPTIONS):
            yield replace(case, options=frozenset({option}))
            yield replace(case, options=SCAN_OPTIONS - {option})
        # Of 160 steps strips are vectors, also where a block has fewer channels than it could.
        for length in (61, 160):
            yield from (replace(case, length=length, channels=channels, states=16) for channels in CHANNELS)
        # The shorter one goes forward in one part, the longer one in five.
        for either in (case, replace(case, length=141)):
            yield from (replace(either, states=states, options=SCAN_OPTIONS) for states in STATES)
            yield from (replace(either, channels=c, groups=g) for c, g in ((4, 2), (4, 4), (66, 2), (96, 3)))
            yield from (
                replace(either, layout="token-major", channels=c, states=n) for c in (5, 40) for n in (16, 40)
            )


def conv_grid(lengths: tuple[int, ...] = LENGTHS) -> Iterator[ConvCase]:
    """Return the convolution's cases, made likewise."""
    for dtype, length, layout in itertools.product(DTYPES, lengths, ("channel-first", "token-major")):
        case = ConvCase(dtype, length=length, layout=layout)
        yield case
        yield from (
            replace(case, options=options) for options in (frozenset(), TRAINING_OPTIONS, CONV_OPTIONS)
        )
    for dtype, layout in itertools.product(DTYPES, ("channel-first", "token-major")):
        case = ConvCase(dtype, length=77, layout=layout)
        for option in sorted(CONV_OPTIONS):
            yield replace(case, options=frozenset({option}))
            yield replace(case, options=CONV_OPTIONS - {option})
        yield from (replace(case, width=width, options=CONV_OPTIONS) for width in range(2, 9))
        for length in (131, 132, 520):
            yield from (
                replace(case, length=length, width=width, options=TRAINING_OPTIONS) for width in range(2, 5)
            )
        # Two blocks share every row.
        yield replace(case, batch=1, channels=3, length=16384, options=TRAINING_OPTIONS)
        yield from (replace(case, channels=channels, options=CONV_OPTIONS) for channels in CHANNELS)
        # Through tokens, blocks of channels and a part of one.
        yield replace(case, batch=3, channels=264, length=131, options=TRAINING_OPTIONS)


def emulated(cases: Sequence[Any]) -> list[tuple[Any, str]]:
    """Return each case with an emulated backend, cases of a whole grid with both."""
    if WHOLE_GRID:
        return list(itertools.product(cases, EMULATED_BACKENDS))
    return list(zip(cases, itertools.cycle(EMULATED_BACKENDS), strict=False))


def _named(case: Case, kind: str) -> str:
    sizes, dtype = f"{case.batch}x{case.channels}x{case.length}", str(case.dtype).removeprefix("torch.")
    return f"{kind} {dtype} {sizes} {case.layout} {'+'.join(sorted(case.options)) or 'bare'}"
