"""Slurm for real: a controller and two workers as containers of this machine."""

from __future__ import annotations

import datetime
import json
import re
import sys
import time
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.execution.clusters import (
    ROOT,
    changed,
    container,
    docker,
    ended,
    handed,
    processes,
    program,
    trained,
    until,
)
from tests.execution.test_batch_script import SITES, golden
from twinrun.cli import sites
from twinrun.execution.engine import NodeCommand
from twinrun.execution.schedulers import Submission, client_of, load_scheduler
from twinrun.execution.site_checks import check_site
from twinrun.foundation.errors import InputError, MachineError, RunError, RunInterruptedError, TwinrunError
from twinrun.manifests.cluster import LoadedSite, local_folder
from twinrun.planning.project import Project
from twinrun.protocol.checks import Health, NodeCheck
from twinrun.runs.run import qualified

pytestmark = pytest.mark.cluster
# The stack itself where this interpreter has it, which saves its installation.
ENGINE = "host" if find_spec("composer") else "venv"

# What a rank is that waits for a peer; its words are looked for among the processes of the nodes.
MARK = "twinrun-waits"
WAITS = program("import time; time.sleep(600)", MARK)


def submitted(site: LoadedSite, run: Path, command: NodeCommand = WAITS) -> Submission:
    """Return two nodes' job as soon as it runs."""
    job = handed(site, run, command)
    if command is WAITS:
        # Processes of a job that was just cancelled may still wait: this one has its nodes first.
        workers = ("worker1", "worker2")
        until(lambda: job.poll() is None and job.nodes == workers and all(map(waiting, workers)))
    return job


def waiting(node: str) -> list[str]:
    """Return the processes of a worker that wait."""
    return processes(node, f"sleep.600. {MARK}")


def test_the_site_is_well(site: LoadedSite, folder: Path) -> None:
    diagnosis = check_site(ROOT, site)
    assert {check.name: check.status for check in diagnosis.checks}["job"] == "ok", diagnosis
    assert diagnosis.exit_code == 0
    wrong = {check.name: check for check in check_site(ROOT, changed(site, partition="gpuu")).checks}
    assert "nvalid partition" in wrong["job"].found
    scheduler = load_scheduler("slurm", site=site)
    assert scheduler.unusable(nodes=2) is None
    assert "2 of the site are up" in str(scheduler.unusable(nodes=3))


def test_what_sbatch_refuses_is_the_sites_fault(site: LoadedSite, folder: Path) -> None:
    for key in ("partition", "account", "gres"):
        with pytest.raises(InputError, match="sbatch refuses the job") as caught:
            submitted(changed(site, **{key: "nonsense"}), folder / f"refused-{key}")
        assert str(caught.value.place).endswith("cluster.toml:site.local")
    with pytest.raises(InputError, match="do not see the run folder"):
        submitted(site, Path("/srv/elsewhere"))


def test_sbatch_reads_the_script_of_every_site(site: LoadedSite, folder: Path) -> None:
    """It knows each option, and refuses a name that this cluster does not have."""
    file = folder / "read.sh"
    for name in (name for name, one in SITES.items() if one.site.scheduler == "slurm"):
        file.write_text(golden(name, SITES[name].site.launcher, "venv"), encoding="utf-8")
        with pytest.raises(MachineError) as caught:
            client_of(site).ask("sbatch", "--test-only", str(file))
        assert re.search("nvalid (generic resource|partition|account|qos|feature)", str(caught.value.found))


# srun ends the processes that are left when one fails, and the highest status counts. So the second node
# fails when the first can have no other status any more: locks of a process are given away after it is set.
ONE_AFTER_THE_OTHER = """
import fcntl, os, pathlib, sys, time
there, lock = (pathlib.Path(sys.argv[1], name) for name in ("there", "lock"))
second = os.environ["TWINRUN_NODE"] == "1"
while second and not there.exists():
    time.sleep(0.01)
stream = lock.open("w")
fcntl.flock(stream, fcntl.LOCK_EX)
there.touch()
print(os.environ["TWINRUN_FIRST_NODE"])
sys.exit(7 if second else 0)
"""


