"""Slurm, PBS and Grid Engine asked alike; a program plays their answers."""

from __future__ import annotations

import json
import re
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.execution.clusters import ended
from twinrun.execution.schedulers import client_of
from twinrun.execution.site_checks import check_site, describe
from twinrun.foundation.errors import MachineError, RunError, RunInterruptedError, TwinrunError
from twinrun.foundation.manifest import validate
from twinrun.manifests.cluster import ClusterTable, LoadedSite
from twinrun.manifests.vendor import load_gpus

ROOT = Path(__file__).resolve().parents[2]
# Prints the answer to the longest question that the arguments begin with, in any order.
PLAYED = """
import json, pathlib, sys
answers = json.loads(pathlib.Path(__file__).with_name("answers.json").read_text())
asked = sys.argv[1:]
fitting = [one for one in answers if set(one.split()) <= set(asked) and one.split()[0] == asked[0]]
print(answers[max(fitting, key=len)] if fitting else sys.exit(f"no answer to {asked}"))
"""
NODE = (
    "NodeName=n{0} CPUAlloc=0 CPUEfctv=96 CPUTot=128 Gres=gpu:mi250:8(S:0-1) State=IDLE RealMemory=1032000 "
    "MemSpecLimit=16000 Partitions=gpu,all"
)
PBS_JOB = {
    "Job_Name": "twinrun-a",
    "Job_Owner": "me@head",
    "job_state": "R",
    "exec_host": "n1/0*96",
    "Resource_List": {"walltime": "01:00:00"},
}


def pbs_node(number: int) -> dict[str, object]:
    has = {"ncpus": 96, "mem": "1040187392kb", "ngpus": 8}
    return {"state": "free" if number else "down,offline", "resources_available": has}


def grid_node(number: int) -> str:
    state = "" if number else "au"
    return (
        f"<host name='n{number}'><hostvalue name='num_proc'>96</hostvalue>"
        "<hostvalue name='mem_total'>992.0G</hostvalue>"
        "<resourcevalue name='gpu' dominance='hc'>8.000000</resourcevalue>"
        "<resourcevalue name='num_proc' dominance='hl'>96.000000</resourcevalue>"
        f"<queue name='gpu'><queuevalue name='state_string'>{state}</queuevalue></queue></host>"
    )


ANSWERS: dict[str, dict[str, str]] = {
    "slurm": {
        "scontrol --version": "slurm 22.05.8",
        "scontrol ping": "Slurmctld(primary) at head is UP",
        "scontrol show node": "\n".join(NODE.format(number) for number in range(4)),
        "scontrol show partition": "PartitionName=gpu Default=YES MaxTime=12:00:00",
        "scontrol show config": "ClusterName = four\nTaskPlugin = task/affinity,task/cgroup",
        "scontrol show job": "JobId=12 JobName=twinrun-a UserId=me(7) JobState=RUNNING ExitCode=0:0"
        " RunTime=00:01:00 TimeLimit=01:00:00 NodeList=n1 StdOut=/shared/log",
        "scontrol show hostnames": "n1",
        "sacctmgr show": "research\nstudents",
        "id": "me",
        "sinfo": "n3 burnt",
        "sbatch": "would start",
        "scancel": "",
    },
    "pbs": {
        "qstat -B": json.dumps({"Server": {"head": {"server_state": "Active", "pbs_version": "23.06"}}}),
        "pbsnodes": json.dumps({"nodes": {f"n{number}": pbs_node(number) for number in range(5)}}),
        "qstat -Q": json.dumps({"Queue": {"gpu": {"resources_max": {"walltime": "12:00:00"}}}}),
        "qstat -f": json.dumps(
            {"Jobs": {"12.head": PBS_JOB, "13.head": {"Job_Name": "other", "job_state": "Q"}}}
        ),
        "qdel": "",
    },
    "gridengine": {
        "qstat -help": "SGE 8.1.9\nusage: qstat",
        "qhost": f"<qhost><host name='global'/>{''.join(map(grid_node, range(5)))}</qhost>",
        "qconf -sq": "qname gpu\nh_rt 12:00:00",
        "qconf -sql": "gpu",
        "qstat -xml": "<job_info><queue_info><job_list state='running'><JB_job_number>12</JB_job_number>"
        "<JB_name>twinrun-a</JB_name><JB_owner>me</JB_owner><state>r</state><queue_name>gpu@n1</queue_name>"
        "</job_list></queue_info></job_info>",
        "qsub": "verification: found suitable queue(s)",
        "qdel": "",
    },
}
NUMBERS = {"slurm": "12", "pbs": "12.head", "gridengine": "12"}
GRES = {"slurm": "gpu:mi250", "pbs": "ngpus", "gridengine": "gpu"}


