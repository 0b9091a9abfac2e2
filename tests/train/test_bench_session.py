"""How a session measures: what it refuses, what it writes, how calls take turns, and many ranks as one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the packages of a stack")


from tests.train.small import bench_job, launch
from twinrun.foundation.errors import InputError, RunError
from twinrun.foundation.manifest import load_json
from twinrun.protocol.bench import BenchJob, BenchResult, CallLine, Work
from twinrun.train import rank
from twinrun.train.bench import CheckedCall, Session

LABELS = (
    {"name": "operation", "values": ("sum", "product")},
    {"name": "dtype", "values": ("fp32", "bf16")},
    {"name": "mode", "values": ("kernels", "call"), "default": "kernels"},
)
ALL_REDUCE = """
import torch
import torch.distributed as dist

from twinrun.protocol.bench import BenchJob
from twinrun.train import rank
from twinrun.train.measure import distance
from twinrun.train.bench import CheckedCall, Session, bus_bytes_of_all_reduce


def bench(job):
    session = Session(job)
    buffer = torch.randn(job.settings["elements"], generator=session.generator)
    parts = [torch.empty_like(buffer) for _ in range(job.world_size)]
    dist.all_gather(parts, buffer)
    exact = sum(part.double() for part in parts)

    def checked(name, reduce):
        return CheckedCall(
            implementation=name,
            version=torch.__version__,
            call=lambda: reduce(buffer.clone()),
            errors={"out": distance(reduce(buffer.clone()), exact)},
        )

    session.measure(
        labels={"operation": "sum", "dtype": "fp32"},
        title="all-reduce",
        allowed_error=1e-6,
        ours=checked("ring", ring),
        baselines=[checked("gathered", gathered), checked("again", ring)],
        absent={"tree": "not built"},
        bus_bytes=bus_bytes_of_all_reduce(buffer.nbytes, job.world_size),
    )
    print("rank", dist.get_rank(), "drew", float(buffer[0]), flush=True)
    return session.result()


def ring(buffer):
    dist.all_reduce(buffer)
    if dist.get_rank() == 1 and BROKEN:
        buffer[0] += 1000
    return buffer


def gathered(buffer):
    parts = [torch.empty_like(buffer) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, buffer)
    return sum(parts)


rank.run(bench, BenchJob)
raise AssertionError("a rank that is done ends at once: Gloo's threads may abort or block one that goes on")
"""


def job_of(folder: Path, **changes: Any) -> BenchJob:
    return bench_job(folder, labels=LABELS, **changes)


def checked_call(error: float = 0.0, **changes: Any) -> CheckedCall:
    values: dict[str, Any] = {
        "implementation": "i",
        "version": "1",
        "call": lambda: None,
        "errors": {"out": error},
    }
    return CheckedCall(**values | changes)


def measure(session: Session, **changes: Any) -> None:
    values: dict[str, Any] = {
        "labels": {"operation": "sum", "dtype": "fp32"},
        "title": "a sum",
        "allowed_error": 1e-5,
        "ours": checked_call(),
    }
    session.measure(**values | changes)


def test_a_call_is_named_after_its_labels_and_has_all_of_them(tmp_path: Path) -> None:
    job = job_of(tmp_path, repeats=2)
    rank.introduce(job)
    session = Session(job)
    measure(session, work=Work(formula="f", amounts={"copy": 8.0}))
    measure(session, labels={"operation": "sum", "dtype": "fp32", "mode": "call"}, clock="host")
    calls = session.result().calls
    assert [one.name for one in calls] == ["sum-fp32", "sum-fp32-call"]
    assert calls[0].labels == {"operation": "sum", "dtype": "fp32", "mode": "kernels"}
    assert calls[1].work is None
    assert [len(one.ours.milliseconds) for one in calls] == [2, 2]
    lines = [
        CallLine.model_validate_json(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ]
    assert [(line.point, line.attempt, line.call) for line in lines] == [("small", "1", one) for one in calls]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ({"operation": "sum", "dtype": "fp32", "shape": "x"}, "label shape: no label of this recipe"),
        ({"operation": "sun", "dtype": "fp32"}, "label operation: no value of this label"),
        ({"operation": "sum"}, "label dtype: no value of this label"),
    ],
)
def test_labels_that_the_recipe_does_not_declare_are_refused(
    tmp_path: Path, labels: dict[str, str], message: str
) -> None:
    with pytest.raises(InputError, match=message) as caught:
        measure(Session(job_of(tmp_path)), labels=labels)
    assert caught.value.allowed


def test_what_is_wrong_is_not_timed(tmp_path: Path) -> None:
    called: list[int] = []
    wrong = checked_call(0.5, call=lambda: called.append(1))
    with pytest.raises(RunError, match=r"relative distance 0\.5 of out"):
        measure(Session(job_of(tmp_path, repeats=3)), ours=wrong)
    assert not called


def all_reduce(folder: Path, *, broken: bool, **changes: Any) -> tuple[Any, BenchJob]:
    script = folder / "bench.py"
    script.write_text(ALL_REDUCE.replace("BROKEN", str(broken)))
    job = job_of(folder, world_size=2, **changes)
    return launch(script, job), job


def test_two_ranks_measure_an_all_reduce_as_one(tmp_path: Path) -> None:
    settings = {"elements": 1000}
    ended, _ = all_reduce(tmp_path, broken=False, repeats=5, settings=settings)
    assert ended.returncode == 0, ended.stderr
    (call,) = load_json(tmp_path / "result.json", BenchResult).calls
    assert call.name == "sum-fp32"
    assert call.bus_bytes == 4000
    assert [one.name for one in (call.ours, *call.baselines)] == ["ring", "gathered", "again"]
    assert all(
        len(one.milliseconds) == 5 and min(one.milliseconds) > 0 for one in (call.ours, *call.baselines)
    )
    # One line and one summary, though two ranks ran; and each drew inputs of its own.
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1
    assert ended.stdout.count("small sum-fp32: ring ") == 1
    drawn = [line.split()[-1] for line in ended.stdout.splitlines() if " drew " in line]
    assert len(set(drawn)) == 2


def test_what_one_rank_gets_wrong_all_refuse(tmp_path: Path) -> None:
    settings = {"elements": 1000}
    ended, _ = all_reduce(tmp_path, broken=True, repeats=1, settings=settings)
    assert ended.returncode != 0
    said = [line for line in ended.stderr.splitlines() if line.startswith("error: small, sum-fp32: ")]
    assert said == ["error: small, sum-fp32: the result is not the reference's"] * 2
    assert not (tmp_path / "result.json").exists()
