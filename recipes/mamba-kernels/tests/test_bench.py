"""The benchmark script itself, by the reference: what it refuses and what it reports."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the packages of a stack")

import torch

from tests.ranks import write_job
from twinrun.foundation.errors import InputError
from twinrun.foundation.manifest import load_json
from twinrun.protocol.bench import BenchJob, BenchResult, largest_error, possible_names
from twinrun.train import rank
from twinrun.train.bench import Session

RECIPE = Path(__file__).parents[1]
ROOT = RECIPE.parents[1]
PACKAGES = (RECIPE / "kernels/src", ROOT / "kernels/shared/src")
SIZES = {"batch": 2, "length": 9, "channels": 6, "states": 4, "width": 4}
SIZES |= {"heads": 4, "head_size": 8, "chunk": 16, "groups": 2}
CALLS: dict[str, Any] = {"operations": ("scan", "conv", "update", "ssd"), "dtypes": ("fp32", "bf16")}
SETTINGS: dict[str, Any] = {**SIZES, **CALLS, "modes": ("kernels",), "token_major": True, "eager": False}

MANIFEST = tomllib.loads((RECIPE / "recipe.toml").read_text(encoding="utf-8"))

# What is held against the reference: outputs, and gradients by what they are of.
RETURNED = {
    "scan-forward-fp32-reference": {"out"},
    "scan-backward-fp32-reference": {"u", "delta", "A", "B", "C", "D", "z", "delta_bias"},
    "conv-forward-fp32-reference": {"out"},
    "conv-backward-fp32-reference": {"x", "weight", "bias"},
    "update-step-fp32-reference": {"out", "conv_state"},
    "ssd-forward-fp32-reference": {"out"},
    "ssd-backward-fp32-reference": {"x", "dt", "A", "B", "C", "D", "z", "dt_bias"},
}


@pytest.fixture(autouse=True)
def _recipe_on_the_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(RECIPE))
    yield
    for file in RECIPE.glob("*.py"):
        sys.modules.pop(file.stem, None)


# A file of the recipe as its own script imports it.
part: Callable[[str], Any] = importlib.import_module


def job_of(folder: Path, *, repeats: int = 0, **changes: Any) -> BenchJob:
    own = {"case": "small", "timing": {"warmup": 1, "repeats": repeats}, "labels": MANIFEST["label"]}
    # As the script itself reads it: lists are tuples.
    file = write_job(folder, "mamba-kernels", settings=SETTINGS | changes, world_size=1, **own)
    return load_json(file, BenchJob)


def test_every_operation_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    monkeypatch.setenv("TWINRUN_MAMBA_OBJECTS", str(tmp_path))
    job = job_of(tmp_path)
    rank.introduce(job)
    result = part("bench").bench(job)
    names = [one.name for one in result.calls]
    assert names == [name.replace("fp32", dtype) for dtype in ("fp32", "bf16") for name in RETURNED]
    assert {one.name: set(one.ours.errors) for one in result.calls[: len(RETURNED)]} == RETURNED
    assert all(largest_error(one.ours.errors)[1] <= one.allowed_error for one in result.calls)
    assert {why for one in result.calls for why in one.absent.values()} == {"upstream's kernels need a GPU"}
    assert {one.ours.milliseconds for one in result.calls} == {()}
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["call"]["name"] for line in lines] == names


@pytest.mark.parametrize("case", MANIFEST["scales"]["smoke"]["cases"])
def test_the_smoke_cases_give_names_that_the_labels_declare(case: str, tmp_path: Path) -> None:
    settings = MANIFEST["bench"]["options"] | MANIFEST["cases"][case] | {"modes": ["kernels"]}
    job = job_of(tmp_path, **settings)
    calls = part("bench").bench(job).calls
    assert {one.name for one in calls} < set(possible_names(job.labels))
    assert {one.labels["dtype"] for one in calls} == set(settings["dtypes"])
    emulated = {"emulated-32", "emulated-64"}
    assert {one.labels["backend"] for one in calls} == ({"reference"} if case.startswith("ssd") else emulated)
    beside = {one.labels["operation"] for one in calls if one.baselines}
    assert beside == ({"scan"} if settings["eager"] else set())


def test_the_scan_in_operations_of_torch_keeps_every_state(tmp_path: Path) -> None:
    job = job_of(tmp_path, eager=True, operations=("scan",), dtypes=("fp16",), length=128)
    forward = part("bench").bench(job).calls[0]
    (eager,) = forward.baselines
    assert (eager.name, eager.version) == ("torch", torch.__version__)
    assert largest_error(eager.errors)[1] <= forward.allowed_error
    states = 4 * 128 * SETTINGS["batch"] * SETTINGS["channels"] * SETTINGS["states"]
    assert eager.kept_bytes is not None
    # The decay, the state, and B and C of every channel, of each step.
    assert eager.kept_bytes > 4 * states
    # The kernels keep a state every 32 steps.
    assert forward.ours.kept_bytes == states // 32


def test_the_least_work_is_what_restatements_are_derived_from() -> None:
    published = tomllib.loads((RECIPE / "published.toml").read_text(encoding="utf-8"))
    derivations = {one["id"]: one["here"]["derivation"] for one in published["claim"] if "here" in one}
    asked = MANIFEST["cases"]["2x4096x5376x16"]
    elements = asked["batch"] * asked["length"] * asked["channels"]
    for phase, resource in (("forward", "exp2"), ("backward", "fp32")):
        _, _, instructions, special = part("scan").LEAST[phase]
        each = {"exp2": asked["states"] + special, "fp32": asked["states"] * instructions}[resource]
        assert derivations[f"scan-{phase}-mi250"].startswith(f"{elements * each / 1e9:.6f} / (181 / ")


def test_times_are_taken_when_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    monkeypatch.setenv("TWINRUN_MAMBA_OBJECTS", str(tmp_path))
    modes = ("kernels", "inference", "accumulated", "call")
    job = job_of(tmp_path, repeats=2, modes=modes, dtypes=("bf16",), operations=("conv", "update"))
    result = part("bench").bench(job)
    assert {one.labels["mode"] for one in result.calls} == set(modes)
    assert {len(one.ours.milliseconds) for one in result.calls} == {2}
    assert all(time > 0 for one in result.calls for time in one.ours.milliseconds)


@pytest.mark.parametrize("operation", ["scan", "conv"])
@pytest.mark.parametrize("damage", ["output", "gradient", "not a number"])
def test_a_wrong_kernel_is_seen(operation: str, damage: str, tmp_path: Path) -> None:
    made = part("bench").OPERATIONS[operation](Session(job_of(tmp_path)), SETTINGS, torch.float32)
    right = part("ours").function(operation, "reference")

    def wrong(**tensors: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = right(**tensors)
        if damage == "gradient":
            last = list(tensors.values())[-1]
            return out + 0.1 * (last - last.detach())[:, None]
        spoilt = out.detach().clone()
        spoilt[0, 0, -1] += torch.nan if damage == "not a number" else 1.0
        return out + (spoilt - out.detach())

    assert max(error for phase in made.distances(right).values() for error in phase.values()) < 1e-5
    tensor, error = largest_error(made.distances(wrong)["backward" if damage == "gradient" else "forward"])
    assert error > 1e-2
    assert tensor == (list(made.inputs)[-1] if damage == "gradient" else "out")


def test_a_step_that_leaves_the_state_behind_is_seen(tmp_path: Path) -> None:
    made = part("update").Update(Session(job_of(tmp_path)), SETTINGS, torch.float32)
    right = part("ours").function("update", "reference")
    assert max(made.distances(right)["step"].values()) < 1e-5
    kept = made.distances(lambda **tensors: right(**tensors | {"conv_state": tensors["conv_state"].clone()}))
    assert kept["step"]["out"] < 1e-5
    assert kept["step"]["conv_state"] > 0.1


@pytest.mark.parametrize("option", ["dtypes", "operations", "modes"])
def test_unknown_names_are_refused_before_anything_runs(option: str) -> None:
    with pytest.raises(InputError, match=f"--set options.{option}: unknown") as caught:
        part("bench").check(SETTINGS | {option: ("nope",)})
    assert "found: nope" in str(caught.value)
    assert "allowed: " in str(caught.value)


def test_upstream_that_is_broken_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "causal_conv1d.py").write_text("raise ImportError('undefined symbol: _ZN')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ImportError, match="undefined symbol"):
        part("upstream").function("conv")


def test_the_script_runs_by_itself(tmp_path: Path) -> None:
    job_of(tmp_path, operations=("conv",))
    path = os.pathsep.join(map(str, (ROOT / "src", *PACKAGES)))
    environment = os.environ | {"PYTHONPATH": path, "TWINRUN_MAMBA_OBJECTS": str(tmp_path)}
    command = [sys.executable, str(RECIPE / "bench.py"), "--job", str(tmp_path / "job.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "conv-forward-bf16-reference" in done.stdout
    assert load_json(tmp_path / "result.json", BenchResult).libraries["torch"] == torch.__version__
