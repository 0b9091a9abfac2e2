"""What disks and people do to files."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

import pytest

from tests.trials import Trials

# The oldest that is binary and the newest are tried for every change, the others by night.
QUICK_PROTOCOLS = (2, pickle.HIGHEST_PROTOCOL)
PROTOCOLS = [
    pytest.param(number, marks=[] if number in QUICK_PROTOCOLS else pytest.mark.trials)
    for number in range(pickle.HIGHEST_PROTOCOL + 1)
]
# Files of prepared data, and last a shard whose encoding says that it is a pickle.
DATA_PLACES = ("corpus.json", "index.json", "hashes.bin", "shard.00000.mds", "encoding")
KINDS = ("flip", "flip", "flip", "truncate", "zero", "swap", "missing")


def day_and_night(planned: Trials) -> list[Any]:
    """Return number and seed of the trials of a change, and of those of a night."""
    seed = planned.seed or 0
    return [
        pytest.param(planned.change, seed, id="day"),
        pytest.param(planned.nightly, seed + 1, marks=pytest.mark.trials, id="night"),
    ]


class Attack:
    """Executes a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (self._mark,)  # type: ignore[return-value]


def damage(file: Path, other: Path, draw: random.Random, kinds: tuple[str, ...] = KINDS) -> str:
    """Damage `file`, perhaps by the content of `other`; return how, or nothing where it is as it was."""
    before = file.read_bytes()
    content = bytearray(before)
    kind = draw.choice(kinds)
    if kind == "flip":
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    elif kind == "truncate":
        del content[draw.randrange(len(content)) :]
    elif kind == "zero":
        begin = draw.randrange(len(content))
        size = min(draw.choice([64, 4096]), len(content) - begin)
        content[begin : begin + size] = bytes(size)
    elif kind == "swap":
        content = bytearray(other.read_bytes())
    if kind == "missing":
        file.unlink()
    else:
        file.write_bytes(content)
    # A block that was zero before is as it was.
    return f"{kind} {file.name}" if kind == "missing" or content != before else ""
