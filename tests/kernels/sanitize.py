"""compute-sanitizer over everything that only a GPU can show: python -m tests.kernels.sanitize --help.

memcheck and racecheck of our kernels alone, in processes side by side that share the grid; a line for each
that ends. What is given beyond the options goes to tests.kernels.gpu_grid. Exit code 1 when a check failed or
a tool found anything, 2 when it could not start.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

TOOLS = ("memcheck", "racecheck")
# What each tool prints in the end, by which nothing was found.
CLEAN = re.compile(r"ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards displayed \(0 errors, 0 warnings\)")
KERNELS = ("scan_", "conv_")
FOUND = 99


def main(arguments: Sequence[str] | None = None) -> int:
    """Run both tools; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.kernels.sanitize", description=__doc__)
    parser.add_argument(
        "--processes", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="of each tool"
    )
    parser.add_argument("--logs", type=Path, default=Path("sanitizer"), help="folder of what they print")
    given, grid = parser.parse_known_args(arguments)
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        parser.error("compute-sanitizer: not on the PATH; hint: it comes with the CUDA toolkit, in bin")
    given.logs.mkdir(parents=True, exist_ok=True)
    print(f"{given.processes} processes of each tool, logs in {given.logs}", flush=True)
    started = time.monotonic()
    clean = True
    with ThreadPoolExecutor(len(TOOLS) * given.processes) as pool:
        jobs = {
            pool.submit(_run, command, logs): name
            for name, command, logs in _jobs(sanitizer, given.processes, given.logs, grid)
        }
        for job in as_completed(jobs):
            passed, said = job.result()
            clean &= passed
            print(
                f"{'ok  ' if passed else 'FAIL'} {jobs[job]}: {said}, {time.monotonic() - started:.0f} s",
                flush=True,
            )
    print("clean" if clean else f"not clean: {given.logs} says where")
    return 0 if clean else 1


def _jobs(
    sanitizer: str, processes: int, folder: Path, grid: Sequence[str]
) -> Iterator[tuple[str, list[str], tuple[Path, Path]]]:
    """Return name, command and logs, of the grid and of the tool, of each process."""
    for part in range(1, processes + 1):
        for tool in TOOLS:
            logs = folder / f"{tool}-{part}.grid.txt", folder / f"{tool}-{part}.txt"
            kernels = [option for prefix in KERNELS for option in ("--kernel-name", f"kns={prefix}")]
            command = [sanitizer, "--tool", tool, "--error-exitcode", str(FOUND), *kernels]
            command += ["--log-file", str(logs[1]), sys.executable, "-m", "tests.kernels.gpu_grid"]
            # Tensors beyond 2^31 elements take hours under a sanitizer.
            command += ["--without", "far_offsets", "--part", f"{part}/{processes}", *grid]
            yield f"{tool} {part}/{processes}", command, logs


def _run(command: list[str], logs: tuple[Path, Path]) -> tuple[bool, str]:
    """Return whether nothing was found, and what the grid and the tool said last."""
    # References run on the CPU, where each process would start as many threads as there are cores.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with logs[0].open("w", encoding="utf-8") as log:
        status = subprocess.run(command, stdout=log, stderr=log, env=environment, check=False).returncode
    cases = re.findall(r"^\d+ passed, \d+ failed$", logs[0].read_text(encoding="utf-8"), re.MULTILINE)
    lines = logs[1].read_text(encoding="utf-8").splitlines() if logs[1].is_file() else []
    summary = next((line for line in reversed(lines) if "SUMMARY" in line), "no summary")
    said = f"{cases[-1] if cases else f'exit code {status}'}, {summary.strip('= ')}"
    return status == 0 and CLEAN.search(summary) is not None, said


if __name__ == "__main__":
    sys.exit(main())
