"""What is measured at a site: two jobs that a local engine plays, and false declarations that are found."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.execution.placements import commands_of
from tests.execution.test_sites import played
from twinrun.execution.batch import BatchScheduler
from twinrun.execution.engine import Workspace
from twinrun.execution.engines import Interpreter
from twinrun.execution.site_checks import check_site
from twinrun.execution.site_qualification import (
    Qualification,
    contradictions,
    qualification_file,
    qualification_of,
    qualify,
)
from twinrun.foundation.errors import InputError
from twinrun.foundation.files import canonical_json, sha256_of_bytes
from twinrun.foundation.signatures import signed_by
from twinrun.manifests.cluster import LoadedSite, load_site
from twinrun.manifests.vendor import load_gpus
from twinrun.planning.project import Project
from twinrun.protocol.allocation import Allocation
from twinrun.runs.run import allocation_of
from twinrun.runs.selection import Request, select

ROOT = Path(__file__).resolve().parents[2]
NAME = "AMD Instinct MI250"
FACTS = {"host": "n1", "cores": 96, "memory_gib": 900, "devices": [NAME] * 8, "interfaces": ["lo", "ib0"]}
TRUE = {
    "site": "four",
    "engine": "venv",
    "nodes": ["n1", "n2"],
    "facts": FACTS,
    "transport": "IB",
    "bus_gb_s": 90.0,
    "left_after_cancel": False,
}
SOCKETS = {"transport": "Socket"}
# Keys of a site, of what its node gives, and of what was measured besides: each is one false declaration.
FALSE: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = [
    ({"cores_per_node": 128}, {}, {}, "cores: 128 declared, 96 found"),
    ({"cores_per_rank": 12}, {"cores": 8}, {}, "cores: 96 declared, 8 found"),
    ({"memory_gib": 960}, {}, {}, "memory_gib: 960 declared"),
    ({}, {"memory_gib": 62}, {}, "memory_gib: 900 declared, 62 found"),
    ({"devices_per_node": 4}, {}, {}, "devices_per_node: 4 declared, 8 found"),
    ({}, {"devices": [NAME] * 7}, {}, "devices_per_node: 8 declared, 7 found"),
    ({}, {"devices": []}, {}, "devices_per_node: 8 declared, 0 found"),
    ({"gpu": "mi300x"}, {}, {}, "gpu: mi300x declared, AMD Instinct MI250 found"),
    ({"gpu": None}, {}, {}, "gpu: none declared, AMD Instinct MI250 found"),
    ({}, {"devices": [*[NAME] * 7, "NVIDIA H100"]}, {}, "gpu: mi250 declared, NVIDIA H100 found"),
    ({"interfaces": ("hsn0",)}, {}, {}, "interfaces: hsn0 declared"),
    ({}, {}, {"faults": ["n2 does not know the name n1"]}, "could not be run: n2 does not know"),
    ({}, {}, {"left_after_cancel": True}, "cancel: an end declared"),
    ({}, {}, SOCKETS, "network: a fast link declared, Socket found"),
    *(
        ({"infiniband": False, **link}, {}, {"transport": "TCP over eth0"}, "network: a fast link declared")
        for link in (
            {"environment": {"NCCL_IB_HCA": "mlx5"}},
            {"environment": {"NCCL_NET_PLUGIN": "ofi"}},
            {"modules": ("rccl-net-plugin",)},
        )
    ),
    ({"network_gbit_s": 1600.0}, {}, {}, "network_gbit_s: 1600 declared, 720 found"),
    ({}, {}, {"bus_gb_s": 1.1}, "network_gbit_s: 800 declared, 8.8 found"),
    ({"account": "nobody"}, {}, {"faults": ["sbatch refuses the job"]}, "could not be run: sbatch refuses"),
    ({"modules": ("rocm/9",)}, {}, {"faults": ["a set-up line failed"]}, "could not be run: a set-up"),
]


def four(folder: Path, **keys: Any) -> LoadedSite:
    own = {"infiniband": True, "interfaces": ("ib0",), "network_gbit_s": 800.0}
    site = played("slurm", folder)
    return site.model_copy(update={"site": site.site.model_copy(update=own | keys)})


def measured(**keys: Any) -> Qualification:
    made = {"created": datetime.datetime.now(datetime.UTC).isoformat(), "declared_sha256": "0" * 64}
    return Qualification.model_validate_json(json.dumps(TRUE | made | keys))


@pytest.mark.parametrize(("declared", "facts", "others", "expected"), FALSE)
def test_a_false_declaration_is_found(
    declared: dict[str, Any], facts: dict[str, Any], others: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    found = measured(facts=FACTS | facts, **others)
    wrong = contradictions(four(tmp_path, **declared).site, found, gpus=load_gpus(ROOT))
    assert any(one.startswith(expected) for one in wrong), wrong
    assert contradictions(four(tmp_path).site, measured(), gpus=load_gpus(ROOT)) == []


def test_a_run_on_sockets_says_so_before_it_starts_and_in_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = four(tmp_path).site.model_dump(mode="json", exclude_defaults=True)
    lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in keys.items())
    (tmp_path / "cluster.toml").write_text(f"[site.four]\n{lines}\n", encoding="utf-8")
    monkeypatch.setenv("TWINRUN_CLUSTER", str(tmp_path / "cluster.toml"))
    project, site = Project(ROOT), load_site(ROOT, "four")
    own = sha256_of_bytes(canonical_json(site.site.model_dump(mode="json")).encode())

    def said(transport: str) -> str | None:
        text = measured(transport=transport, declared_sha256=own).model_dump_json()
        qualification_file(site).write_text(text, encoding="utf-8")
        found = select(project, Request(recipe="mpt7b-scaling", cluster="four", set=("nodes=2",)))
        warned = [one.value for one in found.choices if one.name == "network"]
        record = allocation_of([Allocation(scheduler="slurm", nodes=("n1", "n2"))], found)
        assert warned == ([record.network] if record.network else [])
        return record.network

    assert said("IB") is None
    assert said("Socket") == "Socket carries the messages, where a fast link is declared"


# Plays Slurm on this machine: a job is its script's body, which nobody waits for.
SLURM = """
import os, pathlib, re, subprocess, sys
command, *words = sys.argv[1:]
file = pathlib.Path(__file__).with_name("pid")
if "--test-only" in words:
    print("")
