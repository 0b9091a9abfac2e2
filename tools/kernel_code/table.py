"""Write the predicted times of our kernels: `python -m tools.kernel_code.table`.

`invoke kernels --arch gfx90a` prints them, and `invoke predict` takes the scan from them.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator

from tools.kernel_code import times
from twinrun.predict.kernel_times import TABLE, KernelTime

# Batch, heads or channels, length, head size or states; the shapes of published benchmarks.
SHAPES = {
    "attention": ((4, 32, 4096, 64), (1, 32, 16384, 64), (4, 16, 4096, 128), (1, 16, 16384, 128)),
    "scan": ((2, 5376, 4096, 16),),
    "conv": ((2, 5376, 4096, 4),),
}


def lines(arch: str) -> Iterator[KernelTime]:
    """Yield the lines of an architecture; KeyError for one that there is no model of."""
    gpu = times.ARCHS[arch]
    for kind, shapes in SHAPES.items():
        for phase in ("forward", "backward"):
            for batch, heads, length, size in shapes:
                for causal in (False, True) if kind == "attention" else (False,):
                    shape = {"batch": batch, "heads": heads, "length": length, "size": size, "causal": causal}
                    row = {"gpu": gpu, "arch": arch, "kernel": f"{kind}-{phase}", "dtype": "fp16", **shape}
                    found = times.time(row)
                    yield KernelTime(
                        arch=arch,
                        gpu=gpu,
                        units=times.DEVICES[gpu].units,
                        kernel=f"{kind}-{phase}",
                        batch=batch,
                        heads=heads,
                        length=length,
                        size=size,
                        causal=causal,
                        ms=round(found.ms, 3),
                        low=round(found.low, 3),
                        high=round(found.high, 3),
                        bound=found.by,
                    )


def main() -> int:
    """Write the table."""
    table = [line.model_dump() for arch in times.ARCHS for line in lines(arch)]
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(table[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
