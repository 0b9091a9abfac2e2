"""The JobSet of a point: golden, as its publishers' own model takes it, and deaf to its strings."""

from __future__ import annotations

import json
import os
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from tests.execution.placements import SITE, PlacementStandIn
from tests.goldens import check_golden, laid_out
from twinrun.execution.engine import Renderer, Workspace
from twinrun.execution.engines.docker import ContainerRenderer
from twinrun.execution.launchers import load_launcher
from twinrun.execution.local_engines import Interpreter
from twinrun.execution.ranks import Launch, RankCommands
from twinrun.execution.schedulers import load_scheduler
from twinrun.foundation.errors import InputError, MachineError
from twinrun.manifests.cluster import LoadedSite
from twinrun.manifests.vendor import load_vendors

ROOT = Path(__file__).resolve().parents[2]
# Of the other vendors it is told what differs.
WHOLE = "rocm"
NODES = ("node3", "node7.example.org")


class PodJob(BaseModel):
    """The least that a job has."""

    out: str = "/run"


@pytest.fixture(autouse=True)
def user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 1234)
    monkeypatch.setattr(os, "getgid", lambda: 1234)


@pytest.fixture(scope="module")
def published() -> Any:
    """The model of a JobSet; its package is too slow to import wherever tests are collected."""
    return import_module("kubeflow_trainer_api.models").JobsetV1alpha2JobSet


def changed(**keys: object) -> LoadedSite:
    keys = {"scheduler": "kubernetes", "engine": "docker", "exclude": NODES} | keys
    return SITE.model_copy(update={"site": SITE.site.model_copy(update=keys)})


def job_set(
    vendor: str = "cpu",
    *,
    site: LoadedSite | None = None,
    nodes: int = 2,
    payload: str = "a 'quoted' text with $(HOME)\nand a line",
    renderer: Renderer | None = None,
) -> str:
    adapters = {"infiniband": True, "rdma_resource": "rdma/hca", "groups": (44, 110), "memory_gib": 960}
    site = site or changed(**(adapters if vendor != "cpu" else {}))
    workspace = Workspace(
        root=Path("/shared/project"), run=Path("/shared/run"), data=Path("/shared/data"), nodes=site.site
    )
    made = load_vendors(ROOT)[vendor].model_copy(update={"hidden_by": ()})
    commands = RankCommands(
        renderer=renderer
        or ContainerRenderer(image="twinrun/stack:0123456789ab", vendor=made, workspace=workspace),
        launcher=load_launcher("torchrun"),
        scheduler=load_scheduler("kubernetes", site=site),
        workspace=workspace,
        cores=64,
        variables={"TOLD": payload},
    )
    job: Any = PodJob()
    placement = PlacementStandIn(id=f"nodes={nodes}", nodes=nodes, devices_per_node=8)
    launch = Launch(placement=placement, script=workspace.root / "train.py", job=job)
    text = commands.scheduler.script(
        commands.task(launch, attempt="a1b2"), run="/shared/run", logs="/shared/log"
    )
    assert text is not None
    return text


@pytest.mark.parametrize("vendor", sorted(load_vendors(ROOT)))
def test_the_job_set_is_the_golden_one(vendor: str) -> None:
    text = job_set(vendor)
    assert text == json.dumps(json.loads(text), indent=1) + "\n"
    like = "" if vendor == WHOLE else f"job-set-{WHOLE}.json"
    check_golden(f"job-set-{vendor}.json", laid_out(json.loads(text)) + "\n", like=like)


@pytest.mark.parametrize("vendor", sorted(load_vendors(ROOT)))
def test_the_publishers_models_take_all_of_it(published: Any, vendor: str) -> None:
    """That of JobSet drops a key that it does not know, so what comes back shows each key to be known."""
    given = json.loads(job_set(vendor))
    model = published.from_dict(given)
    assert model is not None
    assert json.loads(json.dumps(model.to_dict())) == given
    (replicated,) = given["spec"]["replicatedJobs"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "node"}, **replicated["template"]}
    checked = import_module("kubernetes_validate")
    for version in ("1.27", "1.32", checked.latest_version()):
        checked.validate(job, version, strict=True)
    fabric = vendor != "cpu"
    assert pod(json.dumps(given)).get("hostNetwork", False) is fabric
    names = {one["name"] for one in pod(json.dumps(given))["containers"][0]["env"]}
    # Without the network of its node a pod has no interface of that name.
    assert ("NCCL_SOCKET_IFNAME" in names) is fabric


def test_a_key_that_no_job_set_has_is_found(published: Any) -> None:
    given = json.loads(job_set())
    given["spec"]["replicatedJobs"][0]["template"]["spec"]["completionModus"] = "Indexed"
    model = published.from_dict(given)
    assert model is not None
    assert json.loads(json.dumps(model.to_dict())) != given


def test_a_thousand_nodes_need_no_more_lines_than_two() -> None:
    assert len(job_set(nodes=1024).splitlines()) == len(job_set().splitlines()) < 250


def test_nothing_that_is_told_is_expanded() -> None:
    payload = "$(TWINRUN_NODE) $TWINRUN_NODES $$(HOME) `x`"
    (container,) = pod(job_set(payload=payload))["containers"]
    values = {one["name"]: one.get("value") for one in container["env"]}
    assert values["TOLD"] == "$$(TWINRUN_NODE) $$TWINRUN_NODES $$$$(HOME) `x`"
    assert values["TWINRUN_FIRST_NODE"] == "twinrun-nodes-2-node-0-0.twinrun-nodes-2"
    assert "$(TWINRUN_FIRST_NODE):29400" in container["args"]


def test_what_cannot_be_a_pod_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = Workspace(root=Path("/shared/project"), run=Path("/shared/run"), data=Path("/shared/data"))
    interpreter = Interpreter(python="/shared/python", workspace=workspace)
    with pytest.raises(InputError, match="a pod is a container"):
        job_set(renderer=interpreter)
    with pytest.raises(InputError, match="leaves out single nodes") as caught:
        job_set(site=changed(exclude=("node[7-9]",)))
    assert caught.value.place == "cluster.toml:site.hpc.exclude"
    monkeypatch.setattr(os, "getuid", lambda: 0)
    with pytest.raises(MachineError, match="must not be root"):
        job_set()


def pod(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text)["spec"]["replicatedJobs"][0]["template"]["spec"]["template"][
        "spec"
    ]
    return found
