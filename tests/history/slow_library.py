"""A checkout whose recipe times a library of 16 versions, which an index on this machine has."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pydantic

from tests.checkouts import ROOT
from tests.contracts.baking import bake
from tests.indexes import wheel
from twinrun.images.resolution import resolve_python
from twinrun.manifests.stack import load_manifest
from twinrun.protocol.models.mpt import MptShape

RECIPE, STACK, VERSIONS = "timed", "small", 16
SECONDS = 0.02
_RECIPE = (RECIPE, "--scale", "smoke")
# Ranks of these recipes need no PyTorch; what every launcher starts them with is all that this has of it.
_AGENT = """\
import runpy, sys
at = next(place for place, word in enumerate(sys.argv) if word.endswith(".py") and place)
sys.argv = sys.argv[at:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
_TORCH = {"torch/__init__.py": "", "torch/distributed/__init__.py": "", "torch/distributed/run.py": _AGENT}
# A training prepares its data, which takes PyTorch and more: they are those of where the tests run.
_HOST = {"host.pth": f"{Path(pydantic.__file__).parents[1]}\n"}
_STACK = f"""\
name = "{STACK}"
vendor = "cpu"
title = "A library, and what starts ranks"
python = ">=3.11,<3.13"
image = "twinrun-test/{STACK}"
"""
_BENCH = """\
import json, pathlib, sys, time
import slowlib
job = json.loads(pathlib.Path(sys.argv[sys.argv.index("--job") + 1]).read_text())
times = []
for _ in range(12):
    began = time.perf_counter()
    slowlib.work()
    times.append((time.perf_counter() - began) * 1e3)
ours = {"name": "ours", "version": "1", "milliseconds": times, "errors": {"out": 0.0}}
call = {"name": "norm-fp32", "title": "work", "labels": {"operation": "norm", "dtype": "fp32"}, "work": None,
        "allowed_error": 1.0, "ours": ours}
result = {"point": job["point"], "device_name": "a processor", "libraries": {}, "seed": 1, "peak_rates": [],
          "calls": [call], "device_memory_bytes": 1, "peak_memory_bytes": 0}
(pathlib.Path(job["out"]) / "result.json").write_text(json.dumps(result))
"""
_TRAINING = """\
import json, pathlib, sys
import slowlib
job = json.loads(pathlib.Path(sys.argv[sys.argv.index("--job") + 1]).read_text())
settings = job["training"]
steps = [{"step": step, "seconds": 0.5,
          "loss": 5.0 - 0.1 * step + slowlib.EPSILON * step, "timed": step > settings["warmup_steps"],
          "watts": None} for step in range(1, settings["steps"] + 1)]
result = {"point": job["point"], "device_name": "a processor", "libraries": {}, "parameters": PARAMETERS,
          "microbatch": job["microbatch"], "steps": steps, "peak_memory_bytes": 1, "device_memory_bytes": 2,
          "attention_backend": "math", "parallelism": "single", "data_hash": "d" * 64, "order_hash": "0" * 64,
          "power": {"sensor": None, "reason": "none here"}}
(pathlib.Path(job["out"]) / "result.json").write_text(json.dumps(result))
"""


@dataclass(frozen=True)
class SlowLibrary:
    """The checkout, and how its command is run."""

    root: Path
    variables: Mapping[str, str]

    def lock(self, name: str, version: int) -> Path:
        """Return a lock of a version of the library beside torch, made by the code of `invoke lock`."""
        folder = self.root / "locks" / name
        folder.mkdir(parents=True)
        source = folder / "requirements.in"
        source.write_text(f"torch==1.0\nslowlib=={version}.0\n", encoding="utf-8")
        text = resolve_python(source, load_manifest(self.root, STACK))
        lock = folder / "requirements.lock"
        lock.write_text(text, encoding="utf-8")
        return lock

    def arguments(self, good: Path, bad: Path, *options: str, ran: Sequence[str] = _RECIPE) -> list[str]:
        """Return the command that bisects between two locks."""
        ends = ("--good", str(good), "--bad", str(bad), "--yes", "--json")
        return [sys.executable, "-m", "twinrun", "bisect", *ran, *ends, *options]

    def start(self, arguments: Sequence[str]) -> subprocess.Popen[str]:
        """Start a command of the checkout."""
        pipes: dict[str, Any] = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
        return subprocess.Popen(arguments, cwd=self.root, env={**self.variables}, text=True, **pipes)

    def bisect(
        self, good: Path, bad: Path, *options: str, ran: Sequence[str] = _RECIPE
    ) -> tuple[int, dict[str, Any]]:
        """Return the exit code of a bisection and what it printed."""
        process = self.start(self.arguments(good, bad, *options, ran=ran))
        printed, said = process.communicate(timeout=900)
        assert printed, said
        return process.returncode, json.loads(printed)


def versions(text: Callable[[int], str], *, count: int = VERSIONS) -> dict[str, str]:
    """Return the source of each version of the library."""
    return {f"{number}.0": text(number) for number in range(1, count + 1)}


def slower(factor: float) -> str:
    """Return a library whose work takes so many times as long."""
    return f"import time\n\n\ndef work():\n    time.sleep({SECONDS * factor})\n"


def made(folder: Path, address: str, index: Path, *, workload: str = "bench") -> SlowLibrary:
    """Write the checkout; its stack has the first version until a lock says otherwise."""
    root = folder / "checkout"
    (root / "recipes").mkdir(parents=True)
    (root / "images" / "stacks" / STACK).mkdir(parents=True)
    for name in ("src", "images/vendors", "images/gpus.toml", "images/Dockerfile", "recipes/metrics.toml"):
        (root / name).symlink_to(ROOT / name)
    shutil.copyfile(ROOT / "tasks.py", root / "tasks.py")
    wheel(index, "torch", "1.0", files=_HOST if workload == "training" else _TORCH)
    stack = root / "images" / "stacks" / STACK
    (stack / "stack.toml").write_text(_STACK, encoding="utf-8")
    (stack / "requirements.in").write_text("torch==1.0\nslowlib==1.0\n", encoding="utf-8")
    lock = resolve_python(stack / "requirements.in", load_manifest(root, STACK))
    (stack / "requirements.lock").write_text(lock, encoding="utf-8")
    _bake(root, workload)
    variables = {name: text for name, text in os.environ.items() if not name.startswith("TWINRUN")}
    variables |= {"PYTHONPATH": str(root / "src"), "TWINRUN_CACHE": str(folder / "twinrun")}
    # A bisection is some twenty processes: compiling all modules is half of the time of each.
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    variables["PYTHONPYCACHEPREFIX"] = str(folder / "bytecode")
    return SlowLibrary(root=root, variables=variables | {"UV_DEFAULT_INDEX": address})


def _bake(root: Path, workload: str) -> None:
    """Bake the template, and let its ranks time the library, or train with its epsilon."""
    recipe = root / bake(root, {"name": RECIPE, "workload": workload}).folder
    manifest = recipe / "recipe.toml"
    # The checkout has one stack.
    stacks = re.compile(r"\[stacks\]\n.*?\n(?=\[(?!stacks))", re.DOTALL)
    text = stacks.sub(f'[stacks.current]\ncpu = "{STACK}"\n\n', manifest.read_text(encoding="utf-8"))
    text = text.replace('["fp32", "bf16"]\n\n# Names', '["fp32"]\n\n# Names')
    if workload == "training":
        text = text.replace("\n[publication]", '\nscript = "train.py"\n\n[publication]', 1)
    manifest.write_text(text, encoding="utf-8")
    script = recipe / ("bench.py" if workload == "bench" else "train.py")
    for old in recipe.glob("*.py"):
        script = old
    # The model of the template's smoke scale.
    shape = MptShape(family="mpt", width=128, heads=4, layers=4, vocabulary=320, sequence=128)
    training = _TRAINING.replace("PARAMETERS", str(shape.parameters()))
    script.write_text(_BENCH if workload == "bench" else training, encoding="utf-8")
