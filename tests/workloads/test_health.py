"""What operators read of checks: the textfile by Prometheus' parser, line and status of the watcher."""

from __future__ import annotations

import datetime
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import ROOT
from twinrun.protocol.checks import TEXTFILE, Health, NodeCheck, textfile

NOW = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
GOOD = {"check": "slurm-gres", "node": "worker1", "outcome": "pass", "reason": ""}
SHORT = {"check": "gpu-memory", "node": 'w"2\\', "device": "3", "outcome": "fail", "reason": "2 GB short"}
CHECKS = (
    GOOD,
    SHORT | {"remedy": "seat it"},
    GOOD | {"check": "network-topology", "outcome": "unknown", "reason": "no GPU"},
    GOOD | {"node": "worker3", "outcome": "fail", "reason": "GRES says 8, 7 are seen"},
)
HEALTH = Health(run="r", created=NOW, checks=tuple(map(NodeCheck.model_validate, CHECKS)))


def test_prometheus_reads_the_textfile() -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    families = {one.name: one for one in parser.text_string_to_metric_families(textfile(HEALTH))}
    assert {one.type for one in families.values()} == {"gauge"}
    (sample,) = families["twinrun_check_gpu_memory"].samples
    assert (sample.labels, sample.value) == ({"node": 'w"2\\', "device": "3"}, 0.0)
    assert {one.labels["node"]: one.value for one in families["twinrun_check_slurm_gres"].samples} == {
        "worker1": 1.0,
        "worker3": 0.0,
    }
    assert math.isnan(families["twinrun_check_network_topology"].samples[0].value)
    assert families["twinrun_checks_timestamp_seconds"].samples[0].value > 1.7e9


def watch(file: Path, *options: str, path: str = "") -> tuple[int, str]:
    """Run the program as Node Problem Detector does, which reads one line and the status."""
    command = [sys.executable, str(ROOT / "recipes/cluster-acceptance/node_health.py"), str(file), *options]
    variables = os.environ | {"PYTHONPATH": str(ROOT / "src"), "PATH": f"{path}:{os.environ['PATH']}"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=60)
    assert done.stderr == ""
    (line,) = done.stdout.splitlines()
    return done.returncode, line


def test_a_node_is_well_has_a_problem_or_is_not_known(tmp_path: Path) -> None:
    file = tmp_path / "health.json"
    file.write_text(HEALTH.model_dump_json(), encoding="utf-8")
    assert watch(tmp_path, "--node", "worker1") == (0, "worker1: 1 checks passed")
    status, line = watch(file, "--node", 'w"2\\')
    assert (status, line) == (1, "gpu-memory of device 3: 2 GB short; seat it")
    assert watch(file, "--node", "worker9")[0] == 2
    assert watch(tmp_path / "absent.json")[0] == 2
    old = HEALTH.model_copy(update={"created": "2026-01-01T00:00:00+00:00"})
    file.write_text(old.model_dump_json(), encoding="utf-8")
    assert watch(file, "--node", "worker1")[0] == 2
    watch(file, "--node", "worker1", "--textfile", str(tmp_path))
    assert (tmp_path / TEXTFILE).read_text(encoding="utf-8") == textfile(old)
