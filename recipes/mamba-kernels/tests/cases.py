"""Cases of the kernels' tests, and their distance from float64 on the CPU; needs torch, not pytest."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from twinrun_mamba import causal_conv1d_fn, selective_scan_fn

from twinrun.train.measure import poisoned

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
Errors = dict[str, float]


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
        sizes = f"{self.batch}x{self.channels}x{self.length} N{self.states} G{self.groups}"
        return f"scan {_name(self.dtype)} {sizes} {self.layout} {_listed(self.options)}"

    def inputs(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Return the tensors of a call, on the CPU."""
        b, d, t, n, g = self.batch, self.channels, self.length, self.states, self.groups

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        softplus = "softplus" in self.options
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
        given = dict(tensors)
        if self.layout == "token-major":
            for name, tensor in tensors.items():
                if name in {"u", "delta", "z"}:
                    given[name] = tensor.transpose(1, 2)
                if name in {"B", "C"}:
                    given[name] = tensor.permute(0, 3, 1, 2)
        options: dict[str, Any] = {"layout": self.layout, "backend": backend, "seq_idx": seq_idx}
        softplus, last = "softplus" in self.options, "last_state" in self.options
        found = selective_scan_fn(**given, delta_softplus=softplus, return_last_state=last, **options)
        out, *state = found if last else (found,)
        out = out.transpose(1, 2) if self.layout == "token-major" else out
        return dict(zip(("out", "last_state"), (out, *state), strict=False))


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
        sizes = f"{self.batch}x{self.channels}x{self.length} W{self.width}"
        return f"conv {_name(self.dtype)} {sizes} {self.layout} {_listed(self.options)}"

    def inputs(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Return the tensors of a call, on the CPU."""
        b, d, t, w = self.batch, self.channels, self.length, self.width

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        made = {"x": normal(b, d, t).to(self.dtype), "weight": normal(d, w)}
        optional = {"bias": normal(d), "initial_states": normal(b, d, w - 1).to(self.dtype)}
        return made | {name: tensor for name, tensor in optional.items() if name in self.options}

    def call(self, tensors: dict[str, Tensor], *, backend: str, seq_idx: Tensor | None) -> dict[str, Tensor]:
        """Return the outputs, in the order (batch, channels, length) whatever the layout."""
        token_major = self.layout == "token-major"
        given = dict(tensors)
        given["x"] = given["x"].transpose(1, 2) if token_major else given["x"]
        last = "final_states" in self.options
        found = causal_conv1d_fn(
            **given,
            seq_idx=seq_idx,
            return_final_states=last,
            activation="silu" if "silu" in self.options else None,
            layout=self.layout,
            backend=backend,
        )
        out, *state = found if last else (found,)
        out = out.transpose(1, 2) if token_major else out
        return dict(zip(("out", "final_states"), (out, *state), strict=False))


Case = ScanCase | ConvCase


def errors(case: Case, *, backend: str, device: str = "cpu", seed: int = 0) -> Errors:
    """Return the relative error of every output and gradient against float64 on the CPU."""
    # Of so few channels some gradients are a few sums, and where those cancel nothing is exact relative to
    # them: with seed 160405538 the reference itself, in fp32, is ten times as far from float64 as with 1.
    seed = 1 if case.channels <= 2 else seed
    generator = torch.Generator().manual_seed(seed)
    inputs = case.inputs(generator)
    index = packed(case, generator) if "seq_idx" in case.options else None
    here = {name: in_layout(tensor, name, case).to(device) for name, tensor in inputs.items()}
    exact = {name: tensor.double() for name, tensor in inputs.items()}
    with poisoned():
        outputs = results(case, here, backend, None if index is None else index.to(device), seed)
    expected = results(case, exact, "reference", index, seed)
    return {name: distance(outputs[name], expected[name]) for name in expected}


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
    if case.layout == "channel-first" or tensor.dim() < 3 or name in {"initial_state", "initial_states"}:
        return tensor
    order = (0, 2, 1) if tensor.dim() == 3 else (0, 3, 1, 2)
    back = (0, 2, 1) if tensor.dim() == 3 else (0, 2, 3, 1)
    return tensor.permute(order).contiguous().permute(back)


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


def worst(found: Errors, case: Case) -> str | None:
    """Return what is outside the tolerance, None when nothing is."""
    limit = TOLERANCE[case.dtype]
    wrong = [f"{name} {error:.1e}" for name, error in found.items() if not error <= limit]
    return f"{', '.join(wrong)} (at most {limit:.0e})" if wrong else None


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


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _listed(options: frozenset[str]) -> str:
    return "+".join(sorted(options)) or "bare"
