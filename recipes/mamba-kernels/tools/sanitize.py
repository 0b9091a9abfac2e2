"""compute-sanitizer over everything that only a GPU can show.

`python recipes/mamba-kernels/tools/sanitize.py --help` lists the options.
memcheck and racecheck of our kernels alone, in processes side by side that share the grid; a line for each
that ends. What is given beyond the options goes to gpu_grid.py. Exit code 1 when a check failed or
a tool found anything, 2 when it could not start, 130 when it was stopped.
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
GRID = Path(__file__).with_name("gpu_grid.py")
FOUND = 99
# Name, command and logs, of the grid and of the tool, of a process.
Job = tuple[str, list[str], tuple[Path, Path]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run both tools; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--processes", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="of each tool"
    )
    parser.add_argument("--logs", type=Path, default=Path("runs/sanitizer"), help="folder of what they print")
    given, grid = parser.parse_known_args(arguments)
    if given.processes < 1:
        parser.error(f"--processes: found {given.processes}, allowed 1 or more; hint: half of the cores")
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        parser.error("compute-sanitizer: not on the PATH; hint: it comes with the CUDA toolkit, in bin")
    try:
        given.logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--logs: found {given.logs}, {error.strerror}; allowed: a folder that can be written")
    print(f"{given.processes} processes of each tool, logs in {given.logs}", flush=True)
    try:
        clean = _all_clean(list(_jobs(sanitizer, given.processes, given.logs, grid)))
    except KeyboardInterrupt:
        parser.exit(130, f"sanitize: stopped; what ended until then is in {given.logs}; hint: run it again\n")
    print("clean" if clean else f"not clean: {given.logs} says where")
    return 0 if clean else 1


def _all_clean(jobs: Sequence[Job]) -> bool:
    """Run all side by side, print a line for each that ends, and say whether nothing was found."""
    started = time.monotonic()
    clean = True
    with ThreadPoolExecutor(len(jobs)) as pool:
        names = {pool.submit(_run, command, logs): name for name, command, logs in jobs}
        for job in as_completed(names):
            passed, said = job.result()
            clean &= passed
            mark, seconds = "ok  " if passed else "FAIL", time.monotonic() - started
            print(f"{mark} {names[job]}: {said}, {seconds:.0f} s", flush=True)
    return clean


def _jobs(sanitizer: str, processes: int, folder: Path, grid: Sequence[str]) -> Iterator[Job]:
    """Return the processes of both tools."""
    for part in range(1, processes + 1):
        for tool in TOOLS:
            logs = folder / f"{tool}-{part}.grid.txt", folder / f"{tool}-{part}.txt"
            kernels = [option for prefix in KERNELS for option in ("--kernel-name", f"kns={prefix}")]
            command = [sanitizer, "--tool", tool, "--error-exitcode", str(FOUND), *kernels]
            command += ["--log-file", str(logs[1]), sys.executable, str(GRID)]
            # Tensors beyond 2^31 elements did not end in ten minutes under racecheck, and times mean nothing.
            command += ["--without", "far_offsets", "--without", "host_cost"]
            command += ["--part", f"{part}/{processes}", *grid]
            yield f"{tool} {part}/{processes}", command, logs


def _run(command: list[str], logs: tuple[Path, Path]) -> tuple[bool, str]:
    """Return whether nothing was found, and what the grid and the tool said last."""
    # References run on the CPU, where each process would start as many threads as there are cores.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    # What an earlier run found must not pass for this one's.
    logs[1].unlink(missing_ok=True)
    with logs[0].open("w", encoding="utf-8") as log:
        status = subprocess.run(command, stdout=log, stderr=log, env=environment, check=False).returncode
    printed = logs[0].read_text(encoding="utf-8").split("\n")
    cases = [line for line in printed if re.fullmatch(r"\d+ passed, \d+ failed", line)]
    lines = logs[1].read_text(encoding="utf-8").splitlines() if logs[1].is_file() else []
    summary = next((line for line in reversed(lines) if "SUMMARY" in line), "no summary")
    said = f"{cases[-1] if cases else f'exit code {status}'}, {summary.strip('= ')}"
    if not cases:
        said += f": {next(filter(None, reversed(printed)), 'nothing printed')}"
    return status == 0 and CLEAN.search(summary) is not None, said


if __name__ == "__main__":
    sys.exit(main())
