"""Task files of SkyPilot: golden, and accepted by SkyPilot's own parser where it is installed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.execution.placements import PlacementStandIn
from tests.execution.test_batch_script import script
from tests.goldens import check_golden
from twinrun.manifests.cluster import LoadedSite, Site

# A pool of eight hosts by ssh, Kubernetes with a volume, and a cloud with a bucket.
SITES: dict[str, dict[str, Any]] = {
    "eks": {"partition": "k8s/eks", "gres": "H100", "volumes": {"/shared": "training"}, "infiniband": True},
    "lab": {"partition": "ssh/lab", "gres": "RTX4090", "nodes": 8, "volumes": {"/shared": "nfs"}},
    "cloud": {"partition": "aws", "gres": "A100-80GB", "volumes": {"/shared": "s3://training"}},
}


def task_file(name: str, engine: str = "docker") -> str:
    keys = {"scheduler": "skypilot", "vendor": "cuda", "devices_per_node": 8, "cores_per_node": 96}
    own = {"shared": ("/shared",), "memory_gib": 900, "setup": ("ulimit -n 65536",), "nodes": 2}
    site = Site.model_validate({**keys, **own, "engine": engine, **SITES[name]})
    loaded = LoadedSite(name=name, place=f"cluster.toml:site.{name}", site=site)
    placement = PlacementStandIn(id="nodes=2", nodes=2, devices_per_node=8)
    return script("torchrun", site=loaded, placement=placement, engine=engine, payload="told")


@pytest.mark.parametrize("name", SITES)
def test_the_task_file_is_the_golden_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 1234)
    monkeypatch.setattr(os, "getgid", lambda: 1234)
    text = task_file(name)
    check_golden(f"task-{name}.yaml", text)
    run = "\n".join(line[2:] for line in text.partition("run: |\n")[2].splitlines())
    subprocess.run(["bash", "-n"], input=run, text=True, check=True)


@pytest.mark.parametrize("name", SITES)
def test_skypilot_takes_the_task_file(name: str, tmp_path: Path) -> None:
    sky = pytest.importorskip("sky", reason="needs skypilot, which `uv pip install skypilot` brings")
    file = tmp_path / "task.yaml"
    file.write_text(task_file(name), encoding="utf-8")
    task = sky.Task.from_yaml(str(file))
    (resources,) = task.resources
    assert (task.num_nodes, resources.accelerators) == (2, {SITES[name]["gres"]: 8})
    assert [*resources.image_id.values()] == ["docker:twinrun/stack:a1b2"]


@pytest.mark.parametrize(("status", "left"), [(0, "0"), (7, "7")])
def test_a_task_leaves_its_status_and_its_log(status: int, left: str, tmp_path: Path) -> None:
    """The first node's script run here: the stack's interpreter is played."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/bash\necho ranks of $TWINRUN_NODE\nexit {status}\n", encoding="utf-8")
    python.chmod(0o755)
    keys = {"scheduler": "skypilot", "vendor": "cpu", "nodes": 2, "devices_per_node": 1, "cores_per_node": 1}
    site = Site.model_validate({**keys, "shared": (str(tmp_path),)})
    loaded = LoadedSite(name="here", place="cluster.toml:site.here", site=site)
    placement = PlacementStandIn(id="nodes=2", nodes=2)
    folders = {"root": tmp_path, "run": tmp_path / "run", "python": str(python)}
    text = script("torchrun", site=loaded, placement=placement, **folders)  # type: ignore[arg-type]
    logs = tmp_path / "run" / "log" / "nodes=2"
    logs.mkdir(parents=True)
    run = "\n".join(line[2:] for line in text.partition("run: |\n")[2].splitlines())
    told = os.environ | {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    done = subprocess.run(["bash", "-c", run], env=told, check=False)
    assert done.returncode == status
    assert (logs / "status").read_text(encoding="ascii") == f"{left}\n"
    assert (logs / "launcher-0.log").read_text(encoding="utf-8") == "ranks of 0\n"
