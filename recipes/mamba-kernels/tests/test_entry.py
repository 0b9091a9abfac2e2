"""The compiled entry repeats what the Python path did: the same bits, errors and gradients."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import calls
import pytest
import torch
import twinrun_mamba
from cases import (
    CONV_OPTIONS,
    EMULATED_BACKENDS,
    SCAN_OPTIONS,
    TRAINING_OPTIONS,
    Case,
    ConvCase,
    ScanCase,
    in_layout,
    packed,
    results,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from twinrun_entry import entry, recording
from twinrun_entry.entry import OBJECTS, EntryError
from twinrun_mamba import (
    ArgumentError,
    causal_conv1d_fn,
    causal_conv1d_update,
    conv,
    drivers,
)
from twinrun_mamba.drivers import Cuda, Gpu, Hip, LaunchError
from twinrun_mamba.launch import Launcher
from twinrun_mamba.registry import CodeObject, Kernel
from twinrun_mamba.targets import cpu_compiler

SCAN = ScanCase(torch.bfloat16, 2, 40, 70, 16, 1)
CONV = ConvCase(torch.bfloat16, 2, 8, 64, 4, TRAINING_OPTIONS)
CASES: tuple[Case, ...] = (
    SCAN,
    replace(SCAN, options=frozenset()),
    replace(SCAN, layout="token-major"),
    replace(SCAN, dtype=torch.float32, channels=66, groups=2),
    # In parts of time, of several state tiles.
    replace(SCAN, batch=1, length=300, states=40),
    CONV,
    replace(CONV, layout="token-major"),
    replace(CONV, options=CONV_OPTIONS - {"seq_idx"}),
    replace(CONV, dtype=torch.float32, length=37, width=3),
)


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The entry, in a cache of the tests' own."""
    with pytest.MonkeyPatch.context() as changed:
        changed.delenv(OBJECTS, raising=False)
        changed.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        try:
            return entry.build()
        except EntryError as error:
            pytest.skip(str(error))


@pytest.fixture
def native(compiled: Path) -> Iterator[Any]:
    """Use the entry, with no plans; memory is not filled, which would not be repeated."""
    recording.poisoned = False
    yield entry.load(compiled)
    entry.unload()


