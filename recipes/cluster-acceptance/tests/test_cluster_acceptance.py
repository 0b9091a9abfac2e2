"""Planted faults: each is found by its check, at its node; a missing tool is never a pass."""

from __future__ import annotations

import importlib
import os
import random
import stat
import sys
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks, write_job
from twinrun.foundation.manifest import load_json
from twinrun.manifests.vendor import load_gpus
from twinrun.protocol.checks import ChecksResult
from twinrun.protocol.job import PowerReading
from twinrun.protocol.measurements import Check
from twinrun.train.checks import CheckError, UndecidedError

RECIPE = Path(__file__).parents[1]
ROOT = RECIPE.parents[1]
MANIFEST = tomllib.loads((RECIPE / "recipe.toml").read_text(encoding="utf-8"))
SPECS = {one["id"]: one for one in MANIFEST["checks"]["check"]}
torch_needed = pytest.mark.skipif(find_spec("torch") is None, reason="needs the packages of a stack")


@pytest.fixture(autouse=True)
def _recipe_on_the_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(RECIPE))
    yield
    for file in RECIPE.glob("*.py"):
        sys.modules.pop(file.stem, None)


PLANT = """
import os, pathlib, sys
import peers, workers, messages, performance, training, storage
from acceptance import CHECKS
from twinrun.train import checks
RANK = int(os.environ["RANK"])
HOME = pathlib.Path(__file__).parent
for module in (peers, workers, messages, performance, training, storage):
    module.host = lambda: f"node-{RANK}"
batch, read = training.batch, storage.read_file
RATES = {"node-0": 10.0, "node-1": 1.0, "node-2": 12.0, "node-3": 13.0}
"""
MESSAGE = "messages.message = lambda r, n: messages.pattern(r, n) + (RANK == 1)"
# The check that finds a fault, on how many nodes, and the fault.
FAULTS = {
    "clock": ("enumerate-workers", 3, "workers.clock = lambda: __import__('time').time() + 90 * (RANK == 1)"),
    "name": ("enumerate-workers", 2, "workers.host = lambda: 'node-1'; workers.BOOT = HOME / f'boot-{RANK}'"),
    "mtu": ("network-interfaces", 3, "workers.NETWORK = HOME / ('low' if RANK == 1 else 'net')"),
    "down": ("network-interfaces", 2, "workers.NETWORK = HOME / ('down' if RANK == 1 else 'net')"),
    "message": ("rank-communication", 2, MESSAGE),
    "sum": ("collective-function", 2, MESSAGE),
    "weights": ("model-distribution", 3, "storage.received = lambda tensor: tensor + (RANK == 1)"),
    "loss": ("train-many-nodes", 3, "training.batch = lambda s: [x * 2 ** (RANK == 1) for x in batch(s)]"),
    "shard": ("data-partitioning", 2, "storage.read_file = lambda file: b'x' * (RANK == 1) + read(file)"),
    "slow": ("link-performance", 2, "performance.measured = lambda *_: RATES"),
}


def run(folder: Path, check: str, world_size: int, plant: str) -> Check:
    for name, mtu, state in (("net", 9000, "up"), ("low", 1400, "up"), ("down", 9000, "down")):
        interface = folder / name / "lo"
        interface.mkdir(parents=True)
        (interface / "mtu").write_text(f"{mtu}\n")
        (interface / "operstate").write_text(f"{state}\n")
    for rank in range(world_size):
        (folder / f"boot-{rank}").write_text(f"{rank}\n")
    script = folder / "planted.py"
    script.write_text(f"{PLANT}{plant}\nchecks.main(CHECKS)\n")
    checks = [SPECS[check] | {"timeout": 200}]
    job = write_job(folder, "cluster-acceptance", world_size=world_size, checks=checks)
    variables = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(RECIPE)}
    ended = run_ranks(script, "--job", str(job), world_size=world_size, variables=variables)
    assert ended.returncode == 0, ended.stderr[-3000:]
    (found,) = load_json(folder / "result.json", ChecksResult).checks
    return found


@torch_needed
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_at_its_node(fault: str, tmp_path: Path) -> None:
    check, world_size, plant = FAULTS[fault]
    found = run(tmp_path, check, world_size, plant)
    assert (found.outcome, found.nodes) == ("fail", ("node-1",)), found
    assert found.remedy


