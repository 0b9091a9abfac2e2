"""Hold the unit tests against faults made by hand: `python -m tools.mutations [AREA ...]`."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from pydantic import Field

from twinrun.foundation.manifest import Frozen, load_toml

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "tools/mutations.toml"
SECONDS = 600
# Neither history nor what runs and builds have made.
_LEFT = shutil.ignore_patterns(
    ".git", ".nox", ".*_cache", ".venv", "__pycache__", "build", "dist", "runs", "*.so"
)


class Fault(Frozen):
    """One text of a source file and the wrong one in its place."""

    area: str
    file: str
    """Below src/twinrun."""
    right: str = Field(alias="from")
    wrong: str = Field(alias="to")

    def place(self, root: Path) -> Path:
        """Return the file in the checkout `root`."""
        return root / "src/twinrun" / self.file


class Faults(Frozen):
    """tools/mutations.toml."""

    tests: dict[str, tuple[str, ...]]
    """Area to the tests that must find its faults."""
    fault: tuple[Fault, ...]


def load_faults() -> Faults:
    """Read the faults; raises InputError."""
    return load_toml(FILE, Faults)


def is_found(root: Path, fault: Fault, tests: tuple[str, ...]) -> bool:
    """Make a fault in the checkout `root`, say whether one of `tests` fails, and take it back."""
    file = fault.place(root)
    text = file.read_text(encoding="utf-8")
    if text.count(fault.right) != 1:
        raise ValueError(f"{FILE}: {fault.file} has {text.count(fault.right)} times: {fault.right}")
    file.write_text(text.replace(fault.right, fault.wrong), encoding="utf-8")
    try:
        return not passes(root, tests)
    finally:
        file.write_text(text, encoding="utf-8")


def passes(root: Path, tests: tuple[str, ...]) -> bool:
    """Say whether all of `tests` pass in the checkout `root`; one that hangs does not."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "--numprocesses=0",
        "-p",
        "no:cacheprovider",
        *tests,
    ]
    environment = os.environ | {"PYTHONPATH": str(root / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        ended = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, check=False, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return False
    if ended.returncode not in (0, 1):
        raise RuntimeError(f"pytest ended with {ended.returncode}: {ended.stdout.decode()[-2000:]}")
    return ended.returncode == 0


def found_each(
    faults: Faults, chosen: list[Fault], copies: list[Path]
) -> Iterator[tuple[Fault, bool, float]]:
    """Yield each fault, whether it was found and the seconds that took; one at a time in each copy."""
    free: SimpleQueue[Path] = SimpleQueue()
    for copy in copies:
        free.put(copy)

    def one(fault: Fault) -> tuple[Fault, bool, float]:
        root, began = free.get(), time.monotonic()
        try:
            return fault, is_found(root, fault, faults.tests[fault.area]), time.monotonic() - began
        finally:
            free.put(root)

    with ThreadPoolExecutor(len(copies)) as pool:
        yield from pool.map(one, chosen)


def main() -> int:
    """Print which faults were found, and return 1 where one was missed."""
    faults = load_faults()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "areas", nargs="*", metavar="AREA", help=f"one of {', '.join(faults.tests)}; all when left out"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="copies that run side by side")
    options = parser.parse_args()
    if options.jobs < 1:
        parser.error(f"argument --jobs: found {options.jobs}, allowed: 1 or more")
    if unknown := sorted(set(options.areas) - set(faults.tests)):
        parser.error(f"no such area: {', '.join(unknown)}; allowed: {', '.join(faults.tests)}")
    chosen = [fault for fault in faults.fault if fault.area in (options.areas or faults.tests)]
    with tempfile.TemporaryDirectory(prefix="twinrun-mutations-") as name:
        copies = [Path(name, str(number)) for number in range(options.jobs)]
        for copy in copies:
            shutil.copytree(ROOT, copy, ignore=_LEFT)
        for area in dict.fromkeys(fault.area for fault in chosen):
            if not passes(copies[0], faults.tests[area]):
                parser.exit(1, f"{area}: its tests fail without a fault\n")
        missed = 0
        for number, (fault, found, seconds) in enumerate(found_each(faults, chosen, copies), start=1):
            missed += not found
            outcome = "found" if found else "MISSED"
            where = f"{fault.area}  {fault.file}: {fault.right}"
            print(f"{number:3} of {len(chosen)}  {outcome:6}  {seconds:5.0f} s  {where}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} faults found")
    return 1 if missed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        # The copies are gone; the checkout was never changed.
        sys.exit("stopped")
