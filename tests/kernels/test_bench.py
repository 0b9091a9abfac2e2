"""The benchmark script itself, by the reference: what it refuses, what it reports, and how it measures."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.records import ROOT

if find_spec("torch") is None:
    pytest.skip("the packages of a stack are not installed", allow_module_level=True)

import torch

from twinrun.benchmark import BenchJob, BenchResult, Work, furthest
from twinrun.errors import InputError, RunError
from twinrun.manifest import load_json
from twinrun.train.bench import Candidate, Clock, Session, distance, poisoned

pytestmark = pytest.mark.train
RECIPE = ROOT / "recipes" / "mamba-kernels"
SETTINGS: dict[str, Any] = {
    "operations": ("scan", "conv", "update"),
    "elements": ("fp32", "bf16"),
    "ways": ("kernels",),
    "batch": 2,
    "length": 9,
    "channels": 6,
    "states": 4,
    "groups": 2,
    "width": 4,
    "token_major": True,
}

# What is held against the reference: outputs, and gradients by what they are of.
RETURNED = {
    "scan-forward-fp32-reference": {"out"},
    "scan-backward-fp32-reference": {"u", "delta", "A", "B", "C", "D", "z", "delta_bias"},
    "conv-forward-fp32-reference": {"out"},
    "conv-backward-fp32-reference": {"x", "weight", "bias"},
    "update-step-fp32-reference": {"out", "conv_state"},
}


@pytest.fixture(autouse=True)
def _recipe_on_the_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for folder in (RECIPE, RECIPE / "kernels" / "src"):
        monkeypatch.syspath_prepend(str(folder))
    yield
    for name in ("bench", "scan", "conv", "ours", "upstream", "operation"):
        sys.modules.pop(name, None)


def part(name: str) -> Any:
    """Return a file of the recipe as its own script imports it."""
    return importlib.import_module(name)


def job_of(folder: Path, *, repeats: int = 0, **changes: Any) -> BenchJob:
    return BenchJob.model_validate(
        {
            "recipe": "mamba-kernels",
            "point": "small",
            "settings": SETTINGS | changes,
            "bench": {"warmup": 1, "repeats": repeats},
            "accelerator": False,
            "out": str(folder),
            "metrics": str(folder / "metrics.jsonl"),
        }
    )


def test_every_operation_is_checked_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None
) -> None:
    monkeypatch.setenv("TWINRUN_MAMBA_OBJECTS", str(tmp_path))
    bench = part("bench")

    result = bench.bench(job_of(tmp_path))
    names = [one.id for one in result.measurements]
    assert names == [
        f"{name}-{element}-reference"
        for element in ("fp32", "bf16")
        for name in ("scan-forward", "scan-backward", "conv-forward", "conv-backward", "update-step")
    ]
    assert {one.id: set(one.ours.errors) for one in result.measurements[:5]} == RETURNED
    assert all(furthest(one.ours.errors)[1] <= one.allowed_error for one in result.measurements)
    assert {one.baseline_absent for one in result.measurements} == {"upstream's kernels need a GPU"}
    assert {one.ours.milliseconds for one in result.measurements} == {()}
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["measurement"]["id"] for line in lines] == names


def test_times_are_taken_when_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    monkeypatch.setenv("TWINRUN_MAMBA_OBJECTS", str(tmp_path))
    bench = part("bench")

    ways = ("kernels", "inference", "accumulated", "call")
    result = bench.bench(
        job_of(tmp_path, repeats=2, ways=ways, elements=("bf16",), operations=("conv", "update"))
    )
    assert {one.way for one in result.measurements} == set(ways)
    assert {len(one.ours.milliseconds) for one in result.measurements} == {2}
    assert all(time > 0 for one in result.measurements for time in one.ours.milliseconds)


def test_inputs_are_fresh_in_every_run_and_repeat_by_seed(tmp_path: Path) -> None:
    seeds = {Session(job_of(tmp_path)).seed for _ in range(3)}
    assert len(seeds) == 3
    job = job_of(tmp_path)
    fixed = job.model_copy(update={"bench": job.bench.model_copy(update={"seed": 5})})
    first, second = (torch.randn(3, generator=Session(fixed).generator) for _ in range(2))
    assert torch.equal(first, second)


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
    tensor, error = furthest(made.distances(wrong)["backward" if damage == "gradient" else "forward"])
    assert error > 1e-2
    assert tensor == (list(made.inputs)[-1] if damage == "gradient" else "out")


def test_a_step_that_leaves_the_state_behind_is_seen(tmp_path: Path) -> None:
    conv = part("conv")
    ours = part("ours")

    made = conv.Step(Session(job_of(tmp_path)), SETTINGS, torch.float32)
    right = ours.function("update", "reference")
    assert max(made.distances(right)["step"].values()) < 1e-5
    kept = made.distances(lambda **tensors: right(**tensors | {"conv_state": tensors["conv_state"].clone()}))
    assert kept["step"]["out"] < 1e-5
    assert kept["step"]["conv_state"] > 0.1


@pytest.mark.parametrize("option", ["elements", "operations", "ways"])
def test_unknown_names_are_refused_before_anything_runs(option: str) -> None:
    with pytest.raises(InputError, match=f"--set options.{option}: unknown") as caught:
        part("bench").check(SETTINGS | {option: ("nope",)})
    assert "found: nope" in str(caught.value)
    assert "allowed: " in str(caught.value)


def test_what_is_wrong_is_not_timed(tmp_path: Path) -> None:
    session, called = Session(job_of(tmp_path, repeats=3)), []
    wrong = Candidate(implementation="i", version="1", call=lambda: called.append(1), errors={"out": 0.5})
    with pytest.raises(RunError, match=r"relative distance 0\.5 of out"):
        session.measure(
            name="n",
            operation="o",
            element="fp32",
            way="kernels",
            work=Work(formula="f", amounts={}),
            allowed_error=1e-5,
            ours=wrong,
            baseline=None,
        )
    assert not called


def test_memory_that_is_not_written_shows() -> None:
    with poisoned():
        assert torch.empty(1000).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


def test_distances() -> None:
    reference = torch.tensor([3.0, 4.0])
    assert distance(reference, reference) == 0
    assert distance(torch.tensor([3.0, 4.5]), reference) == pytest.approx(0.1)
    assert distance(torch.tensor([3.0, torch.nan]), reference) == float("inf")
    assert distance(torch.zeros(2), torch.zeros(2)) == 0


def test_calls_take_turns_and_nobody_is_always_second() -> None:
    order: list[str] = []
    clock = Clock(torch.device("cpu"), warmup=1, repeats=3)
    times = clock.times([lambda: order.append("a"), lambda: order.append("b")])
    assert "".join(order) == "ab" + "ab" + "ba" + "ab"
    assert [len(one) for one in times] == [3, 3]


@pytest.mark.parametrize(("slept", "cycles"), [(0.0, 1_000_000), (0.0005, 3_000_000), (0.01, 6_000_000)])
def test_a_call_that_takes_the_host_longer_gets_a_longer_head_start(slept: float, cycles: int) -> None:
    clock = Clock(torch.device("cpu"), warmup=5, repeats=0)
    found = clock._warm(lambda: time.sleep(slept))
    assert cycles <= found <= max(cycles, 6_000_000 if slept else 0)


def test_upstream_that_is_installed_but_broken_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "selective_scan_cuda.py").write_text("raise ImportError('undefined symbol: _ZN')")
    monkeypatch.syspath_prepend(str(tmp_path))
    upstream = part("upstream")

    with pytest.raises(ImportError, match="undefined symbol"):
        upstream.function("scan")


def test_the_version_of_upstream_built_in_place_is_read_from_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mamba_ssm").mkdir()
    (tmp_path / "mamba_ssm/__init__.py").write_text('__version__ = "2.3.2.post1"\n\nimport nothing_like_it\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    upstream = part("upstream")

    assert upstream.package_version("scan") == "2.3.2.post1"


def test_the_script_runs_by_itself(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(job_of(tmp_path, operations=("conv",)).model_dump_json())
    path = os.pathsep.join([str(ROOT / "src"), str(RECIPE / "kernels" / "src")])
    environment = os.environ | {"PYTHONPATH": path, "TWINRUN_MAMBA_OBJECTS": str(tmp_path)}
    command = [sys.executable, str(RECIPE / "bench.py"), "--job", str(tmp_path / "job.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "conv-forward-bf16-reference" in done.stdout
    assert load_json(tmp_path / "result.json", BenchResult).libraries["torch"] == torch.__version__
