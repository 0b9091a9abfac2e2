"""Everything that only a GPU can show, without pytest.

`python recipes/mamba-kernels/tools/gpu_grid.py --help` lists the options.
One line a case, a summary, and exit code 1 when anything failed. Inputs are new in every run, from the seed
that is printed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels" / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "kernels/entry/src"))
import checks
import precision
from cases import Case, conv_grid, errors, scan_grid, worst
from twinrun_mamba import describe
from twinrun_mamba.launch import BACKENDS
from twinrun_mamba.registry import ArchitectureError
from twinrun_mamba.validation import ArgumentError

Named = tuple[str, Callable[[], str]]


def main() -> int:
    """Run what was asked for; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="run what has this word in its name")
    parser.add_argument(
        "--without", action="append", default=[], help="leave out what has this word in its name; repeatable"
    )
    parser.add_argument(
        "--part", type=_part, default=slice(None), metavar="I/N", help="part I of N processes"
    )
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**31)
    parser.add_argument("--device", type=device_of, default="cuda:0")
    parser.add_argument("--backend", default="native", choices=BACKENDS)
    given = parser.parse_args()
    try:
        backend = describe(given.device, given.backend)
    except ArchitectureError as error:
        parser.error(f"{error}; hint: python -m twinrun_mamba.compile makes kernels")
    except ArgumentError as error:
        parser.error(str(error))
    print(f"seed {given.seed}, torch {torch.__version__}, {backend}")
    chosen = [
        (name, run)
        for name, run in named(given.backend, given.device, given.seed)
        if given.only in name and not any(word in name for word in given.without)
    ][given.part]
    if not chosen:
        parser.error("--only, --without and --part leave no case; allowed: a word of a case's name")
    try:
        failed = [name for name, run in chosen if not passes(name, run)]
    except KeyboardInterrupt:
        parser.exit(
            130, f"gpu_grid: stopped; hint: --seed {given.seed} has the same inputs again, --only fewer\n"
        )
    print(f"{len(chosen) - len(failed)} passed, {len(failed)} failed", *failed, sep="\n  ")
    return 1 if failed else 0


def device_of(text: str) -> str:
    """Return the name of a device that this machine has, for argparse."""
    try:
        device = torch.device(text)
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"found {text!r}, allowed cpu or a GPU such as cuda:0") from None
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise argparse.ArgumentTypeError(
            f"found {text} and {count} GPUs; hint: --device cpu, with a --backend other than native"
        )
    return text


def _part(text: str) -> slice:
    numbers = [int(number) for number in text.split("/") if number.isdecimal()]
    if len(numbers) != 2 or not 1 <= numbers[0] <= numbers[1]:
        raise argparse.ArgumentTypeError(f"found {text!r}, allowed I/N with I from 1 to N, such as 3/6")
    return slice(numbers[0] - 1, None, numbers[1])


def named(backend: str, device: str, seed: int) -> Iterator[Named]:
    """Return every check by its name."""
    cases: list[Case] = [*scan_grid(), *conv_grid()]
    for number, case in enumerate(cases):
        yield str(case), partial(_case, case, backend, device, seed + number)
    for case in checks.REPEATED:
        yield f"repeats {case}", partial(_quiet, checks.repeats, case, backend, device)
    singles = [checks.hard_values, checks.not_finite, checks.strides, checks.updates]
    singles += [checks.state_updates, checks.refusals, precision.long_sums, precision.long_products]
    if torch.device(device).type == "cuda":
        singles += [checks.graph, checks.streams, checks.many_channels, checks.far_offsets]
        yield "host_cost", partial(checks.host_cost, backend, device)
        singles += [checks.other_device] if torch.cuda.device_count() > 1 else []
    for check in singles:
        yield check.__name__, partial(_quiet, check, backend, device)


def passes(name: str, run: Callable[[], str]) -> bool:
    """Run one check, print its line, and say whether it passed."""
    start = time.perf_counter()
    try:
        note = run()
    except Exception as error:
        print(f"FAIL {name}: {type(error).__name__}: {error}", flush=True)
        return False
    print(f"ok   {name}: {note} {time.perf_counter() - start:.2f} s", flush=True)
    return True


def _case(case: Case, backend: str, device: str, seed: int) -> str:
    found = errors(case, backend=backend, device=device, seed=seed)
    wrong = worst(found, case)
    if wrong:
        raise AssertionError(f"seed {seed}: {wrong}")
    name = max(found, key=lambda name: found[name])
    return f"{found[name]:.1e} ({name})"


def _quiet(check: Callable[..., None], *arguments: object) -> str:
    check(*arguments)
    return ""


if __name__ == "__main__":
    sys.exit(main())
