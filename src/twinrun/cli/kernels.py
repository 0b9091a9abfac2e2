"""`invoke kernels`: what tools/kernel_code predicts of the recipes' kernels."""

from __future__ import annotations

import csv
from pathlib import Path

from twinrun.cli.console import print_json
from twinrun.foundation.errors import require_known
from twinrun.foundation.terminal import say

NUMBERS = ("batch", "heads", "length", "size")


def kernels(root: Path, arch: str, *, as_json: bool) -> None:
    """Print the predicted times of an architecture's kernels; raises InputError for one that has none."""
    path = root / "tools" / "kernel_code" / "predicted.csv"
    with path.open(encoding="utf-8", newline="") as file:
        table = list(csv.DictReader(file))
    require_known(arch, dict.fromkeys(row["arch"] for row in table), "unknown architecture", place="--arch")
    rows = [row for row in table if row["arch"] == arch]
    if as_json:
        numbers = {"ms": float, "low": float, "high": float, **dict.fromkeys(NUMBERS, int)}
        print_json(
            [
                {
                    **row,
                    **{key: read(row[key]) for key, read in numbers.items()},
                    "causal": row["causal"] == "True",
                }
                for row in rows
            ]
        )
        return
    cells = [("kernel", "x".join(NUMBERS), "ms", "90 % interval", "bound by")]
    cells += [
        (
            row["kernel"] + (" causal" if row["causal"] == "True" else ""),
            "x".join(row[key] for key in NUMBERS),
            row["ms"],
            f"{row['low']} to {row['high']}",
            row["bound"],
        )
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        say("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
