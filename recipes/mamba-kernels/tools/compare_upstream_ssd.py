"""Our SSD beside upstream's `mamba_chunk_scan_combined`, in one process, at the shapes of its benchmark.

`python recipes/mamba-kernels/tools/compare_upstream_ssd.py --help` lists the options.
Each row is compared with float64 first, ours and upstream's; then both repeat a forward and a backward pass,
whose bits are counted; then both take turns, as the recipe times them: the device's part of a call, with
cold caches. Of `mamba_ssm` only its Triton sources are used, from an sdist or where it is installed; they
need einops and packaging. Exit code 1 when a row is slower than allowed or ours differs from itself, 2 when
it could not start, 130 when it was stopped.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "kernels" / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "kernels/entry/src"))
from gpu_grid import device_of
from twinrun_mamba.ssd.api import BACKENDS

from twinrun.foundation.files import write_atomically
from twinrun.train.measure import Clock

ours, ssd = import_module("ours"), import_module("ssd")
Function = Callable[..., Tensor]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PHASES = ("forward", "backward")
MODULE = "mamba_ssm.ops.triton.ssd_combined"


@dataclass(frozen=True, kw_only=True)
class SsdShape:
    """What a row times; `gated` calls give z, as Mamba-2 without its gated norm does."""

    name: str
    batch: int
    length: int
    heads: int
    head_size: int
    states: int
    groups: int = 1
    chunk: int = 256
    dtype: str = "bf16"
    gated: bool = False


# Shapes of upstream's own files (github:state-spaces/mamba@e9594ce1c732), and of its published 2.7B model.
SHAPES = (
    # tests/benchmark_determinism_kernels.py: its two presets, which give no z.
    SsdShape(name="small", batch=4, length=2048, heads=32, head_size=64, states=64),
    SsdShape(name="nemotronh-56b", batch=4, length=2048, heads=256, head_size=64, states=256, groups=8),
    # tests/test_determinism.py: both head sizes of its kernels, and its Mamba2 of 256 channels.
    SsdShape(name="determinism-64", batch=2, length=2048, heads=8, head_size=64, states=64),
    SsdShape(name="determinism-128", batch=2, length=2048, heads=8, head_size=128, states=64),
    SsdShape(name="determinism-module", batch=4, length=4096, heads=8, head_size=64, states=64),
    # mamba_ssm/modules/ssd_minimal.py: its check.
    SsdShape(name="minimal", batch=1, length=2048, heads=32, head_size=64, states=64, chunk=64, dtype="fp32"),
    # state-spaces/mamba2-2.7b: 80 heads of 64 with 128 states.
    SsdShape(name="2.7b", batch=4, length=2048, heads=80, head_size=64, states=128),
    SsdShape(name="small-gated", batch=4, length=2048, heads=32, head_size=64, states=64, gated=True),
    SsdShape(name="2.7b-gated", batch=4, length=2048, heads=80, head_size=64, states=128, gated=True),
    # Not timed on a GPU by itself: what a processor can do.
    SsdShape(name="tiny", batch=1, length=40, heads=4, head_size=8, states=16, chunk=16, dtype="fp32"),
)


@dataclass(frozen=True)
class Seeded:
    """What an operation takes of a session: where its inputs are and what they are drawn from."""

    device: torch.device
    generator: torch.Generator


class Compared(ssd.Ssd):  # type: ignore[misc,name-defined]
    """The recipe's operation at a shape, without z where the shape has none."""

    def __init__(self, shape: SsdShape, device: torch.device, seed: int) -> None:
        self._gated = shape.gated
        session = Seeded(device, torch.Generator(device).manual_seed(seed))
        super().__init__(session, asdict(shape), DTYPES[shape.dtype])

    def _random(self, *given: Any) -> dict[str, Tensor]:
        found: dict[str, Tensor] = super()._random(*given)
        return found if self._gated else {name: found[name] for name in found if name != "z"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare what was asked for; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, help="an sdist or a folder of mamba_ssm; else as installed")
    parser.add_argument("--out", type=Path, help="write all figures to this JSON file after every row")
    parser.add_argument("--only", action="append", default=[], help="time this row; repeatable")
    parser.add_argument("--least", type=float, default=1.0, help="upstream's time over ours that is allowed")
    parser.add_argument("--repeats", type=int, default=30, help="timed calls, whose median counts")
    parser.add_argument("--bitwise", type=int, default=100, help="passes whose bits are compared")
    parser.add_argument("--seed", type=int, default=41)
    parser.add_argument("--jobs", type=int, default=0, help="processes that first compile a row each")
    parser.add_argument("--tf32", action="store_true", help="multiply fp32 in TF32, as upstream does")
    parser.add_argument("--compile", action="store_true", help="call each row once and time nothing")
    parser.add_argument("--device", type=device_of, default="cuda:0")
    parser.add_argument("--backend", default="native", choices=BACKENDS)
    given = parser.parse_args(arguments)
    for name, least in (("repeats", 1), ("bitwise", 1), ("jobs", 0)):
        if getattr(given, name) < least:
            parser.error(f"--{name}: found {getattr(given, name)}, allowed {least} or more")
    torch.set_float32_matmul_precision("high" if given.tf32 else "highest")
    names = [shape.name for shape in SHAPES]
    for name in given.only:
        if name not in names:
            parser.error(f"--only: found {name!r}, allowed {', '.join(names)}")
    chosen = [shape for shape in SHAPES if shape.name in (given.only or names[:-1])]
    with ExitStack() as stack:
        try:
            theirs = partial(upstream(given.source, stack), dt_softplus=True)
        except (ImportError, OSError, RuntimeError, tarfile.TarError) as error:
            hint = "--source mamba_ssm-2.3.2.post1.tar.gz, with einops and packaging on PYTHONPATH"
            parser.error(f"upstream's {MODULE} cannot be imported: {error}; hint: {hint}")
        both = {"ours": ours.function("ssd", given.backend), "upstream": theirs}
        try:
            return _compile(chosen, both, given) if given.compile else _compare(chosen, both, given)
        except KeyboardInterrupt:
            parser.exit(130, "compare_upstream_ssd: stopped; hint: --only has fewer rows\n")


