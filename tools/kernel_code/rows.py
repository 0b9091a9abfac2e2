"""Times that others and our own records measured, as one table: `python -m tools.kernel_code.rows PUBLISHED`.

PUBLISHED is a folder with the tables that are read: of MI250 the workbook and the README of ROCm's flash-
attention and LightOn's kernels. Rows of October 2023 are left out, since their GPU is not certain, and rows
whose shape has to be guessed. Half of all shapes are held out by a hash.
"""

from __future__ import annotations

import csv
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FIELDS = (
    *("half", "gpu", "arch", "code", "kernel", "batch", "heads", "length", "size", "causal", "dtype", "ms"),
    "source",
)


def attention_flops(row: dict[str, Any]) -> float:
    """Return the operations that flash-attention's benchmark counts: two products forward, five backward."""
    products = 4 if row["kernel"] == "attention-forward" else 10
    whole = products * row["batch"] * row["heads"] * row["length"] ** 2 * row["size"]
    return float(whole / 2 if row["causal"] else whole)


def published(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of the MI250's dies."""
    die: dict[str, Any] = {"gpu": "mi250", "arch": "gfx90a"}
    for row in _table(folder / "flash_attention_ck_mi250_fwd.csv"):
        shape = _shape(row) | {"kernel": "attention-forward", "code": "ck", "dtype": row["dtype"]}
        yield die | shape | {"ms": float(row["fwd_ms"]), "source": row["source"]}
    for row in _table(folder / "flash_attention_rocm_readme.csv"):
        if not row["kernel"].startswith("FA2") or row["pass"] == "fwd+bwd" or row["dropout"] != "0":
            continue
        shape = _shape(row) | {"kernel": f"attention-{row['pass']}", "code": "fa2-rocm", "dtype": "float16"}
        ms = attention_flops(shape) / float(row["tflops"]) / 1e9
        yield die | shape | {"ms": round(ms, 4), "source": row["source"]}
    for row in _table(folder / "lighton_kernel_bench.csv"):
        if row["gpu"].startswith("MI250"):
            kernel = ("scan" if "scan" in row["operation"] else "conv") + f"-{row['pass']}"
            shape = {"batch": int(row["batch"]), "heads": int(row["channels"]), "length": int(row["seq_len"])}
            shape |= {"size": int(row["d_state"] or 4), "causal": False, "dtype": "float16"}
            yield (
                die
                | shape
                | {"kernel": kernel, "code": "lighton", "ms": float(row["ms"]), "source": row["source"]}
            )


def measured() -> Iterator[dict[str, Any]]:
    """Yield the rows of the H100 records in this repository, plain and causal ones of our kernels."""
    for path in sorted(ROOT.glob("recipes/*/results/h100-80gb*.json")):
        for point in json.loads(path.read_text(encoding="utf-8"))["points"]:
            for one in point["measurements"]:
                yield from _measurement(path, point["id"], one)


def _measurement(path: Path, point: str, one: dict[str, Any]) -> Iterator[dict[str, Any]]:
    words: list[str] = [*one["id"].split("-"), ""]
    operation, phase, rest = words[0], words[1], words[2:]
    dtype = next((word for word in rest if word in ("bf16", "fp16")), "")
    attention = operation in ("forward", "backward")
    plain = (
        "@" not in one["id"] and "/" not in one["id"] and one["labels"].get("mode", "kernels") == "kernels"
    )
    if one["metric"] != "time" or not plain or point.endswith("step"):
        return
    numbers = point.split("-", 1)[0].split("x")
    if attention and phase in ("bf16", "fp16") and {"window", "alibi", "grouped"}.isdisjoint(rest):
        batch, heads, length, size = map(int, numbers)
        if size not in (64, 128):
            return
        shape = {"kernel": f"attention-{operation}", "causal": "causal" in rest, "dtype": phase}
    elif operation in ("scan", "conv") and dtype:
        batch, length, heads, size = map(int, numbers)
        shape = {"kernel": f"{operation}-{phase}", "causal": False, "dtype": dtype}
        # What takes microseconds is a launch.
        if length < 1024:
            return
    else:
        return
    shape |= {"batch": batch, "heads": heads, "length": length, "size": size, "ms": round(one["median"], 4)}
    yield {"gpu": "h100-80gb", "arch": "sm90", "code": "ours", "source": f"{path.name} {point}"} | shape


def _shape(row: dict[str, str]) -> dict[str, Any]:
    return {
        "batch": int(row["batch"]),
        "heads": int(row["heads"]),
        "length": int(row["seq_len"]),
        "size": int(row["head_dim"]),
        "causal": row["causal"] == "True",
    }


def _table(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def half(row: dict[str, Any]) -> str:
    """Return `fit` or `held-out`; types and masks of a shape stay together, since their times are alike."""
    text = "|".join(str(row[key]) for key in ("gpu", "code", "kernel", "batch", "heads", "length", "size"))
    return "held-out" if hashlib.sha256(text.encode()).digest()[0] % 2 else "fit"


def main(arguments: Sequence[str]) -> int:
    """Write rows.csv."""
    with (Path(__file__).with_name("rows.csv")).open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, FIELDS, lineterminator="\n")
        table.writeheader()
        table.writerows({**row, "half": half(row)} for row in (*published(Path(arguments[0])), *measured()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
