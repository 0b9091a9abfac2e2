"""What was tried is a table that scripts can read."""

from __future__ import annotations

import csv
import re
import tomllib
from itertools import pairwise

import pytest
from sources import KERNELS

COLUMNS = (
    "series",
    "measured",
    "kernel",
    "dtype",
    "shape",
    "idea",
    "before",
    "after",
    "unit",
    "hardware",
    "kept",
    "reason",
)
DTYPES = ("", "bf16", "fp16", "fp32")
TIMES = ("ms", "us", "cycles", "times the time", "times upstream's speed", "slots a state element")
COUNTS = ("bytes spilled", "instructions", "memory accesses", "flat accesses", "partial sums")
UNITS = (*TIMES, *COUNTS, "relative error")
NUMBER = r"-?\d+(?:\.\d+)?(?:e-?\d+)?"
# What a figure may be: a number, a range of two, or nothing where none was written down.
FIGURE = re.compile(rf"(?:{NUMBER})(?:\.\.(?:{NUMBER}))?|")
# Batch, steps, channels and, of the scan, states.
SHAPE = re.compile(r"\d+(?:x\d+){2,3}|")
GONE = "gone: "

with (KERNELS / "experiments.csv").open(encoding="utf-8", newline="") as source:
    READER = csv.DictReader(source)
    ROWS = list(READER)
BUDGETS = tomllib.loads((KERNELS / "budgets.toml").read_text(encoding="utf-8"))
BUILT = {name for arch, kernels in BUDGETS.items() if arch != "compilers" for name in kernels}


def faults(row: dict[str, str]) -> list[str]:
    """Return what is wrong with a row: the column, what was found, and what is allowed."""
    kernel, shape = row["kernel"], row["shape"]
    known = kernel.startswith(GONE) or any(name.startswith(kernel) for name in BUILT)
    allowed = {
        "measured": (re.fullmatch(r"20\d\d-(0[1-9]|1[0-2])", row["measured"]), "year-month"),
        "kernel": (kernel and known, f"the start of a kernel's name in budgets.toml, or {GONE}NAME"),
        "dtype": (row["dtype"] in DTYPES, ", ".join(DTYPES[1:])),
        "shape": (SHAPE.fullmatch(shape), "batch x steps x channels x states"),
        "idea": (row["idea"].strip(), "what was tried"),
        "before": (FIGURE.fullmatch(row["before"]), "a number, low..high, or nothing"),
        "after": (FIGURE.fullmatch(row["after"]), "a number, low..high, or nothing"),
        "unit": (row["unit"] in UNITS, ", ".join(UNITS)),
        "hardware": (row["hardware"].strip(), "a GPU, or an architecture (compiled)"),
        "kept": (row["kept"] in ("yes", "no"), "yes, no"),
        "reason": (row["after"] or row["reason"].strip(), "a reason where nothing was written down"),
    }
    return [f"{name}: {row[name]!r}, allowed: {hint}" for name, (fine, hint) in allowed.items() if not fine]


def test_every_row_can_be_read() -> None:
    assert READER.fieldnames == [*COLUMNS]
    wrong = [f"line {i}: {fault}" for i, row in enumerate(ROWS, start=2) for fault in faults(row)]
    assert not wrong, "\n".join(["", *wrong])


def test_an_experiment_stands_once_and_beside_its_series() -> None:
    keys = [tuple(row[name] for name in COLUMNS if name not in ("before", "after", "reason")) for row in ROWS]
    assert len(keys) == len(set(keys))
    series = [row["series"] for row in ROWS]
    runs = [one for one, next_one in pairwise([*series, ""]) if one != next_one]
    assert len(runs) == len(set(runs)), "the rows of a series are adjacent"


def test_the_notes_name_the_table_and_have_none() -> None:
    notes = (KERNELS / "NOTES.md").read_text(encoding="utf-8")
    assert "experiments.csv" in notes
    assert not re.search(r"^\|", notes, re.MULTILINE)


@pytest.mark.parametrize(
    ("column", "value", "hint"),
    [
        ("kernel", "scan_sideways", "the start of a kernel's name"),
        ("before", "about 3", "a number, low..high, or nothing"),
        ("shape", "2 x 4096", "batch x steps x channels x states"),
        ("unit", "fortnights", "ms, us"),
        ("kept", "perhaps", "yes, no"),
    ],
)
def test_a_wrong_row_is_named(column: str, value: str, hint: str) -> None:
    (fault,) = faults({**ROWS[0], column: value})
    assert fault.startswith(f"{column}: {value!r}, allowed: {hint}")


def test_a_kernel_that_is_gone_may_be_named() -> None:
    assert not faults({**ROWS[0], "kernel": f"{GONE}scan_sideways"})
