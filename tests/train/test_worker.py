"""How ranks fail: by exit status, traceback and torchrun's report."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("composer")


from tests.ranks import environment
from tests.train.small import MakeJob, launch_by_torchrun
from twinrun.protocol.job import OUT_OF_MEMORY, REFUSED

FRAME = """
import time, torch
from twinrun.train import training

def train(job):
    {body}

training.main(loop=train)
"""


def script(folder: Path, body: str) -> Path:
    path = folder / "train.py"
    path.write_text(FRAME.format(body=body))
    return path


def test_memory_that_ran_out_has_its_own_status(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job()
    # More than any address space: the allocator itself refuses.
    ended = launch_by_torchrun(script(tmp_path, "torch.empty(2**60, dtype=torch.uint8)"), job)
    assert ended.returncode != 0
    assert f"exitcode  : {OUT_OF_MEMORY} " in ended.stderr
    assert "rank      : 0 " in ended.stderr
    assert not (Path(job.out) / "result.json").exists()


def test_a_machine_that_refuses_has_its_own_status(make_job: MakeJob, tmp_path: Path) -> None:
    source = "from twinrun.foundation.errors import MachineError; raise MachineError('disk full')"
    ended = launch_by_torchrun(script(tmp_path, source), make_job())
    assert f"exitcode  : {REFUSED} " in ended.stderr
    assert "error: disk full" in ended.stderr


def test_a_rank_that_is_done_runs_its_exit_handlers_and_goes_no_further(
    make_job: MakeJob, tmp_path: Path
) -> None:
    (tmp_path / "job.json").write_text(make_job().model_dump_json())
    path = script(tmp_path, "return Result(point=job.point, device_name='cpu', libraries={})")
    handler = "import atexit\natexit.register(print, 'handled')\nfrom twinrun.protocol.job import Result\n"
    path.write_text(f"{handler}{path.read_text()}\nprint('further')\n")
    command = [sys.executable, str(path), "--job", str(tmp_path / "job.json")]
    ended = subprocess.run(
        command, env=environment(), capture_output=True, text=True, check=False, timeout=400
    )
    assert (ended.returncode, ended.stdout) == (0, "handled\n"), ended.stderr


def test_any_other_failure_shows_its_traceback(make_job: MakeJob, tmp_path: Path) -> None:
    path = script(tmp_path, "raise ValueError('broken on purpose')")
    (tmp_path / "job.json").write_text(make_job().model_dump_json())
    ended = subprocess.run(
        [sys.executable, str(path), "--job", str(tmp_path / "job.json")],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert ended.returncode == 1
    assert "ValueError: broken on purpose" in ended.stderr


def test_sigterm_ends_a_rank_at_once(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job()
    (tmp_path / "job.json").write_text(job.model_dump_json())
    path = script(tmp_path, "print('ready', flush=True); time.sleep(60)")
    command = [sys.executable, str(path), "--job", str(tmp_path / "job.json")]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.wait(timeout=50) == -signal.SIGTERM
