"""What a small call costs from Python: through the entry in C++, without it, and in a CUDA graph.

`python recipes/mamba-kernels/tools/calls.py --help` lists the options.
A line for each call: microseconds of wall time a call, the median of several runs of calls back to back.
Small calls wait for Python, not for the GPU, so this is what the entry saves where no graph is captured. Exit
code 2 when it could not start.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels" / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "kernels/entry/src"))
from cases import TRAINING_OPTIONS, Case, ConvCase, ScanCase
from gpu_grid import device_of
from twinrun_entry import entry
from twinrun_mamba import causal_conv1d_update, describe, selective_state_update
from twinrun_mamba.launch import BACKENDS
from twinrun_mamba.registry import ArchitectureError
from twinrun_mamba.validation import ArgumentError

Call = Callable[[], object]
RUNS = 7


def small_calls(backend: str, device: str) -> Iterator[tuple[str, Call]]:
    """Go through calls by name: forward, with the backward pass, and the steps of decoding."""
    generator = torch.Generator().manual_seed(0)
    scan = ScanCase(torch.bfloat16, 1, 64, 64, 16)
    conv = ConvCase(torch.bfloat16, 1, 64, 64, 4, TRAINING_OPTIONS)
    cases: tuple[tuple[str, Case], ...] = (("scan", scan), ("convolution", conv))
    for name, case in cases:
        tensors = {key: one.to(device) for key, one in case.inputs(generator).items()}
        yield f"{name} forward", partial(case.call, tensors, backend=backend, seq_idx=None)
        trained = {key: one.clone().requires_grad_() for key, one in tensors.items()}
        yield f"{name} forward and backward", partial(there_and_back, case, trained, backend)
    x, weight = torch.randn(1, 64, device=device), torch.randn(64, 4, device=device)
    state, window = torch.zeros(1, 64, 16, device=device), torch.zeros(1, 64, 4, device=device)
    rates, projection = -torch.rand(64, 16, device=device), torch.randn(1, 16, device=device)
    yield "convolution step", partial(causal_conv1d_update, x, window, weight, backend=backend)
    step = (state, x, x.abs(), rates, projection, projection)
    yield "scan step", partial(selective_state_update, *step, backend=backend)


def there_and_back(case: Case, tensors: dict[str, Tensor], backend: str) -> object:
    """Return the gradients of what a case is called with."""
    out = case.call(tensors, backend=backend, seq_idx=None)["out"]
    return torch.autograd.grad(out, tuple(tensors.values()), torch.ones_like(out), allow_unused=True)


def microseconds(call: Call, count: int, finish: Call) -> float:
    """Return wall time a call, of `count` calls back to back: the median of RUNS."""
    found = []
    for _ in range(RUNS + 1):
        started = time.perf_counter()
        for _ in range(count):
            call()
        finish()
        found.append((time.perf_counter() - started) / count * 1e6)
    # The first run plans, and reads code.
    return statistics.median(found[1:])


def captured(call: Call) -> Call:
    """Return what repeats a call as a CUDA graph."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    replay: Call = graph.replay
    return replay


def main(arguments: Sequence[str] | None = None) -> int:
    """Time every call each way; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", type=device_of, default="cuda:0")
    parser.add_argument("--backend", default="native", choices=BACKENDS)
    parser.add_argument("--count", type=int, default=300, help="calls back to back")
    given = parser.parse_args(arguments)
    try:
        backend, path = describe(given.device, given.backend), entry.build()
    except (ArchitectureError, ArgumentError, entry.EntryError) as error:
        parser.error(str(error))
    print(f"torch {torch.__version__}, {backend}; us a call: entry, Python, graph")
    on_gpu = torch.device(given.device).type == "cuda"
    finish: Call = torch.cuda.synchronize if on_gpu else bool
    for name, call in small_calls(given.backend, given.device):
        entry.load(path)
        found = [microseconds(call, given.count, finish)]
        entry.unload()
        found.append(microseconds(call, given.count, finish))
        if on_gpu and "backward" not in name:
            found.append(microseconds(captured(call), given.count, finish))
        print(f"{name}: {', '.join(f'{one:.1f}' for one in found)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
