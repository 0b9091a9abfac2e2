"""A checkout whose machine is arranged by the tests."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.machine.played import look_below
from twinrun.manifests.stack import stamp

ROOT = Path(__file__).parents[2]
STACK = """\
name = "plain"
vendor = "cpu"
title = "plain"
python = ">=3.11"
image = "twinrun/plain"
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with one stack, on a machine without GPUs whose files are looked for in `tmp_path`."""
    shutil.copytree(ROOT / "images" / "vendors", tmp_path / "images" / "vendors")
    shutil.copy(ROOT / "images" / "gpus.toml", tmp_path / "images")
    look_below(tmp_path, tmp_path)
    stack = tmp_path / "images" / "stacks" / "plain"
    stack.mkdir(parents=True)
    (stack / "stack.toml").write_text(STACK, encoding="utf-8")
    (stack / "requirements.in").write_text("rich\n", encoding="utf-8")
    lock = stamp(stack / "requirements.in") + "\n"
    (stack / "requirements.lock").write_text(lock, encoding="utf-8")
    (tmp_path / "dev" / "dri").mkdir(parents=True)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("TWINRUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(variable, raising=False)
    return tmp_path