def played(scheduler: str, folder: Path, **keys: Any) -> LoadedSite:
    """Return a site of four nodes whose scheduler is played."""
    (folder / "played.py").write_text(PLAYED, encoding="utf-8")
    (folder / "answers.json").write_text(json.dumps(ANSWERS[scheduler]), encoding="utf-8")
    own: dict[str, Any] = {
        "scheduler": scheduler,
        "vendor": "rocm",
        "gpu": "mi250",
        "gres": GRES[scheduler],
        "shared": ["/"],
    }
    own |= {"nodes": 4, "devices_per_node": 8, "cores_per_node": 96, "memory_gib": 900, "minutes": 60}
    own |= {"partition": "gpu", "parallel_environment": "mpi", "poll_seconds": 0.01}
    site = own | {"client": [sys.executable, str(folder / "played.py")]} | keys
    table = ClusterTable.model_validate_json(json.dumps({"site": {"four": site}}))
    return LoadedSite(name="four", place=f"{folder}/cluster.toml:site.four", site=table.site["four"])


@pytest.mark.parametrize("scheduler", ANSWERS)
def test_jobs_are_listed_followed_cancelled_and_end_as_their_script_has_left_it(
    scheduler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, number = client_of(played(scheduler, tmp_path)), NUMBERS[scheduler]
    assert [(one.id, one.user, one.nodes) for one in client.jobs()] == [(number, "me", "n1")]
    state = client.state(number)
    assert state
    assert (state.ended, client.size()) == (False, 4)
    client.end(number)
    assert client.adopt(number, point="a", logs=tmp_path).poll() is None
    if scheduler == "slurm":
        return
    monkeypatch.setattr("twinrun.execution.batch._SETTLE_SECONDS", 0.1)
    with pytest.raises(RunInterruptedError, match="job 99 ended without an exit status"):
        client.adopt("99", point="a", logs=tmp_path).poll()
    for left in (0, 7):
        (tmp_path / "status").write_text(f"{left}\n", encoding="ascii")
        assert client.adopt("99", point="a", logs=tmp_path).poll() == left


# What a site declares beside the truth, the check that tells of it, and how.
DECLARED: list[tuple[dict[str, Any], str, str]] = [
    *(({}, name, "ok") for name in ("scheduler", "nodes", "partition", "devices", "cores", "memory")),
    *(({}, name, "unknown") for name in ("measured", "network")),
    ({"nodes": 5}, "nodes", "warn"),
    ({"minutes": 721}, "partition", "fail"),
    ({"devices_per_node": 16, "cores_per_rank": 6}, "devices", "fail"),
    # Cores and memory that the scheduler keeps for itself are none of the job's.
    ({"cores_per_node": 128}, "cores", "fail"),
    ({"memory_gib": 1000}, "memory", "fail"),
]


@pytest.mark.parametrize("scheduler", ANSWERS)
@pytest.mark.parametrize(("keys", "name", "status"), DECLARED)
def test_the_doctor_says_what_is_well_declared_wrongly_or_only_declared(
    scheduler: str, keys: dict[str, Any], name: str, status: str, tmp_path: Path
) -> None:
    found = {one.name: one for one in check_site(ROOT, played(scheduler, tmp_path, **keys)).checks}
    assert found[name].status == status, found[name]
    assert bool(found[name].hint) == (status != "ok")
    assert found["job"].status == ("unknown" if scheduler == "pbs" else "ok")
    assert "not measured" in found["network"].found


@pytest.mark.parametrize("scheduler", ANSWERS)
def test_a_first_site_is_described(scheduler: str, tmp_path: Path) -> None:
    client = played(scheduler, tmp_path).site.client
    text = describe(client=client, partition="gpu", gpus=load_gpus(ROOT), scheduler=scheduler)
    (made,) = validate(tomllib.loads(text), ClusterTable, place="cluster.toml").site.values()
    assert (made.nodes, made.devices_per_node, made.rank_cores, made.minutes) == (4, 8, 12, 240)
    assert (made.memory_gib, made.partition, made.gres) == (992, "gpu", GRES[scheduler])
    if scheduler == "slurm":
        assert (made.vendor, made.gpu, made.account) == ("rocm", "mi250", "research")
        assert "# of research, students" in text


STATE = (
    "JobId=12 JobName=twinrun-a UserId=me(7) JobState={} Reason=None ExitCode={}:0 RunTime=00:00:10 "
    "TimeLimit=01:00:00 NodeList=n[1-2] StdOut=/shared/log"
)


def say(folder: Path, state: str | None, *, code: int = 0) -> None:
    """Make the played Slurm say a state of the job, or nothing any more."""
    told = {**ANSWERS["slurm"], "scontrol show job": STATE.format(state, code)}
    left = told if state else {key: text for key, text in told.items() if "job" not in key}
    (folder / "answers.json").write_text(json.dumps(left), encoding="utf-8")


def followed(folder: Path, state: str | None, *, code: int = 0) -> TwinrunError | int:
    """Return how a job ends that was running before Slurm said `state` of it."""
    job = client_of(played("slurm", folder)).adopt("12", point="nodes=2", logs=folder)
    assert job.poll() is None
    assert job.nodes == ("n1",)
    say(folder, state, code=code)
    return ended(job)


ENDS: list[tuple[str, type[TwinrunError], str]] = [
    *((state, RunInterruptedError, f"was ended: {state}") for state in ("CANCELLED", "PREEMPTED", "TIMEOUT")),
    ("NODE_FAIL", RunError, r"lost a node[^~]*n3 burnt"),
]


@pytest.mark.parametrize(("state", "kind", "said"), ENDS)
def test_who_ended_a_job_is_told(state: str, kind: type[TwinrunError], said: str, tmp_path: Path) -> None:
    error = followed(tmp_path, state, code=1)
    assert isinstance(error, kind)
    assert re.search(said, str(error))


def test_a_slurm_that_starts_again_is_waited_for_and_one_that_is_gone_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert followed(tmp_path, "COMPLETED") == 0
    assert followed(tmp_path, "FAILED", code=7) == 7
    job = client_of(played("slurm", tmp_path)).adopt("12", point="nodes=2", logs=tmp_path)
    for state in ("RUNNING", None, "COMPLETING", "PENDING", "RUNNING"):
        say(tmp_path, state)
        time.sleep(0.02)
        assert job.poll() is None
    monkeypatch.setattr("twinrun.execution.batch.PATIENCE_SECONDS", 0.5)
    error = followed(tmp_path, None)
    assert isinstance(error, RunError)
    assert "Slurm has not answered" in str(error)
    assert "job 12 may still run" in str(error)


# As munge prints it.
DISTRUST = "slurm_load_partitions: error: Munge decode failed: Invalid credential"
# A client, and how it is told that it gives no answer.
SILENT = [
    ([sys.executable, "-c", f"import sys; sys.exit({DISTRUST!r})"], f"Slurm refuses[^~]*{DISTRUST}"),
    ([sys.executable, "-c", "print('JobId=12 JobState=')"], "this is no answer of Slurm"),
    (["/no/such/program"], r"cannot start[^~]*site\.four\.client"),
]


@pytest.mark.parametrize(("client", "said"), SILENT)
def test_a_client_without_an_answer_is_the_machines_fault(
    client: list[str], said: str, tmp_path: Path
) -> None:
    with pytest.raises(MachineError) as caught:
        client_of(played("slurm", tmp_path, client=client)).state("12")
    assert re.search(said, str(caught.value))