@pytest.fixture
def python(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that the Python path has started."""
    started: list[str] = []
    start = Launcher.__call__

    def watched(self: Launcher, name: str, *rest: Any, **options: Any) -> None:
        started.append(name)
        start(self, name, *rest, **options)

    monkeypatch.setattr(Launcher, "__call__", watched)
    return started


def tensors_of(case: Case, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: in_layout(tensor, name, case) for name, tensor in case.inputs(generator).items()}


@pytest.mark.parametrize("backend", EMULATED_BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits_are_those_of_the_python_path(
    case: Case, backend: str, compiled: Path, native: Any, python: list[str]
) -> None:
    entry.unload()
    expected = [results(case, tensors_of(case, seed), backend, None, seed) for seed in range(3)]
    entry.load(compiled)
    # The first call writes down how it goes forward, the second how it goes back.
    for _ in range(2):
        results(case, tensors_of(case), backend, None, 0)
    python.clear()
    for seed, exact in enumerate(expected):
        found = results(case, tensors_of(case, seed), backend, None, seed)
        assert all(torch.equal(found[name], tensor) for name, tensor in exact.items()), seed
        assert {name: tensor.stride() for name, tensor in found.items()} == {
            name: tensor.stride() for name, tensor in exact.items()
        }
    # Gradients through tokens come with times adjacent here, which are copied.
    assert not [name for name in python if case.layout == "channel-first" or "forward" in name]


@pytest.mark.parametrize("case", [SCAN, CONV], ids=str)
def test_without_gradients(case: Case, native: Any, python: list[str]) -> None:
    tensors = tensors_of(case)
    calls = [case.call(tensors, backend=EMULATED_BACKENDS[0], seq_idx=None) for _ in range(3)]
    assert len(python) == len(set(python))
    assert all(torch.equal(calls[0][name], tensor) for name, tensor in calls[2].items())
    assert not any(tensor.requires_grad for tensor in calls[2].values())


@pytest.mark.parametrize("steps", [1, 3])
def test_updates_change_the_state(steps: int, native: Any, python: list[str]) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 8, steps, generator=generator)
    weight, first = torch.randn(8, 4, generator=generator), torch.randn(2, 8, 4, generator=generator)
    found = []
    for backend in ("reference", *EMULATED_BACKENDS[:1] * 3):
        state = first.clone()
        out = causal_conv1d_update(x, state, weight, None, "silu", backend=backend)
        found.append((out, state))
    assert len(python) == 1
    for out, state in found[1:]:
        torch.testing.assert_close((out, state), found[0], rtol=1e-5, atol=1e-5)


def test_other_sizes_strides_and_options_are_other_calls(native: Any, python: list[str]) -> None:
    tensors, backend = tensors_of(CONV), EMULATED_BACKENDS[0]
    x, weight, bias = tensors["x"], tensors["weight"], tensors["bias"]
    calls: list[tuple[Tensor, str | None]] = [
        (x, "silu"),
        (x, None),
        (x[..., :40].contiguous(), "silu"),
        (x.transpose(1, 2).contiguous().transpose(1, 2), "silu"),
        # Starts at another place of an access of 16 bytes.
        (torch.cat([x.flatten(), x.flatten()])[1 : 1 + x.numel()].view(x.shape), "silu"),
    ]
    for number, (values, activation) in enumerate(calls, 1):
        for _ in range(2):
            found = causal_conv1d_fn(values, weight, bias, activation=activation, backend=backend)
        expected = causal_conv1d_fn(values, weight, bias, activation=activation, backend="reference")
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
        assert len(python) == number


def test_what_copies_or_looks_at_values_goes_through_python(native: Any, python: list[str]) -> None:
    backend, tensors = EMULATED_BACKENDS[0], tensors_of(CONV)
    apart = torch.stack([tensors["x"], tensors["x"]], -1)[..., 0]
    for number in range(1, 4):
        tensors["x"] = apart + 0 * apart
        tensors["x"] = torch.stack([apart, apart], -1)[..., 0]
        CONV.call(tensors, backend=backend, seq_idx=None)
        assert len(python) == number
    case = replace(SCAN, options=SCAN_OPTIONS)
    index = packed(case, torch.Generator().manual_seed(0))
    for _ in range(2):
        case.call(tensors_of(case), backend=backend, seq_idx=index)
    with pytest.raises(ArgumentError, match="seq_idx: found values that decrease"):
        case.call(tensors_of(case), backend=backend, seq_idx=index.flip(1))


def test_one_tensor_given_twice_is_not_written_down(native: Any, python: list[str]) -> None:
    tensors = tensors_of(SCAN)
    twice = tensors | {"C": tensors["B"]}
    expected = SCAN.call(twice, backend="reference", seq_idx=None)["out"]
    for given in (twice, twice, tensors, tensors, twice):
        found = SCAN.call(given, backend=EMULATED_BACKENDS[0], seq_idx=None)["out"]
    # The third with one tensor twice goes by what was written down of two.
    assert python.count("scan_forward_bf16") == 3
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


def test_wrong_arguments_stay_wrong(native: Any) -> None:
    tensors = tensors_of(SCAN)
    for _ in range(2):
        SCAN.call(tensors, backend=EMULATED_BACKENDS[0], seq_idx=None)
    for name, wrong in (("delta", tensors["delta"].float()), ("A", tensors["A"][:3]), ("u", 3.0)):
        with pytest.raises(ArgumentError, match=f"^{name}: found"):
            SCAN.call(tensors | {name: wrong}, backend=EMULATED_BACKENDS[0], seq_idx=None)


def test_checkpointing_computes_again(native: Any) -> None:
    backend = EMULATED_BACKENDS[0]

    def run(again: bool) -> Tensor:
        given = {name: tensor.requires_grad_() for name, tensor in tensors_of(CONV).items()}

        def call(x: Tensor) -> Tensor:
            return CONV.call(given | {"x": x}, backend=backend, seq_idx=None)["out"]

        out = checkpoint(call, given["x"], use_reentrant=False) if again else call(given["x"])
        out.square().sum().backward()
        assert given["weight"].grad is not None
        return given["weight"].grad

    exact = run(again=False)
    assert all(torch.equal(run(again), exact) for again in (True, False, True, True))


def test_a_tensor_changed_since_is_an_error(native: Any) -> None:
    for _ in range(2):
        given = {name: tensor.requires_grad_() for name, tensor in tensors_of(CONV).items()}
        out = CONV.call(given, backend=EMULATED_BACKENDS[0], seq_idx=None)["out"]
        with torch.no_grad():
            given["weight"].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_a_graph_that_ends_lets_go_of_what_it_kept(native: Any) -> None:
    for _ in range(3):
        tensors = {name: tensor.requires_grad_() for name, tensor in tensors_of(SCAN).items()}
        seen = [weakref.ref(tensor) for tensor in tensors.values()]
        out = SCAN.call(tensors, backend=EMULATED_BACKENDS[0], seq_idx=None)
        out["out"].float().sum().backward(retain_graph=True)
        out["out"].float().sum().backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            out["last_state"].sum().backward()
        del tensors, out
        gc.collect()
        assert [ref() for ref in seen] == [None] * len(seen)


def test_a_compiler_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(entry, "compiler", lambda: None)
    with pytest.raises(EntryError, match=r"needs a C\+\+17 compiler, found none"):
        entry.build()
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    with pytest.raises(EntryError, match=r"needs Python\.h, not in .*python3-dev"):
        entry.build()


@pytest.mark.parametrize("variable", ["XDG_CACHE_HOME", OBJECTS, None])
def test_it_is_in_use_where_it_was_compiled(variable: str | None, compiled: Path, tmp_path: Path) -> None:
    path = f"{Path(twinrun_mamba.__file__).parents[1]}:{Path(entry.__file__).parents[1]}"
    code = "from twinrun_mamba import describe; print(describe('cpu', 'reference')['calls'])"
    places = {"XDG_CACHE_HOME": compiled.parents[1], OBJECTS: compiled.parent, None: tmp_path}
    environment = {"PYTHONPATH": path, variable or "XDG_CACHE_HOME": str(places[variable])}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == ("entry\n" if variable else "python\n")


def test_small_calls_are_timed_with_it_and_without(
    compiled: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(entry, "build", lambda: compiled)
    monkeypatch.setattr(calls, "RUNS", 1)
    recording.poisoned = False
    assert calls.main(["--device", "cpu", "--backend", EMULATED_BACKENDS[0], "--count", "1"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.endswith("us a call: entry, Python, graph")
    assert [line.partition(":")[0] for line in lines] == [
        "scan forward",
        "scan forward and backward",
        "convolution forward",
        "convolution forward and backward",
        "convolution step",
        "scan step",
    ]
    assert all(float(number) > 0 for line in lines for number in line.partition(":")[2].split(","))
    assert entry.in_use.native is None


class Summed(torch.autograd.Function):  # type: ignore[misc]
    """Sums, in bf16, whose gradient is made of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, times: int) -> Tensor:
        found = recording.converted(recording.summed(x, (0,)), torch.bfloat16)
        if recording.local.active is not None:
            recording.local.active.kept = (found,)
        ctx.save_for_backward(found)
        ctx.shape = x.shape
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (found,) = ctx.saved_tensors
        return (gradient * found).float().expand(ctx.shape), None, None


