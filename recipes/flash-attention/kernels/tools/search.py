"""Choose launch options: every candidate of a fixed list is compiled, timed, and the fastest kept.

    python recipes/flash-attention/kernels/tools/search.py --head-sizes 64 128 --out FOLDER

writes `times.csv` with every candidate and `rows.toml` with rows for `tuning.toml`. A candidate replaces an
earlier one of the list only where it is more than 1 % faster, so that noise does not choose.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import triton
from twinrun_attention import alibi_slopes, launch, prepared, tuning
from twinrun_attention.launch import Band
from twinrun_attention.tuning import LaunchOptions

# Queries, keys, warps: of each kernel, in the order in which candidates are tried.
SHAPES = {
    "forward": ((128, 128, 8), (128, 64, 4), (128, 64, 8), (64, 64, 4), (64, 128, 4), (128, 32, 8)),
    "backward_keys": ((64, 128, 8), (64, 64, 4), (32, 128, 8), (32, 64, 4), (64, 64, 8), (32, 64, 8)),
    "backward_queries": ((128, 64, 8), (128, 128, 8), (64, 64, 4), (128, 32, 8), (64, 64, 8), (64, 32, 4)),
    "decode": ((16, 64, 4), (16, 128, 4), (16, 128, 8), (16, 32, 2), (16, 64, 2), (16, 32, 4)),
}
STAGES = (2, 3, 4)
# What is done to scores: rows for windows and ALiBi are causal.
SCORES = ("causal", "full", "window", "biased")
# Programs of a decoding call for each multiprocessor.
PROGRAMS = (1, 2, 3, 4, 6, 8)
TOKENS, WIDTH, LENGTH, WINDOW = 16384, 2048, 4096, 1024
# Of decoding: heads and keys of one sequence.
HEADS, CACHE = 32, 16384
MARGIN = 0.99
PROCESSES = 14


def candidates(kernel: str, head_size: int, scores: str) -> Iterator[LaunchOptions]:
    """Yield every candidate, in order."""
    version = ".".join(triton.__version__.split(".")[:2])
    arch = tuning.architecture(torch.device("cuda", 0))
    decodes = kernel == "decode"
    for described, (m, n, warps), stages, programs in itertools.product(
        (False,) if decodes else (True, False), SHAPES[kernel], STAGES, PROGRAMS if decodes else (2,)
    ):
        yield LaunchOptions(
            kernel=kernel,
            arch=arch,
            triton=(version,),
            head_size=head_size,
            causal=None if decodes else scores in {"causal", "biased"},
            scores=scores if scores in {"window", "biased"} else None,
            block_m=m,
            block_n=n,
            num_warps=warps,
            num_stages=stages,
            programs=programs,
            descriptors=described,
        )


def call(row: LaunchOptions, length: int = LENGTH) -> Callable[[], object]:
    """Return a launch of one kernel with one candidate's options."""
    tuning.options = lambda *_, **__: row  # type: ignore[assignment]
    prepared.forget()
    if row.kernel == "decode":
        return decoding(row)
    heads = WIDTH // row.head_size
    shape = (TOKENS // LENGTH, length, heads, row.head_size)
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, grad = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(4)
    )
    windowed = row.scores == "window"
    band = Band(
        scale=row.head_size**-0.5,
        left=WINDOW - 1 if windowed else -1,
        right=0 if row.causal or windowed else -1,
    )
    slopes = alibi_slopes(heads, device="cuda") if row.scores == "biased" else None
    if row.kernel == "forward":
        return lambda: launch.run_forward(q, k, v, slopes, None, band)
    lse = torch.full((shape[0], heads, length), 8.0, device="cuda")
    inputs, outputs = (q, k, v, grad, lse, torch.zeros_like(lse)), (q.clone(), k.clone(), v.clone())
    return lambda: launch.launch_backward(row.kernel, inputs, outputs, slopes, None, band)


