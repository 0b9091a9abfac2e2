"""How ranks end: by exit status, traceback, and torchrun's report; and what the meter refuses."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("composer")

import torch

from tests.ranks import environment
from tests.train.small import GLOBAL_BATCH, MakeJob, job_file, launch
from twinrun.foundation.errors import RunError
from twinrun.protocol.job import OUT_OF_MEMORY, REFUSED
from twinrun.train.metrics import Meter

FRAME = """
import atexit, time, torch
from twinrun.foundation.errors import MachineError
from twinrun.protocol.job import Result
from twinrun.train import training

def train(job):
    {body}

atexit.register(print, "handled")
training.main(loop=train)
print("further")
"""
# More than any address space: the allocator itself refuses.
TOO_MUCH = "torch.empty(2**60, dtype=torch.uint8)"


def script(folder: Path, body: str) -> Path:
    path = folder / "train.py"
    path.write_text(FRAME.format(body=body))
    return path


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (TOO_MUCH, OUT_OF_MEMORY, "allocate memory"),
        ("raise MachineError('disk full')", REFUSED, "error: disk full"),
        ("raise ValueError('broken on purpose')", 1, "ValueError: broken on purpose"),
        ("return Result(point=job.point, device_name='cpu', libraries={{}})", 0, ""),
    ],
)
def test_each_end_has_its_status_and_its_words(
    make_job: MakeJob, tmp_path: Path, body: str, status: int, said: str
) -> None:
    job = make_job()
    ended = launch(script(tmp_path, body.replace("{{}}", "{}")), job)
    assert ended.returncode == status
    assert said in ended.stderr
    assert (Path(job.out) / "result.json").exists() == (status == 0)
    # A rank that is done runs its exit handlers and goes no further.
    assert ended.stdout == ("" if status else "handled\n")


def test_sigterm_ends_a_rank_at_once(make_job: MakeJob, tmp_path: Path) -> None:
    path = script(tmp_path, "print('ready', flush=True); time.sleep(60)")
    command = [sys.executable, str(path), "--job", str(job_file(make_job()))]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.wait(timeout=50) == -signal.SIGTERM


def test_a_loss_that_is_no_number_ends_the_run(make_job: MakeJob) -> None:
    meter = Meter(make_job(), torch.device("cpu"))
    meter.start()
    meter.add_loss(torch.tensor(float("nan")), GLOBAL_BATCH)
    with pytest.raises(RunError, match="devices=1, step 1: the loss is not finite"):
        meter.end_step()