elif command == "sbatch":
    output = next(one for one in words if one.startswith("--output=")).partition("=")[2]
    text = re.sub(r"srun .*? bash -euc", "SLURM_NODEID=0 exec bash -euc", pathlib.Path(words[-1]).read_text())
    with open(output, "w") as stream:
        told = os.environ | {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "x"}
        line = ["bash", "-c", "scontrol() { echo localhost; }\\n" + text]
        started = subprocess.Popen(line, stdout=stream, stderr=stream, start_new_session=True, env=told)
    file.write_text(str(started.pid))
    print("7")
elif command == "scancel":
    os.killpg(int(file.read_text()), 9)
elif words[:2] == ["show", "job"]:
    alive = pathlib.Path("/proc", file.read_text(), "cmdline")
    state = "RUNNING" if alive.exists() and alive.read_bytes() else "CANCELLED"
    print(f"JobId=7 JobName=twinrun-a JobState={state} Reason=None ExitCode=0:0 NodeList=localhost")
else:
    print("localhost")
"""


@pytest.mark.needs("torch")
@pytest.mark.parametrize("leaves", [False, True])
def test_a_node_is_measured_and_its_file_is_signed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, leaves: bool
) -> None:
    """One job of one node, for real; with `leaves` a cancel ends nothing of it."""
    monkeypatch.setattr("twinrun.execution.site_qualification._LEFT_SECONDS", 1.5)
    (tmp_path / "slurm.py").write_text(SLURM, encoding="utf-8")
    client = (sys.executable, str(tmp_path / "slurm.py"))
    keys = {"client": client, "nodes": 1, "gpu": None, "vendor": "cpu", "cores_per_node": 8}
    site = four(tmp_path, **keys, poll_seconds=0.1, shared=(str(tmp_path),), interfaces=())
    if leaves:
        monkeypatch.setattr(BatchScheduler, "end", lambda *_: None)
        monkeypatch.setattr("twinrun.execution.batch.CANCEL_SECONDS", 0.5)
    workspace = Workspace(root=ROOT, run=tmp_path / "run", data=tmp_path, nodes=site.site)
    engine = Interpreter(python=sys.executable, workspace=workspace)
    commands = commands_of(engine, workspace, site=site)
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    try:
        found = qualify(site, ranks=commands, accelerator=False, key=key)
    finally:
        if leaves:
            os.killpg(int((tmp_path / "pid").read_text()), 9)
    assert found.faults == ()
    assert found.facts
    assert found.facts.cores == len(os.sched_getaffinity(0))
    assert found.cold_start_s is not None
    assert found.left_after_cancel == leaves
    file = qualification_file(site)

    def signer() -> str:
        digest, signature = sha256_of_bytes(file.read_bytes()), Path(f"{file}.sig").read_text()
        return signed_by(digest, signature, place="sig", signers=tmp_path / "signers")

    assert "signed with the key" in signer()
    assert qualification_of(site) == found
    rows = {one.name: one for one in check_site(ROOT, site).checks}
    few = len(os.sched_getaffinity(0)) < 8
    assert rows["measured"].status == ("fail" if leaves or few else "ok"), rows["measured"]
    assert leaves or few or "signed with the key" in rows["measured"].found
    # What was measured of another declaration says nothing of this one.
    changed = site.model_copy(update={"site": site.site.model_copy(update={"minutes": 7})})
    assert qualification_of(changed) is None
    file.write_text(file.read_text(encoding="utf-8").replace('"cores"', '"cores" '), encoding="utf-8")
    with pytest.raises(InputError, match="the signature does not match"):
        signer()
