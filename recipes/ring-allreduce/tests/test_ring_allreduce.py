"""The benchmark under torchrun over Gloo: what it measures, what it refuses, and the published arithmetic."""

from __future__ import annotations

import importlib
import os
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the packages of a stack")

import numbers_to_sum
import torch
from algorithms import expected_bytes

from tests.ranks import run_ranks, write_job
from twinrun.foundation.manifest import load_json
from twinrun.protocol.bench import BenchResult

RECIPE = Path(__file__).parents[1]
MANIFEST = tomllib.loads((RECIPE / "recipe.toml").read_text(encoding="utf-8"))
OPTIONS: dict[str, Any] = MANIFEST["bench"]["options"]
COMPRESSIONS = ("bf16", "fp8", "int8", "int8-feedback")
OPTIONS_OF_TYPES = ("fp32", "bf16", "int32", "int64")


def launch(
    folder: Path, world_size: int, *, script: Path, **settings: Any
) -> subprocess.CompletedProcess[str]:
    own = {"case": "small", "timing": {"warmup": 1, "repeats": 2}, "labels": MANIFEST["label"]}
    settings = OPTIONS | {"bytes": 24000, "bucket_kib": 1} | settings
    job = write_job(folder, "ring-allreduce", settings=settings, world_size=world_size, **own)
    variables = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(RECIPE)}
    return run_ranks(script, "--job", str(job), world_size=world_size, variables=variables)


def test_four_ranks_on_two_nodes_measure_every_call(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"dtypes": OPTIONS_OF_TYPES, "compressions": COMPRESSIONS, "ranks_per_node": 2}
    ended = launch(tmp_path, 4, script=RECIPE / "bench.py", **settings)
    assert ended.returncode == 0, ended.stderr[-3000:]
    result = load_json(tmp_path / "result.json", BenchResult)
    calls = {call.name: call for call in result.calls}
    plain = {f"{name}-{dtype}" for name in ("ring", "naive", "two-level") for dtype in OPTIONS_OF_TYPES}
    assert calls.keys() == plain | {f"ring-fp32-{name}" for name in COMPRESSIONS}
    for name in plain:
        traffic = calls[name].traffic
        assert traffic is not None
        assert traffic.counted == (72000 if name.startswith("naive") else 36000), name
    for name in ("ring-int32", "naive-int32", "two-level-int64"):
        assert calls[name].ours.errors == {"sum": 0.0}
    errors = [calls[f"ring-fp32-{name}"].ours.errors["sum"] or 0 for name in ("int8-feedback", "int8", "fp8")]
    assert 0 < errors[0] < errors[1] < errors[2]
    assert {one.name for call in calls.values() for one in call.baselines} == {"library"}


WRONG = {
    "a sum that is off by one": "buffer.view(-1)[:1].add_(dist.get_rank() == 1)",
    "a link that carries too much": "bench.bench_links[0].sent_bytes += 50000",
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_ring_is_measured_as_wrong(wrong: str, tmp_path: Path) -> None:
    script = tmp_path / "planted.py"
    script.write_text(
        "import bench, reducers\n"
        "import torch.distributed as dist\n"
        "from twinrun.protocol.bench import BenchJob\n"
        "from twinrun.train import rank\n"
        "bench.bench_links = []\n"
        "made, right = bench.Links, reducers.Reducer.__call__\n"
        "def links():\n    bench.bench_links.append(made())\n    return bench.bench_links[0]\n"
        "def wrong(self, buffer):\n    right(self, buffer)\n"
        f"    if self.name == 'ours':\n        {WRONG[wrong]}\n"
        "bench.Links, reducers.Reducer.__call__ = links, wrong\n"
        "rank.run(bench.bench, BenchJob)\n"
    )
    ended = launch(tmp_path, 2, script=script, dtypes=["int32"], algorithms=["ring"])
    assert ended.returncode == 0, ended.stderr[-3000:]
    (call,) = load_json(tmp_path / "result.json", BenchResult).calls
    assert call.traffic is not None
    right = call.ours.errors == {"sum": 0.0}, call.traffic.counted == call.traffic.expected
    assert right == ("link" in wrong, "sum" in wrong)


# Records have it, and are judged by its allowed error; nothing computes it any more.
OF_OLDER_RECORDS = ("int8-entropy",)


def test_every_value_of_a_label_is_there() -> None:
    labels = {one["name"]: set(one["values"]) for one in MANIFEST["label"]}
    reducers = importlib.import_module("reducers")
    codecs = {name.removesuffix(reducers.FEEDBACK) for name in labels["compression"] - {"none"}}
    assert codecs == {*reducers.CODECS, *OF_OLDER_RECORDS}
    assert labels["dtype"] <= set(numbers_to_sum.DTYPES)


def test_the_published_arithmetic() -> None:
    assert expected_bytes("ring", 28_000_000_000, 8)[0] == 49e9
    for ranks in (2, 3, 8, 64):
        root, ring = (expected_bytes(name, 1000, ranks)[0] for name in ("naive", "ring"))
        assert root / ring == pytest.approx(ranks / 2)


@pytest.mark.parametrize("dtype", OPTIONS_OF_TYPES)
def test_an_error_is_seen_in_any_part(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numbers_to_sum, "PIECE", 100)
    total = torch.zeros(250, dtype=torch.float64 if dtype in ("fp32", "bf16") else torch.int64)
    for rank in range(3):
        part = torch.empty(250, dtype=numbers_to_sum.DTYPES[dtype])
        numbers_to_sum.fill(part, rank=rank, seed=7)
        total += part
    found = total.to(numbers_to_sum.DTYPES[dtype])
    assert numbers_to_sum.error(found, ranks=3, seed=7) < (5e-3 if dtype == "bf16" else 1e-6)
    found[249] += 4
    assert numbers_to_sum.error(found, ranks=3, seed=7) > 3e-3