def decoding(row: LaunchOptions) -> Callable[[], object]:
    """Return a decoding call: one query against a long cache."""
    q = torch.randn((1, 1, HEADS, row.head_size), device="cuda", dtype=torch.bfloat16)
    k, v = (
        torch.randn((1, CACHE, HEADS, row.head_size), device="cuda", dtype=torch.bfloat16) for _ in range(2)
    )
    lengths = torch.full((1,), CACHE, dtype=torch.int32, device="cuda")
    return lambda: launch.run_decode(q, k, v, lengths, None, Band(scale=row.head_size**-0.5))


def compiles(row: LaunchOptions) -> str:
    """Compile a candidate into Triton's cache, in a process of its own; return why it does not."""
    try:
        call(row, length=256)()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:80] if str(error) else ''}"
    return ""


def time_of(row: LaunchOptions) -> float:
    """Return the milliseconds of a call; decoding takes less than its launch, so a CUDA graph repeats it."""
    if row.kernel == "decode":
        return float(triton.testing.do_bench_cudagraph(call(row), rep=60, return_mode="median"))
    return float(triton.testing.do_bench(call(row), warmup=20, rep=60, return_mode="median"))


def flops(row: LaunchOptions) -> float:
    """Return the products that the kernel executes, halved where causal; under a window those seen."""
    if row.kernel == "decode":
        return 4.0 * CACHE * HEADS * row.head_size
    products = {"forward": 2, "backward_keys": 4, "backward_queries": 3}[row.kernel]
    share = 0.5 if row.causal else 1.0
    if row.scores == "window":
        share = (LENGTH * WINDOW - WINDOW**2 / 2) / LENGTH**2
    return products * 2 * TOKENS * LENGTH * WIDTH * share


def main() -> None:
    """Compile and time every candidate, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--head-sizes", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--kernels", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--scores", nargs="+", choices=SCORES, default=list(SCORES))
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    groups = [
        (kernel, size, scores)
        for kernel, size in itertools.product(asked.kernels, asked.head_sizes)
        for scores in (("full",) if kernel == "decode" else asked.scores)
    ]
    rows = [row for group in groups for row in candidates(*group)]
    with multiprocessing.get_context("spawn").Pool(PROCESSES, maxtasksperchild=20) as pool:
        faults = pool.map(compiles, rows, chunksize=1)
    chosen: dict[tuple[str, int, bool | None, str | None], tuple[float, LaunchOptions]] = {}
    with (asked.out / "times.csv").open("w", newline="") as target:
        writer = csv.writer(target)
        writer.writerow(
            (
                *("kernel", "d", "causal", "scores", "m", "n", "warps", "stages", "programs", "tma"),
                *("ms", "tflops", "fault"),
            )
        )
        for row, fault in zip(rows, faults, strict=True):
            spent = None if fault else time_of(row)
            rate = flops(row) / spent / 1e9 if spent else 0
            name = (row.kernel, row.head_size, row.causal, row.scores)
            shape = (row.block_m, row.block_n, row.num_warps, row.num_stages)
            shape = (*shape, row.programs, int(row.descriptors))
            writer.writerow((*name, *shape, spent, f"{rate:.0f}", fault))
            if spent and (name not in chosen or spent < MARGIN * chosen[name][0]):
                chosen[name] = (spent, row)
    (asked.out / "rows.toml").write_text("\n".join(in_toml(*one) for one in chosen.values()), "utf-8")
    for name, (spent, row) in chosen.items():
        print(*name, f"{spent:.3f} ms {flops(row) / spent / 1e9:.0f}", row)


def in_toml(spent: float, row: LaunchOptions) -> str:
    """Return a row of the table, with its time."""
    head = f'[[{row.kernel}]]  # {spent:.3f} ms\narch = "{row.arch}"\ntriton = {list(row.triton)}\n'
    fields = ("head_size", "causal", "scores", "block_m", "block_n", "num_warps", "num_stages")
    found = {
        name: getattr(row, name)
        for name in (*fields, "programs" if row.kernel == "decode" else "descriptors")
    }
    return head + "".join(
        f"{name} = {json.dumps(value)}\n" for name, value in found.items() if value is not None
    )


if __name__ == "__main__":
    main()
