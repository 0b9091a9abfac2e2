"""Time SSD's kernels with other launch options than the table's, and print rows for `ssd/tuning.csv`.

`python recipes/mamba-kernels/tools/tune_ssd.py --help` lists the options.
Each kernel is tried alone, all others keep their row. A choice whose results are not those of the table, or
that the device has no room for, gives no time. The last lines say for each kernel the best row, and its share
of the time of the table's row, the mean over the shapes. It runs where Triton runs: on a GPU, or in its
interpreter.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "kernels" / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "kernels/entry/src"))
from compare_upstream_ssd import DTYPES, SHAPES, Compared, SsdShape, ours, results
from gpu_grid import device_of
from twinrun_mamba.ssd import launch, tuning
from twinrun_mamba.ssd.tuning import LaunchOptions

from twinrun.foundation.files import write_atomically
from twinrun.train.measure import distance

EDGES, WARPS, STAGES = (32, 64, 128), (4, 8), (1, 2, 3, 4)
BLOCKS = ("block_m", "block_k", "block_n")
# Blocks that a kernel does not look at.
UNUSED = {"chunk_states": "block_m", "product_gradients": "block_n"}
# Relative distance from the results of the table's row: another order of the same sums.
ALLOWED = {"bf16": 1e-2, "fp16": 2e-3, "fp32": 1e-5}
RUNS = 5
Run = Callable[[], list[Tensor]]


def choices(row: LaunchOptions) -> Iterator[LaunchOptions]:
    """Return a kernel's row, and what may be in its place."""
    yield row
    edges = [(getattr(row, name),) if UNUSED.get(row.kernel) == name else EDGES for name in BLOCKS]
    for *blocks, warps, stages in product(*edges, WARPS, STAGES):
        sizes = dict(zip(BLOCKS, blocks, strict=True))
        other = dataclasses.replace(row, **sizes, num_warps=warps, num_stages=stages)
        if other != row:
            yield other


@contextmanager
def in_place(row: LaunchOptions) -> Iterator[None]:
    """Launch a row's kernel as it says."""
    found = launch.options

    def options(kernel: str, inputs: launch.Inputs) -> LaunchOptions:
        return row if kernel == row.kernel else found(kernel, inputs)

    modules = [sys.modules[f"twinrun_mamba.ssd.{name}"] for name in ("launch", "launch_backward")]
    for module in modules:
        module.options = options  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module in modules:
            module.options = found  # type: ignore[attr-defined]


def main(arguments: Sequence[str] | None = None) -> int:
    """Try what was asked for; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [shape.name for shape in SHAPES]
    parser.add_argument("--shape", action="append", choices=names, help="repeatable, of one dtype; else 2.7b")
    parser.add_argument("--kernel", action="append", choices=tuning.KERNELS, help="repeatable; else all")
    parser.add_argument("--most", type=int, default=10_000, help="choices of a kernel, evenly spread")
    parser.add_argument("--jobs", type=int, default=0, help="processes that first compile all choices")
    parser.add_argument("--part", default="", metavar="I/N", help="compile part I of N and time nothing")
    parser.add_argument("--out", type=Path, help="write every time to this CSV file")
    parser.add_argument("--device", type=device_of, default="cuda:0")
    given = parser.parse_args(arguments)
    shapes = [shape for shape in SHAPES if shape.name in (given.shape or ["2.7b"])]
    dtypes = {shape.dtype for shape in shapes}
    if len(dtypes) > 1:
        parser.error(f"--shape: found {' and '.join(sorted(dtypes))}, allowed shapes of one dtype")
    rows = {
        kernel: spread(list(choices(_row(kernel, shapes[0], given.device))), given.most)
        for kernel in given.kernel or tuning.KERNELS
    }
    if given.part:
        part, parts = map(int, given.part.split("/"))
        _compile([row for found in rows.values() for row in found][part::parts], shapes, given.device)
        return 0
    if given.jobs:
        _compile_together(shapes, given)
    return tune(rows, shapes, given)


def _row(kernel: str, shape: SsdShape, device: str) -> LaunchOptions:
    arch = tuning.architecture(torch.device(device))
    return tuning.options(kernel, arch=arch, element_bytes=DTYPES[shape.dtype].itemsize)


def spread(found: Sequence[LaunchOptions], most: int) -> list[LaunchOptions]:
    """Return at most so many choices, the first one among them."""
    return list(found[:: max(1, -(-len(found) // most))])


def run_of(shape: SsdShape, device: str) -> Run:
    """Return a forward and a backward pass at a shape."""
    compared = Compared(shape, torch.device(device), 0)
    return partial(results, compared, compared.bound(ours.function("ssd", "native")))


def _or_none(run: Run) -> list[Tensor] | None:
    """Return what a choice computes, None where the device or the compiler has no room for it."""
    try:
        return run()
    # Triton raises what its stages raise: its own classes, and LLVM's messages.
    except Exception as error:
        print(f"no room: {type(error).__name__}: {str(error)[:100]}", file=sys.stderr)
        return None


def _compile(rows: Sequence[LaunchOptions], shapes: Sequence[SsdShape], device: str) -> None:
    for shape in shapes:
        run = run_of(shape, device)
        for row in rows:
            with in_place(row):
                _or_none(run)


def _compile_together(shapes: Sequence[SsdShape], given: argparse.Namespace) -> None:
    """Fill Triton's cache; one process compiles one kernel after the other."""
    options = ["--device", given.device, "--most", str(given.most)]
    options += [text for shape in shapes for text in ("--shape", shape.name)]
    options += [text for kernel in given.kernel or () for text in ("--kernel", kernel)]
    command = [sys.executable, __file__, *options, "--part"]
    commands = [[*command, f"{number}/{given.jobs}"] for number in range(given.jobs)]
    with ThreadPoolExecutor(given.jobs) as pool:
        list(pool.map(partial(subprocess.run, check=False, stderr=subprocess.DEVNULL), commands))