def program(folder: Path, name: str, body: str) -> None:
    file = folder / name
    file.write_text(f"#!/bin/sh\n{body}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return importlib.import_module("scheduler")


@pytest.mark.parametrize("name", ["slurm_gres", "mpi_launch", "scheduling_priority", "qos_enforcement"])
def test_a_missing_tool_is_unknown(name: str, scheduler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/none")
    with pytest.raises(UndecidedError, match="is not installed") as caught:
        getattr(scheduler, name)(None)
    assert caught.value.remedy


def test_a_hung_tool_fails(scheduler: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "SECONDS", 0.3)
    program(tmp_path, "scontrol", "exec sleep 60")
    with pytest.raises(CheckError, match=r"scontrol gave no answer in 0\.3 s"):
        scheduler.scheduling_priority(None)


def test_a_qos_without_limits_fails(scheduler: Any, tmp_path: Path) -> None:
    settings = ("PriorityType = priority/multifactor", "PreemptType = preempt/qos")
    settings += ("AccountingStorageEnforce = associations,limits,qos",)
    program(tmp_path, "scontrol", "\n".join(f"echo '{one}'" for one in settings))
    scheduler.scheduling_priority(None)
    program(tmp_path, "sacctmgr", "echo '|||'")
    with pytest.raises(CheckError, match="no QoS has a limit"):
        scheduler.qos_enforcement(None)
    program(tmp_path, "sacctmgr", "echo 'cpu=4|||'")
    scheduler.qos_enforcement(None)


@pytest.mark.parametrize(
    ("check", "tool", "answer", "says"),
    [
        pytest.param(
            *("slurm_gres", "scontrol", "   Gres=gpu:h200:99(S:0-1)", "GRES says 99 GPUs"), marks=torch_needed
        ),
        ("mpi_launch", "mpirun", "here", "two processes"),
        ("scheduling_priority", "scontrol", "PriorityType = priority/basic", "PriorityType is"),
        ("qos_enforcement", "scontrol", "PriorityType = priority/basic", "limits are not enforced"),
    ],
)
def test_a_wrong_answer_of_a_tool_fails(
    check: str, tool: str, answer: str, says: str, scheduler: Any, tmp_path: Path
) -> None:
    program(tmp_path, tool, f"echo '{answer}'")
    with pytest.raises(CheckError, match=says):
        getattr(scheduler, check)(None)


def test_mpirun_does_not_ask_the_scheduler_of_the_ranks(
    scheduler: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an allocation it would wait for processors that the ranks have."""
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    program(tmp_path, "mpirun", 'test -z "$SLURM_JOB_ID" && echo here here')
    scheduler.mpi_launch(None)


def test_a_narrow_link_is_found(tmp_path: Path) -> None:
    for name, width in (("a", "16"), ("b", "8")):
        (tmp_path / name).mkdir()
        for file, value in (("class", "0x030200"), ("current_link_width", width), ("max_link_width", "16")):
            (tmp_path / name / file).write_text(f"{value}\n")
    assert importlib.import_module("hardware").narrow_links(tmp_path) == (["b x8 of x16"], 2)


@pytest.mark.parametrize(
    ("node", "allowed", "wrong"),
    [("2", "0-1,3", True), ("1", "0-1,3", False), ("3", "3", False), ("-1", "0", False)],
)
def test_memory_of_another_die_is_named(tmp_path: Path, node: str, allowed: str, wrong: bool) -> None:
    (tmp_path / "numa_node").write_text(f"{node}\n")
    (tmp_path / "status").write_text(f"Name:\tpython\nMems_allowed:\tff\nMems_allowed_list:\t{allowed}\n")
    found = importlib.import_module("hardware").distant_memory(tmp_path, tmp_path / "status")
    assert (f"NUMA node {node}" in found) == wrong


@pytest.mark.parametrize(
    ("row", "peak", "mhz", "said"),
    [
        ("mi300x", 2100, [1260, 1255, 1265, 1250], "device 0 1260 MHz (60% of the peak)"),
        ("mi300x", 2100, [1260, 1255, 1265, 1250], "row mi300x of images/gpus.toml has 2100 MHz; all are"),
        ("mi300x", 2100, [1700, 1700, 900, 1690], "!clocked below its peers: device 2; "),
        ("h200", 1980, [1980, 1980, 1980, 1395], "!clocked below its peers: device 3; "),
        ("h200", 1980, [1980, 1905, 1980, 1950], "row h200 of images/gpus.toml has 1980 MHz"),
        ("h200", 1980, [1980, 900], "2 of the 3 devices that a comparison needs"),
        ("b200", None, [1800, 1800, 1790], "row b200 of images/gpus.toml names no clock"),
        (None, None, [1800, 1800, 1790], "no row of images/gpus.toml is this GPU"),
    ],
)
def test_a_clock_under_load_is_held_against_its_peers_and_said_beside_the_table(
    row: str | None, peak: float | None, mhz: list[float], said: str
) -> None:
    if row:
        assert load_gpus(ROOT)[row].clock_mhz == peak
    clocks, reading = importlib.import_module("clocks"), PowerReading(gpu=row, clock_mhz=peak)
    played = {f"device {place}": value for place, value in enumerate(mhz)}
    if not said.startswith("!"):
        assert said in clocks.judged(played, reading)
        return
    with pytest.raises(CheckError, match=said[1:]) as caught:
        clocks.judged(played, reading)
    assert "row " in str(caught.value)
    assert caught.value.remedy


def test_the_clocks_of_a_played_node_are_those_under_load(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = importlib.import_module("clocks")
    for name, seconds in (("SETTLED_SECONDS", 0.1), ("SECONDS", 0.3)):
        monkeypatch.setattr(clocks, name, seconds)
    mhz = {"device 0": 132.0, "device 1": 132.0, "device 2": 0.0}

    def busy() -> None:
        mhz.update({"device 0": 1260.0, "device 1": 1700.0})

    sensors = {name: lambda name=name: mhz[name] or 1 / 0 for name in mhz}
    assert clocks.medians(sensors, busy) == {"device 0": 1260, "device 1": 1700}


def test_the_slow_one_of_alike_peers_is_found() -> None:
    peers = importlib.import_module("peers")

    def slow(**values: float) -> set[str]:
        return set(peers.slow({name: [value] for name, value in values.items()}))

    alike = {f"node{place}": 10 + place / 100 for place in range(8)}
    assert not slow(**alike)
    assert slow(**alike | {"node3": 8.0}) == {"node3"}
    # Two peers say little, so that it takes half of what they have.
    assert not slow(a=1.0, b=1.0, c=0.6)
    assert slow(a=1.0, b=1.1, c=0.4) == {"c"}
    peers.demand_peers({"a": [1.0], "b": [1.0], "c": [1.0]}, "GB/s")
    with pytest.raises(UndecidedError, match="2 of the 3 nodes"):
        peers.demand_peers({"a": [1.0], "b": [1.0]}, "GB/s")


@pytest.mark.parametrize("disturbed", [0.3, 0.6, 0.9])
def test_what_other_work_explains_is_no_fault(disturbed: float) -> None:
    """Alike nodes that are kept busy: a round measures a share of them at a fraction of their rate."""
    peers, draw, rounds = importlib.import_module("peers"), random.Random(7), 8
    alarms = found = 0
    for _ in range(300):
        samples: dict[str, list[float]] = {f"node-{place}": [] for place in range(3)}
        bad: dict[str, list[float]] = {name: [] for name in samples}
        accused = caught = True
        for _ in range(rounds):
            for name, own in samples.items():
                rate = 0.8 * (draw.uniform(0.1, 0.7) if draw.random() < disturbed else draw.uniform(0.9, 1.0))
                own.append(rate)
                bad[name].append(rate * (0.02 if name == "node-2" else 1))
            # As soon as the spread explains it, nothing is measured any more.
            accused, caught = accused and bool(peers.slow(samples)), caught and bool(peers.slow(bad))
        alarms, found = alarms + accused, found + caught
    assert (alarms, found) == (0, 300)


def test_the_checks_are_those_of_the_publication() -> None:
    assert len(SPECS) == 18
    assert list(importlib.import_module("acceptance").CHECKS) == list(SPECS)
