"""What compilers and autograd see: opcheck, whole-graph compilation, the fused block, autocast."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from cases import (
    CONV_OPTIONS,
    DTYPES,
    EMULATED_BACKENDS,
    SCAN_OPTIONS,
    Case,
    ConvCase,
    ScanCase,
    packed,
    results,
)
from torch import Tensor
from twinrun_mamba import mamba_inner_fn, selective_scan_fn, selective_state_update

OPS = torch.ops.twinrun_mamba


def varied(whole: frozenset[str]) -> list[tuple[torch.dtype, frozenset[str]]]:
    """Every dtype with all options and with none, and each option left out for one of them."""
    ends = list(itertools.product(DTYPES, (frozenset(), whole)))
    return [*ends, *((torch.float32, whole - {option}) for option in sorted(whole))]


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> None:
    """The number of compiled versions of one function is limited."""
    torch._dynamo.reset()


def given(case: Case) -> tuple[dict[str, Tensor], Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    inputs = {name: tensor.requires_grad_() for name, tensor in case.inputs(generator).items()}
    return inputs, packed(case, generator) if "seq_idx" in case.options else None


def scan_arguments(case: ScanCase, backend: str) -> tuple[Any, ...]:
    inputs, index = given(case)
    names = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias", "initial_state")
    return (*map(inputs.get, names), index, "softplus" in case.options, True, backend)


@pytest.mark.parametrize(("dtype", "options"), varied(SCAN_OPTIONS))
def test_opcheck_of_the_scan(dtype: torch.dtype, options: frozenset[str]) -> None:
    arguments = scan_arguments(ScanCase(dtype, 2, 4, 9, 4, 2, options), "reference")
    torch.library.opcheck(OPS.scan_forward.default, arguments)
    out, last, checkpoints = OPS.scan_forward(*arguments)
    tensors = tuple(None if t is None else t.detach() for t in arguments[:10])
    backward = (torch.ones_like(out), torch.ones_like(last), checkpoints.detach(), *tensors, arguments[10])
    torch.library.opcheck(OPS.scan_backward.default, (*backward, "reference"))


@pytest.mark.parametrize(("dtype", "options"), varied(CONV_OPTIONS))
def test_opcheck_of_the_convolution(dtype: torch.dtype, options: frozenset[str]) -> None:
    inputs, index = given(ConvCase(dtype, 2, 4, 9, 4, options))
    tensors = (inputs["x"], inputs["weight"], inputs.get("bias"), inputs.get("initial_states"), index)
    arguments = (*tensors, "silu" in options, "final_states" in options, "reference")
    torch.library.opcheck(OPS.conv_forward.default, arguments)
    held = [None if t is None else t.detach() for t in tensors]
    last = torch.ones(2, 4, 3, dtype=dtype) if "final_states" in options else None
    backward = (torch.ones_like(inputs["x"]), last, *held, "silu" in options, "reference")
    torch.library.opcheck(OPS.conv_backward.default, backward)


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck_of_the_update(dtype: torch.dtype) -> None:
    past, rows = torch.tensor([3, 5], dtype=torch.int32), torch.tensor([1, 0], dtype=torch.int32)
    x, states = torch.randn(2, 4, 2).to(dtype), torch.randn(3, 4, 5).to(dtype)
    for state, *given in ((states[:2].clone(), None, None), (states, past, rows)):
        arguments = (x, state, torch.randn(4, 3), torch.randn(4), *given, True, "reference")
        torch.library.opcheck(OPS.conv_update.default, arguments)


@pytest.mark.parametrize(
    ("dtype", "layout", "backend"),
    [
        (torch.float32, "channel-first", "reference"),
        (torch.float16, "channel-first", EMULATED_BACKENDS[0]),
        (torch.bfloat16, "token-major", EMULATED_BACKENDS[0]),
    ],
)
def test_compiled_as_one_graph(dtype: torch.dtype, layout: str, backend: str) -> None:
    scan = ScanCase(dtype, 2, 4, 9, 4, 2, SCAN_OPTIONS, layout)
    for case in (scan, ConvCase(dtype, 2, 4, 9, 4, CONV_OPTIONS, layout)):
        inputs, index = given(case)
        eager = results(case, inputs, backend, index, 0)
        compiled = torch.compile(case.call, fullgraph=True, backend="aot_eager")
        outputs = compiled(inputs, backend=backend, seq_idx=index)
        generator = torch.Generator().manual_seed(1)
        weights = [torch.randn(t.shape, generator=generator).to(dtype).to(t.dtype) for t in outputs.values()]
        gradients = torch.autograd.grad(tuple(outputs.values()), tuple(inputs.values()), weights)
        for name, found in zip(eager, (*outputs.values(), *gradients), strict=True):
            assert torch.equal(found, eager[name]), name


@pytest.mark.parametrize("backend", ["reference", EMULATED_BACKENDS[0]])
def test_compiled_state_update(backend: str) -> None:
    x, projection, state = torch.randn(2, 4), torch.randn(2, 8), torch.randn(2, 4, 8)
    given, kept = (x, x.abs(), -torch.rand(4, 8), projection, projection, torch.randn(4)), state.clone()
    eager = selective_state_update(kept, *given, backend=backend)
    compiled = torch.compile(selective_state_update, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(state, *given, backend=backend), eager)
    assert torch.equal(state, kept)


def test_inductor_keeps_the_layouts_that_kernels_promise() -> None:
    case = ScanCase(torch.float32, 2, 4, 9, 4, 1, SCAN_OPTIONS, "token-major")
    inputs, index = given(case)

    def block(tensors: dict[str, Tensor]) -> Tensor:
        doubled = {name: tensor * 2 for name, tensor in tensors.items()}
        return case.call(doubled, backend=EMULATED_BACKENDS[0], seq_idx=index)["out"].cos().sum()

    wanted = torch.autograd.grad(block(inputs), tuple(inputs.values()))
    found = torch.autograd.grad(torch.compile(block, fullgraph=True)(inputs), tuple(inputs.values()))
    torch.testing.assert_close(found, wanted)


def test_only_the_last_state_has_a_gradient() -> None:
    inputs, _ = given(ScanCase(torch.float32, 1, 3, 8, 2))
    _, last = selective_scan_fn(**inputs, delta_softplus=True, return_last_state=True)
    found = torch.autograd.grad(last.sum(), [inputs[name] for name in ("u", "A", "initial_state")])
    assert all(bool(gradient.any()) for gradient in found)
    (of_c,) = torch.autograd.grad(selective_scan_fn(**inputs, return_last_state=True)[1].sum(), inputs["C"])
    assert not of_c.any()


def inner(generator: torch.Generator, **other: Tensor) -> dict[str, Tensor]:
    """The arguments of a small block, all options on."""
    batch, channels, length, states, rank, features, width = 2, 6, 11, 3, 2, 5, 4
    shapes: dict[str, tuple[int, ...]] = {
        "xz": (batch, 2 * channels, length),
        "conv1d_weight": (channels, 1, width),
        "x_proj_weight": (rank + 2 * states, channels),
        "delta_proj_weight": (channels, rank),
        "out_proj_weight": (features, channels),
        "out_proj_bias": (features,),
        "A": (channels, states),
    }
    shapes |= dict.fromkeys(("conv1d_bias", "D", "delta_bias", "dt_rms_weight"), (channels,))
    shapes |= dict.fromkeys(("B_proj_bias", "C_proj_bias", "b_rms_weight", "c_rms_weight"), (states,))
    normal = partial(torch.randn, generator=generator, dtype=torch.float64)
    made = {name: normal(shape) for name, shape in shapes.items()}
    made["A"] = -made["A"].abs()
    return {name: tensor.requires_grad_() for name, tensor in (made | other).items()}


@pytest.mark.parametrize("norms", [False, True])
def test_block_recomputes_what_it_composes(norms: bool) -> None:
    arguments = inner(torch.Generator().manual_seed(0))
    if not norms:
        arguments = {name: tensor for name, tensor in arguments.items() if "rms" not in name}
    index = torch.tensor([[0] * 4 + [1] * 7, [0] * 11])
    tensors = tuple(arguments.values())
    for packing in (None, index):
        outs = [mamba_inner_fn(**arguments, checkpoint_lvl=level, seq_idx=packing) for level in (0, 1)]
        torch.testing.assert_close(*outs)
        torch.testing.assert_close(*(torch.autograd.grad(out.cos().sum(), tensors) for out in outs))


def test_block_keeps_less_than_what_it_composes() -> None:
    arguments = inner(torch.Generator().manual_seed(0))
    kept = []
    for level in (0, 1):
        sizes: dict[int, int] = {}

        def keep(tensor: Tensor, sizes: dict[int, int] = sizes) -> Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            mamba_inner_fn(**arguments, checkpoint_lvl=level)
        kept.append(sum(sizes.values()))
    assert kept[1] < kept[0]


def test_block_gradients() -> None:
    arguments = inner(torch.Generator().manual_seed(1))

    def run(*tensors: Tensor) -> Tensor:
        return mamba_inner_fn(**dict(zip(arguments, tensors, strict=True)))

    assert torch.autograd.gradcheck(run, tuple(arguments.values()), fast_mode=True)


# Dynamo itself does what this warns of.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_block_compiled_as_one_graph() -> None:
    arguments = inner(torch.Generator().manual_seed(2))
    tensors = tuple(arguments.values())
    wanted = mamba_inner_fn(**arguments)
    found = torch.compile(mamba_inner_fn, fullgraph=True, backend="aot_eager")(**arguments)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(out.sum(), tensors) for out in (found, wanted)))


def test_block_under_autocast() -> None:
    arguments = {name: t.detach().float().requires_grad_() for name, t in inner(torch.Generator()).items()}
    wanted = mamba_inner_fn(**arguments)
    with torch.autocast("cpu", torch.bfloat16):
        for level in (0, 1):
            found = mamba_inner_fn(**arguments, checkpoint_lvl=level, backend=EMULATED_BACKENDS[0])
            assert found.dtype == torch.bfloat16
            torch.testing.assert_close(found.float(), wanted, rtol=0.1, atol=0.3)
    gradients = torch.autograd.grad(found.sum(), tuple(arguments.values()))
    assert {gradient.dtype for gradient in gradients} == {torch.float32}