def tune(rows: dict[str, list[LaunchOptions]], shapes: Sequence[SsdShape], given: argparse.Namespace) -> int:
    """Time every choice, print the best of each kernel, and return the exit code."""
    times: dict[LaunchOptions, list[float]] = {}
    for shape in shapes:
        run = run_of(shape, given.device)
        expected = run()
        for kernel, found in rows.items():
            for row in found:
                if (took := timed(row, run, expected, ALLOWED[shape.dtype], given.device)) is not None:
                    times.setdefault(row, []).append(took)
            print(f"{shape.name}, {kernel}: {len(found)} choices tried", flush=True)
    whole = {row: took for row, took in times.items() if len(took) == len(shapes)}
    if given.out:
        write_atomically(given.out, _table(whole, shapes))
    for found in rows.values():
        best = min((row for row in found if row in whole), key=partial(_share, whole, found[0]))
        print(f"{_share(whole, found[0], best):.2f} of the table's time: {_line(best)}", flush=True)
    return 0


def timed(row: LaunchOptions, run: Run, expected: list[Tensor], allowed: float, device: str) -> float | None:
    """Return the microseconds of a choice, None where it does not compute what is expected."""
    with in_place(row):
        found = _or_none(run)
        if found is None:
            return None
        far = max(map(distance, found, expected))
        if far > allowed:
            print(f"wrong by {far:.1e}: {_line(row)}", file=sys.stderr)
            return None
        return microseconds(run, row.kernel, torch.device(device))


def microseconds(run: Run, kernel: str, device: torch.device) -> float:
    """Return how long a kernel takes in a forward and a backward pass; on a processor, how long all take."""
    if device.type == "cpu":
        began = time.perf_counter()
        run()
        return (time.perf_counter() - began) * 1e6
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(RUNS):
            run()
        torch.cuda.synchronize()
    took = [float(one.self_device_time_total) for one in profile.key_averages() if one.key == kernel]
    return sum(took) / RUNS


def _share(times: dict[LaunchOptions, list[float]], by_table: LaunchOptions, row: LaunchOptions) -> float:
    """Return the mean over the shapes of a choice's time over that of the table's row."""
    return statistics.mean(mine / other for mine, other in zip(times[row], times[by_table], strict=True))


def _line(row: LaunchOptions) -> str:
    return ",".join("" if value is None else str(value) for value in dataclasses.astuple(row))


def _table(times: dict[LaunchOptions, list[float]], shapes: Sequence[SsdShape]) -> str:
    """Return all times as CSV, microseconds at each shape behind the columns of the table."""
    names = [one.name for one in dataclasses.fields(LaunchOptions)]
    lines = [",".join((*names, *(f"microseconds {shape.name}" for shape in shapes)))]
    lines += [",".join((_line(row), *(f"{one:.2f}" for one in took))) for row, took in times.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
