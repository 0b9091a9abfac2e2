"""The benchmark script itself, by the reference: what it refuses and what it reports."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("torch") is None:
    pytest.skip("the packages of a stack are not installed", allow_module_level=True)

import torch

from twinrun.foundation.errors import InputError
from twinrun.foundation.manifest import load_json
from twinrun.protocol.bench import BenchJob, BenchResult, largest_error, possible_names
from twinrun.train import rank
from twinrun.train.bench import Session

RECIPE = Path(__file__).parents[1]
ROOT = RECIPE.parents[1]
PACKAGES = (RECIPE / "kernels/src", ROOT / "kernels/shared/src")
SETTINGS: dict[str, Any] = {
    "operations": ("scan", "conv", "update", "ssd"),
    "dtypes": ("fp32", "bf16"),
    "modes": ("kernels",),
    "batch": 2,
    "length": 9,
    "channels": 6,
    "states": 4,
    "heads": 4,
    "head_size": 8,
    "chunk": 16,
    "groups": 2,
    "width": 4,
    "token_major": True,
    "eager": False,
}

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
    for folder in (RECIPE, *PACKAGES):
        monkeypatch.syspath_prepend(str(folder))
    yield
    for name in ("bench", "scan", "conv", "update", "ssd", "ours", "upstream", "operation"):
        sys.modules.pop(name, None)


def part(name: str) -> Any:
    """Return a file of the recipe as its own script imports it."""
    return importlib.import_module(name)


def job_of(folder: Path, *, repeats: int = 0, **changes: Any) -> BenchJob:
    job = {
        "recipe": "mamba-kernels",
        "point": "small",
        "case": "small",
        "settings": SETTINGS | changes,
        "timing": {"warmup": 1, "repeats": repeats},
        "labels": MANIFEST["label"],
        "world_size": 1,
        "accelerator": False,
        "out": str(folder),
        "metrics": str(folder / "metrics.jsonl"),
        "attempt": "1",
    }
    # As the script itself reads it: lists are tuples.
    return BenchJob.model_validate_json(json.dumps(job))


def test_every_operation_is_checked_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None
) -> None:
    monkeypatch.setenv("TWINRUN_MAMBA_OBJECTS", str(tmp_path))
    bench = part("bench")

    job = job_of(tmp_path)
    rank.introduce(job)
    result = bench.bench(job)
    names = [one.name for one in result.calls]
    assert names == [
        f"{name}-{dtype}-reference"
        for dtype in ("fp32", "bf16")
        for name in (key.removesuffix("-fp32-reference") for key in RETURNED)
    ]
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
        done = {
            "exp2": elements * (asked["states"] + special),
            "fp32": elements * asked["states"] * instructions,
        }
        assert derivations[f"scan-{phase}-mi250"].startswith(f"{done[resource] / 1e9:.6f} / (181 / ")


def test_times_are_taken_when_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    monkeypatch.setenv("TWINRUN_MAMBA_OBJECTS", str(tmp_path))
    bench = part("bench")

    modes = ("kernels", "inference", "accumulated", "call")
    result = bench.bench(
        job_of(tmp_path, repeats=2, modes=modes, dtypes=("bf16",), operations=("conv", "update"))
    )
    assert {one.labels["mode"] for one in result.calls} == set(modes)
    assert {len(one.ours.milliseconds) for one in result.calls} == {2}
    assert all(time > 0 for one in result.calls for time in one.ours.milliseconds)


@pytest.mark.parametrize("operation", ["scan", "conv"])
@pytest.mark.parametrize("damage", ["output", "gradient", "not a number"])
def test_a_wrong_kernel_is_seen(operation: str, damage: str, tmp_path: Path) -> None:
    bench = part("bench")
    ours = part("ours")

    made = bench.OPERATIONS[operation](Session(job_of(tmp_path)), SETTINGS, torch.float32)
    right = ours.function(operation, "reference")

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
    update = part("update")
    ours = part("ours")

    made = update.Update(Session(job_of(tmp_path)), SETTINGS, torch.float32)
    right = ours.function("update", "reference")
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


def test_upstream_that_is_installed_but_broken_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "causal_conv1d.py").write_text("raise ImportError('undefined symbol: _ZN')")
    monkeypatch.syspath_prepend(str(tmp_path))
    upstream = part("upstream")

    with pytest.raises(ImportError, match="undefined symbol"):
        upstream.function("conv")


def test_the_script_runs_by_itself(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(job_of(tmp_path, operations=("conv",)).model_dump_json())
    path = os.pathsep.join(map(str, (ROOT / "src", *PACKAGES)))
    environment = os.environ | {"PYTHONPATH": path, "TWINRUN_MAMBA_OBJECTS": str(tmp_path)}
    command = [sys.executable, str(RECIPE / "bench.py"), "--job", str(tmp_path / "job.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "conv-forward-bf16-reference" in done.stdout
    assert load_json(tmp_path / "result.json", BenchResult).libraries["torch"] == torch.__version__