def upstream(source: Path | None, stack: ExitStack) -> Function:
    """Return upstream's function; `mamba_ssm/__init__.py`, which needs compiled extensions, does not run."""
    package = stack.enter_context(unpacked(source)) if source else installed()
    module = ModuleType("mamba_ssm")
    module.__path__ = [str(package)]
    module.__version__ = version_of(package)  # type: ignore[attr-defined]
    sys.modules["mamba_ssm"] = module
    found: Function = import_module(MODULE).mamba_chunk_scan_combined
    return found


@contextmanager
def unpacked(source: Path) -> Iterator[Path]:
    """Yield the folder of mamba_ssm of an sdist, or of a folder that holds it."""
    if source.is_dir():
        yield _package_in(source)
        return
    with tempfile.TemporaryDirectory(prefix="mamba_ssm-") as folder, tarfile.open(source) as archive:
        archive.extractall(folder, filter="data")
        yield _package_in(Path(folder))


def _package_in(folder: Path) -> Path:
    for found in (folder, *sorted(folder.glob("mamba_ssm")), *sorted(folder.glob("*/mamba_ssm"))):
        if (found / "ops" / "triton" / "ssd_combined.py").is_file():
            return found
    raise ImportError(f"{folder}: found no mamba_ssm/ops/triton/ssd_combined.py")


def installed() -> Path:
    """Return the folder of mamba_ssm where it is installed."""
    spec = find_spec("mamba_ssm")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("mamba_ssm is not installed")
    return _package_in(Path(next(iter(spec.submodule_search_locations))))


def version_of(package: Path) -> str:
    """Return the version that the sources say."""
    text = (package / "__init__.py").read_text(encoding="utf-8")
    return text.partition("__version__ = ")[2].partition("\n")[0].strip("\"' ") or "unknown"


def _compile(chosen: Sequence[SsdShape], both: dict[str, Function], given: argparse.Namespace) -> int:
    """Call everything once, so that Triton's cache has it."""
    for shape in chosen:
        compared = Compared(shape, torch.device(given.device), given.seed)
        for function in both.values():
            results(compared, compared.bound(function))
    return 0


def _compile_together(chosen: Sequence[SsdShape], given: argparse.Namespace) -> None:
    """Compile rows side by side: upstream tunes itself, a compilation for each choice that it has."""
    options = ["--compile", "--device", given.device, "--backend", given.backend]
    options += ["--source", str(given.source)] if given.source else []
    commands = [[sys.executable, __file__, *options, "--only", shape.name] for shape in chosen]
    with ThreadPoolExecutor(given.jobs) as pool:
        for shape, done in zip(chosen, pool.map(partial(subprocess.run, check=False), commands), strict=True):
            print(f"compiled {shape.name}: exit code {done.returncode}", flush=True)