def test_exit_statuses_and_logs_come_back(site: LoadedSite, folder: Path) -> None:
    there = folder / "there"
    there.mkdir()
    job = submitted(site, folder / "fails", program(ONE_AFTER_THE_OTHER, str(there)))
    assert ended(job) == 7
    logs = {path.name: path.read_text(encoding="utf-8") for path in job.logs()}
    assert logs.keys() == {"launcher.log", "launcher-0.log", "launcher-1.log"}
    assert logs["launcher-0.log"] == logs["launcher-1.log"] == "worker1\n"


def test_a_job_is_listed_and_cancelled_leaves_nothing_and_can_be_resumed(
    site: LoadedSite, folder: Path
) -> None:
    job = submitted(site, folder / "cancelled")
    shown = sites.jobs(cluster="local")
    assert shown
    found = {one["id"]: (one["state"], one["name"], one["nodes"]) for one in shown.data}
    sites.jobs(cluster="local", cancel=job.handle)
    error = ended(job)
    assert found[job.handle] == ("RUNNING", "twinrun-nodes=2", "worker[1-2]")
    assert isinstance(error, RunInterruptedError)
    assert "CANCELLED" in str(error)
    job.cancel()
    until(lambda: not waiting("worker1") and not waiting("worker2"))


LOOKS = """
import os, pathlib, sys
file = pathlib.Path(sys.argv[1]) / os.environ["TWINRUN_NODE"]
file.write_text(f"{len(os.sched_getaffinity(0))} {os.environ.get('SAID')} {os.environ['TWINRUN_PORT']}")
"""


def test_ranks_get_their_cores_what_set_up_lines_say_and_a_port_of_the_job(
    site: LoadedSite, folder: Path
) -> None:
    """Slurm binds tasks here: without --cpus-per-task on srun the process would have one core."""
    told = changed(site, setup=("export SAID=yes",), modules=())
    job = submitted(told, folder / "looks", program(LOOKS, str(folder)))
    assert ended(job) == 0
    found = {(folder / name).read_text(encoding="utf-8") for name in ("0", "1")}
    assert found == {f"{site.site.rank_cores} yes {10_000 + int(job.handle)}"}
    broken = changed(site, setup=("true", "echo no such license >&2; false", "touch started"))
    error = ended(submitted(broken, folder / "set-up", program("pass")))
    assert isinstance(error, RunError)
    assert str(error.place).endswith("site.local.setup")
    assert "this set-up line failed: echo no such license" in str(error.found)
    assert not (folder / "set-up" / "started").exists()


GROWS = "import time; block = bytearray(900 << 20); time.sleep(60)"


def test_a_job_that_asks_for_no_memory_gets_little(site: LoadedSite, folder: Path) -> None:
    grows = program(GROWS)
    error = ended(submitted(changed(site, memory_gib=None), folder / "grows", grows))
    assert isinstance(error, TwinrunError) or error != 0
    asked = submitted(changed(site, memory_gib=2), folder / "asked", grows)
    until(lambda: asked.poll() is None and len(asked.nodes) == 2)
    time.sleep(6)
    assert asked.poll() is None
    asked.cancel()


@pytest.mark.parametrize(("launcher", "detach"), [("torchrun", True), ("mpirun", False), ("srun", False)])
def test_two_nodes_train_and_leave_a_record(
    site: LoadedSite, folder: Path, launcher: str, *, detach: bool
) -> None:
    options = ["--launcher", launcher]
    if detach:
        sent = trained(folder, "local", ENGINE, *options, "--detach")
        assert sent.returncode == 0, sent.stderr
        (waiting,) = json.loads(sent.stdout)["jobs"]
        assert (waiting["point"], waiting["detached"]) == ("nodes=2", True)
        options.append("--resume")
    done = trained(folder, "local", ENGINE, *options)
    assert done.returncode == 0, done.stderr
    assert ("goes on with job" in done.stderr) is detach
    record = json.loads(Path(json.loads(done.stdout)["record"]).read_text(encoding="utf-8"))
    assert record["plan"]["launcher"] == launcher
    allocation = record["allocation"]
    assert (allocation["scheduler"], allocation["site"]) == ("slurm", "local")
    assert allocation["nodes"] == ["worker1", "worker2"]
    for report in allocation["reports"].values():
        assert report["transport"]["GLOO_SOCKET_IFNAME"] == "eth0"
        assert "eth0" in [one["name"] for one in report["interfaces"]]
    (point,) = record["points"]
    assert (point["id"], point["hosts"]) == ("nodes=2", ["worker1", "worker2"])
    (planned,) = record["plan"]["points"]
    assert (planned["nodes"], planned["devices_per_node"]) == (2, 1)