def of_summed(gradient: Tensor, found: Tensor, x: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    return (gradient * found).float().expand(x.shape), None, None


def test_operations_of_torch_and_kept_results_are_repeated(native: Any) -> None:
    summed, outs = entry.Operation(Summed.apply, of_summed), []
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        x = torch.randn(3, 5, generator=generator).requires_grad_()
        out = summed(x, 0.5, 2)
        (gradient,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
        assert torch.equal(out, x.sum(0).bfloat16())
        assert torch.equal(gradient, out.float().expand(3, 5))
        outs.append(out)
    assert [out.grad_fn.name() for out in outs] == ["SummedBackward", *["RepeatedCallBackward"] * 3]
    seen = weakref.ref(outs.pop())
    with torch.no_grad():
        outs[-1].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outs[-1].sum().backward()
    del out
    assert seen() is None, "a result holds itself"


class Launched(ctypes.Structure):
    """What stub_driver.c was asked for last."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("function", "context", "stream", "overlaps")),
        ("sizes", ctypes.c_int64 * 7),
        ("fields", ctypes.c_int64 * 7),
    )


# The driver, then the context in which it starts the last kernel, and whether that overlaps the one before.
DRIVERS = [(Cuda, 0x7E57C0FFEE, 1), (Hip, 0, 0)]


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    """Both vendors' drivers in place of the machine's."""
    compiler, path = cpu_compiler(), tmp_path / "libcuda.so.1"
    if compiler is None:
        pytest.skip("needs a C compiler")
    compiler.run("-x", "c", "-shared", "-fPIC", "-O1", Path(__file__).with_name("stub_driver.c"), "-o", path)
    library = ctypes.CDLL(str(path))
    monkeypatch.setattr("ctypes.CDLL", lambda name: library)
    monkeypatch.setattr(drivers, "_loaded", str)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0x57EA3, raising=False)
    return library


@pytest.mark.parametrize(("driver", "context", "overlaps"), DRIVERS)
def test_a_driver_is_asked_for_the_same(
    driver: Callable[[], Gpu],
    context: int,
    overlaps: int,
    stub: ctypes.CDLL,
    compiled: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    python: list[str],
) -> None:
    image = tmp_path / "code"
    image.write_bytes(b"code")
    kernels = {f"conv_{name}": Kernel(128, 4096, 0, image) for name in ("forward_small_bf16", "reduce")}
    kernels["conv_backward_aligned_bf16"] = Kernel(128, 0, 0, image)
    launcher = Launcher(CodeObject("sm_90", image, kernels, overlaps=True), driver(), 0)
    monkeypatch.setattr(conv, "launcher", lambda backend, device: launcher)
    recording.poisoned = False
    entry.load(compiled)
    try:
        asked, case = [], replace(CONV, batch=16, length=1024)
        for _ in range(4):
            results(case, tensors_of(case), "native", None, 0)
            last = Launched.in_dll(stub, "launched")
            fields = (last.function, last.context, last.stream, last.overlaps, *last.sizes, *last.fields[4:])
            asked.append((ctypes.c_int.in_dll(stub, "launches").value, *fields))
        backward = ["conv_backward_aligned_bf16", "conv_reduce"]
        assert python == ["conv_forward_small_bf16", *backward, *backward]
        assert [launches for launches, *_ in asked] == [3, 6, 9, 12]
        assert asked[0][1:] == asked[1][1:] == asked[2][1:] == asked[3][1:]
        assert asked[0][1:5] == (len("conv_reduce"), context, 0x57EA3, overlaps)
        ctypes.c_int.in_dll(stub, "status").value = 700
        with pytest.raises(LaunchError, match=r"refused by the stub \(700\)"):
            case.call(tensors_of(case), backend="native", seq_idx=None)
    finally:
        entry.unload()