def _compare(chosen: Sequence[SsdShape], both: dict[str, Function], given: argparse.Namespace) -> int:
    """Print a line for each row, write the file, and return the exit code."""
    if given.jobs:
        _compile_together(chosen, given)
    clock = Clock(torch.device(given.device), warmup=3, repeats=given.repeats)
    rows = []
    for shape in chosen:
        rows.append(_row(shape, both, clock, given))
        print(_line(rows[-1]), flush=True)
        if given.out:
            write_atomically(given.out, json.dumps({**_environment(given), "rows": rows}, indent=1) + "\n")
    return _summed_up(rows, given)


def _row(
    shape: SsdShape, both: dict[str, Function], clock: Clock, given: argparse.Namespace
) -> dict[str, Any]:
    """Return all figures of a row."""
    compared = Compared(shape, torch.device(given.device), given.seed)
    bound = {name: compared.bound(function) for name, function in both.items()}
    row: dict[str, Any] = {"shape": asdict(shape)}
    row["relative_error"] = {name: compared.distances(function) for name, function in bound.items()}
    row["equal_passes"] = {name: _equal(compared, one, given.bitwise) for name, one in bound.items()}
    row["passes"] = given.bitwise
    row["milliseconds"], row["kernel_microseconds"] = {}, {}
    for phase in PHASES:
        calls = {name: compared.call(function, phase, "kernels") for name, function in bound.items()}
        row["kernel_microseconds"][phase] = {name: _kernels(call, given) for name, call in calls.items()}
        times = dict(zip(calls, clock.times(list(calls.values())), strict=True))
        row["milliseconds"][phase] = {
            name: {"median": statistics.median(found), "least": min(found), "most": max(found)}
            for name, found in times.items()
        }
    row["ratio"] = {
        phase: found["upstream"]["median"] / found["ours"]["median"]
        for phase, found in row["milliseconds"].items()
    }
    return row


def results(compared: Compared, function: Function) -> list[Tensor]:
    """Return output and gradients of one forward and backward pass."""
    leaves = compared.leaves()
    out = function(**leaves)
    return [out.detach(), *torch.autograd.grad(out, list(leaves.values()), compared.gradient)]


def _equal(compared: Compared, function: Function, passes: int) -> int:
    """Return how many passes have the bits of the first, which is one of them."""
    first = results(compared, function)
    again = (results(compared, function) for _ in range(passes - 1))
    return 1 + sum(all(map(torch.equal, first, found)) for found in again)


def _kernels(call: Callable[[], object], given: argparse.Namespace) -> dict[str, float]:
    """Return the device's microseconds of each kernel of a call; none on a processor."""
    if torch.device(given.device).type == "cpu":
        return {}
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return {one.key[:80]: one.self_device_time_total for one in profile.key_averages()}


def _environment(given: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(given.device)
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "ours": ours.implementation(device, "ssd", given.backend),
        "upstream": f"mamba_ssm {sys.modules['mamba_ssm'].__version__}",
        "torch": torch.__version__,
        "seed": given.seed,
        "repeats": given.repeats,
        "caches": "cold",
    }


def _line(row: dict[str, Any]) -> str:
    parts = [row["shape"]["name"].ljust(18)]
    for phase in PHASES:
        mine, other = (row["milliseconds"][phase][name]["median"] for name in ("ours", "upstream"))
        parts.append(f"{phase} {mine:.3f} ms, upstream {other:.3f}, {row['ratio'][phase]:.2f};")
    worst = {name: max(max(of.values()) for of in found.values()) for name, found in _errors(row)}
    parts.append("errors " + ", ".join(f"{name} {value:.1e}" for name, value in worst.items()) + ";")
    equal = ", ".join(f"{name} {count}" for name, count in row["equal_passes"].items())
    parts.append(f"equal of {row['passes']}: {equal}")
    return " ".join(parts)


def _errors(row: dict[str, Any]) -> Iterator[tuple[str, dict[str, dict[str, float]]]]:
    yield from row["relative_error"].items()


def _summed_up(rows: Sequence[dict[str, Any]], given: argparse.Namespace) -> int:
    """Print lowest, median and highest ratio of each phase; return the exit code."""
    slower, unequal = 0, [row["shape"]["name"] for row in rows if row["equal_passes"]["ours"] < given.bitwise]
    for phase in PHASES:
        found = [row["ratio"][phase] for row in rows]
        below = sum(ratio < given.least for ratio in found)
        slower += below
        numbers = f"{min(found):.2f} / {statistics.median(found):.2f} / {max(found):.2f}"
        print(f"{phase}, lowest / median / highest: {numbers}, {below} of {len(found)} below {given.least:g}")
    print(f"ours repeats bit for bit in {len(rows) - len(unequal)} of {len(rows)} rows", *unequal)
    return 1 if slower or unequal else 0


if __name__ == "__main__":
    sys.exit(main())
