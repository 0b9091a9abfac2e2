"""Choose launch options: every candidate of a fixed list is compiled, timed, and the fastest kept.

    python recipes/flash-attention/kernels/tools/search.py --head-sizes 64 128 --out FOLDER

writes `times.csv` with every candidate and `rows.toml` with rows for `tuning.toml`. A candidate replaces an
earlier one of the list only where it is more than 1 % faster, so that noise does not choose.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import triton
from twinrun_attention import launch, tuning
from twinrun_attention.launch import Band
from twinrun_attention.tuning import LaunchOptions

# Queries, keys, warps: of each kernel, in the order in which candidates are tried.
SHAPES = {
    "forward": ((128, 128, 8), (128, 64, 4), (128, 64, 8), (64, 64, 4), (64, 128, 4), (128, 32, 8)),
    "backward_keys": ((64, 128, 8), (64, 64, 4), (32, 128, 8), (32, 64, 4), (64, 64, 8), (32, 64, 8)),
    "backward_queries": ((128, 64, 8), (128, 128, 8), (64, 64, 4), (128, 32, 8), (64, 64, 8), (64, 32, 4)),
}
STAGES = (2, 3, 4)
TOKENS, WIDTH, LENGTH = 16384, 2048, 4096
MARGIN = 0.99
PROCESSES = 14


def candidates(kernel: str, head_size: int, causal: bool) -> Iterator[LaunchOptions]:
    """Yield every candidate, in order."""
    version = ".".join(triton.__version__.split(".")[:2])
    arch = tuning.architecture(torch.device("cuda", 0))
    for described, (m, n, warps), stages in itertools.product((True, False), SHAPES[kernel], STAGES):
        yield LaunchOptions(
            kernel=kernel,
            arch=arch,
            triton=(version,),
            head_size=head_size,
            causal=causal,
            block_m=m,
            block_n=n,
            num_warps=warps,
            num_stages=stages,
            descriptors=described,
        )


def call(row: LaunchOptions, length: int = LENGTH) -> Callable[[], object]:
    """Return a launch of one kernel with one candidate's options."""
    heads = WIDTH // row.head_size
    shape = (TOKENS // LENGTH, length, heads, row.head_size)
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, grad = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(4)
    )
    band = Band(scale=row.head_size**-0.5, right=0 if row.causal else -1)
    tuning.options = lambda *_, **__: row  # type: ignore[assignment]
    if row.kernel == "forward":
        return lambda: launch.run_forward(q, k, v, None, None, band)
    lse = torch.full((shape[0], heads, length), 8.0, device="cuda")
    sizes = launch.Sizes.of(q, k, None)
    inputs, outputs = (q, k, v, grad, lse, torch.zeros_like(lse)), (q.clone(), k.clone(), v.clone())
    return lambda: launch.launch_backward(row.kernel, inputs, outputs, None, None, band, sizes=sizes)


def compiles(row: LaunchOptions) -> str:
    """Compile a candidate into Triton's cache, in a process of its own; return why it does not."""
    try:
        call(row, length=256)()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:80] if str(error) else ''}"
    return ""


def flops(row: LaunchOptions) -> float:
    """Return the products that the kernel executes, halved where causal."""
    products = {"forward": 2, "backward_keys": 4, "backward_queries": 3}[row.kernel]
    return products * 2 * TOKENS * LENGTH * WIDTH * (0.5 if row.causal else 1)


def main() -> None:
    """Compile and time every candidate, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--head-sizes", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--kernels", nargs="+", default=list(SHAPES))
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    groups = list(itertools.product(asked.kernels, asked.head_sizes, (True, False)))
    rows = [row for group in groups for row in candidates(*group)]
    with multiprocessing.get_context("spawn").Pool(PROCESSES, maxtasksperchild=20) as pool:
        faults = pool.map(compiles, rows, chunksize=1)
    chosen: dict[tuple[str, int, bool], tuple[float, LaunchOptions]] = {}
    with (asked.out / "times.csv").open("w", newline="") as target:
        writer = csv.writer(target)
        writer.writerow(
            ("kernel", "d", "causal", "m", "n", "warps", "stages", "tma", "ms", "tflops", "fault")
        )
        for row, fault in zip(rows, faults, strict=True):
            spent = (
                None if fault else triton.testing.do_bench(call(row), warmup=20, rep=60, return_mode="median")
            )
            rate = flops(row) / spent / 1e9 if spent else 0
            name = (row.kernel, row.head_size, bool(row.causal))
            shape = (row.block_m, row.block_n, row.num_warps, row.num_stages, int(row.descriptors))
            writer.writerow((*name, *shape, spent, f"{rate:.0f}", fault))
            if spent and (name not in chosen or spent < MARGIN * chosen[name][0]):
                chosen[name] = (spent, row)
    (asked.out / "rows.toml").write_text("\n".join(in_toml(*one) for one in chosen.values()), "utf-8")
    for (kernel, size, causal), (spent, row) in chosen.items():
        print(
            kernel,
            size,
            "causal" if causal else "full",
            f"{spent:.3f} ms {flops(row) / spent / 1e9:.0f}",
            row,
        )


def in_toml(spent: float, row: LaunchOptions) -> str:
    """Return a row of the table, with its time."""
    head = f'[[{row.kernel}]]  # {spent:.3f} ms\narch = "{row.arch}"\ntriton = {list(row.triton)}\n'
    fields = ("head_size", "causal", "block_m", "block_n", "num_warps", "num_stages", "descriptors")
    return head + "".join(f"{name} = {str(getattr(row, name)).lower()}\n" for name in fields)


if __name__ == "__main__":
    main()
