"""What a run needs is looked at before it starts: as a user meets it, on machines that lack it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.refusals import RECIPE, error_message, refused, with_manifests
from tests.commands import environment, invoke
from twinrun.machine.memory import processor_memory

ROOT = Path(__file__).resolve().parents[2]
SMOKE = ("run", RECIPE, "--vendor", "cpu", "--engine", "host", "--scale", "smoke")
MIB = 1 << 20


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project that no command of these tests may change."""
    return with_manifests(tmp_path_factory.mktemp("whole") / "project")


@pytest.mark.needs("unshare", "root")
@pytest.mark.parametrize("option", ["--out", "TWINRUN_CACHE"])
def test_a_full_disk_is_named_with_what_is_free(root: Path, tmp_path: Path, option: str) -> None:
    full = tmp_path / "full"
    full.mkdir()
    # What the command sees of the machine.
    seen = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=1m none "$0" && exec "$@"', str(full))
    named = ("env", f"TWINRUN_CACHE={full}") if option != "--out" else ()
    words = [*seen, *named, sys.executable, "-m", "twinrun", *SMOKE]
    words += ["--out", str(full)] if option == "--out" else []
    options: dict[str, Any] = {"cwd": root, "env": environment(root), "timeout": 60}
    done = subprocess.run(words, capture_output=True, text=True, check=False, **options)
    message = error_message(done, 3)
    assert f"{full}: the disk is full found: 1 MiB free allowed:" in message
    assert option in message
    assert not (root / "runs").exists()


NOWHERE = ("--checkpoint", "steps=2", "--checkpoint")


@pytest.mark.parametrize(
    ("words", "code", "parts"),
    [
        (
            (*SMOKE, "--set", "data=c4"),
            3,
            ["is not on this machine", "found: c4", "`invoke data c4 --recipe"],
        ),
        ((*SMOKE[:5], "apptainer", *SMOKE[6:]), 3, ["--engine apptainer: ", "invoke build --stack cpu"]),
        ((*SMOKE, *NOWHERE, "place=s3://b"), 2, ["--checkpoint place: no such folder found: s3://b"]),
    ],
)
def test_what_is_missing_is_named_before_there_is_a_run_folder(
    root: Path, words: tuple[str, ...], code: int, parts: list[str]
) -> None:
    message = refused(root, *words, code=code)
    assert [part for part in parts if part not in message] == []
    assert not (root / "runs").exists()


def test_a_long_run_on_a_processor_asks(root: Path) -> None:
    long = (*SMOKE, "--set", "steps=100000")
    message = refused(root, *long)
    assert "twinrun run: this starts only with --yes" in message
    assert "allowed: up to 15 min without --yes" in message
    plan = invoke(root, *long, "--dry")
    assert plan.returncode == 0
    assert "this starts only with --yes" in plan.stderr
    assert "on a processor" not in invoke(root, *SMOKE, "--dry").stderr


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ((*SMOKE, "--set", "model=mpt-70b"), "devices=1: the ranks need more memory than is free here"),
        ((*SMOKE, *NOWHERE, "source=/nowhere"), "--from: no such folder"),
        (("run", "mamba-kernels", *SMOKE[2:6], "--scale", "node"), "this scale measures a GPU"),
    ],
)
def test_a_plan_says_what_a_run_would_refuse(root: Path, line: tuple[str, ...], said: str) -> None:
    plan = invoke(root, *line, "--dry")
    assert plan.returncode == 0
    assert f"warning   a run would be refused here: {said}" in plan.stderr
    run = invoke(root, *line)
    assert run.returncode in (2, 3)
    assert f"error: {said}" in run.stderr


@pytest.mark.parametrize(("point", "layout"), [("pp2", "pipeline"), ("moe-ep2", "experts")])
def test_a_layout_that_is_not_saved_is_refused_before_it_is_trained(
    root: Path, point: str, layout: str
) -> None:
    line = ("run", "deepspeed-pretrain", *SMOKE[2:], "--checkpoint", "steps=2", "--set", f"layouts={point}")
    for dry in ((), ("--dry",)):
        message = refused(root, *line, *dry)
        assert f"--checkpoint {point}: no checkpoint is made of this layout found: {layout}" in message


def test_the_least_of_machine_and_control_groups_counts(tmp_path: Path) -> None:
    machine, groups = tmp_path / "proc", tmp_path / "groups"
    (machine / "self").mkdir(parents=True)
    (machine / "meminfo").write_text("MemTotal: 8192 kB\nMemFree: 1024 kB\nMemAvailable: 4096 kB\n")
    (machine / "self" / "cgroup").write_text("0::/user/job\n")
    inner, outer = groups / "user" / "job", groups / "user"
    inner.mkdir(parents=True)
    free = processor_memory(machine, groups)
    assert (free.limit_bytes, free.available_bytes, free.limited_by) == (8 * MIB, 4 * MIB, "this machine")
    (inner / "memory.max").write_text("max\n")
    (outer / "memory.max").write_text(f"{6 * MIB}\n")
    (outer / "memory.current").write_text(f"{5 * MIB}\n")
    (outer / "memory.stat").write_text(f"anon 7\ninactive_file {MIB}\nactive_file {MIB}\n")
    bound = processor_memory(machine, groups)
    assert (bound.limit_bytes, bound.available_bytes) == (6 * MIB, 3 * MIB)
    assert bound.limited_by == f"the control group {outer}"