WATCH = """#!/bin/sh
export PYTHONPATH={root}/src
exec {python} {root}/recipes/cluster-acceptance/node_health.py {file} --drain
"""


def test_slurm_runs_the_health_check_and_drains_the_node(site: LoadedSite, folder: Path) -> None:
    file, program = folder / "health.json", folder / "watch"
    check, fault = "link-performance", {"outcome": "fail", "reason": "9 Mbit/s", "remedy": "cable"}
    failed = NodeCheck.model_validate({"check": check, "node": "worker2", **fault})
    passed = NodeCheck(check=check, node="worker1", outcome="pass", reason="")
    now = datetime.datetime.now(datetime.UTC).isoformat()
    health = Health(run="r", created=now, checks=(failed, passed))
    file.write_text(health.model_dump_json(), encoding="utf-8")
    program.write_text(WATCH.format(root=ROOT, python=sys.executable, file=file), encoding="utf-8")
    program.chmod(0o755)
    settings = local_folder() / "files" / "slurm.conf"
    before = settings.read_text(encoding="utf-8")
    asked = f"HealthCheckProgram={program}\nHealthCheckInterval=2\nHealthCheckNodeState=ANY\n"
    settings.write_text(before + asked, encoding="utf-8")
    client = client_of(site)
    try:
        client.ask("scontrol", "reconfigure")
        until(lambda: "DRAIN" in client.ask("scontrol", "show", "node", "worker2"))
        shown = client.ask("scontrol", "show", "node", "worker2")
        assert "twinrun: link-performance: 9 Mbit/s; cable" in shown
        assert "DRAIN" not in client.ask("scontrol", "show", "node", "worker1")
    finally:
        settings.write_text(before, encoding="utf-8")
        client.ask("scontrol", "reconfigure")
        # Programs that were started before it may still drain the node.
        time.sleep(3)
        docker("exec", container("controller"), "scontrol", "update", "NodeName=worker2", "State=RESUME")
    until(lambda: client.size() == 2)


def test_a_first_site_file_is_written_and_two_nodes_are_proved(
    site: LoadedSite, capsys: pytest.CaptureFixture[str]
) -> None:
    sites.cluster("describe", cluster="local", partition="short").show(as_json=False)
    made = tomllib.loads(capsys.readouterr().out)["site"]["short"]
    assert (made["partition"], made["minutes"], made["gres"], made["nodes"]) == ("short", 5, "slot", 1)
    wrong = check_site(ROOT, changed(site, minutes=90, memory_gib=64, cores_per_rank=512, account="nobody"))
    failed = {check.name for check in wrong.checks if check.status == "fail"}
    assert failed >= {"partition", "memory", "cores", "job"}
    if ENGINE == "host":
        found = qualified(Project(ROOT), "local", key=None, say=print, engine="host")
        assert (found.faults, found.nodes, found.transport) == ((), ("worker1", "worker2"), "TCP over eth0")
        assert found.bus_gb_s
        assert found.bus_gb_s > 0.01
        assert (found.left_after_cancel, (found.cold_start_s or 0) > 0) == (False, True)
        rows = {one.name: one for one in check_site(ROOT, site).checks}
        assert "as declared, on worker1, worker2" in rows["measured"].found, rows["measured"]
        assert "TCP over eth0" in rows["network"].found


def test_a_node_that_dies_is_named(site: LoadedSite, folder: Path) -> None:
    job = submitted(site, folder / "killed")
    docker("kill", container("worker2"))
    try:
        error = ended(job)
        assert isinstance(error, RunError), error
        assert "worker2" in str(error)
    finally:
        docker("start", container("worker2"))
    job.cancel()
    until(lambda: not waiting("worker1"))
    until(lambda: client_of(site).size() == 2)
