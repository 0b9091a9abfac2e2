"""`invoke jobs` at a site whose Slurm a script plays: what is listed, cancelled, and refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.refusals import error_message
from tests.commands import ROOT, invoke

SITE = """
[site.played]
scheduler = "slurm"
vendor = "cpu"
nodes = 2
devices_per_node = 1
cores_per_node = 1
shared = ["/shared"]
client = ["{python}", "{script}"]
poll_seconds = 0.01
"""
PLAYED = """
import pathlib, sys
here = pathlib.Path(__file__).parent
command, *arguments = sys.argv[1:]

def show(number, name, state, reason, nodes):
    print(f"JobId={number} JobName={name} UserId=alice(1000) JobState={state} Reason={reason} ExitCode=0:0",
          f"RunTime=00:00:10 TimeLimit=01:00:00 NodeList={nodes} StdOut={here}/log/launcher.log")

if command == "scancel":
    (here / "cancelled").write_text(arguments[-1])
elif arguments == ["show", "job", "--oneliner"]:
    show(12, "twinrun-nodes=2", "RUNNING", "None", "node[1-2]")
    show(13, "twinrun-nodes=4", "PENDING", "Resources", "(null)")
    show(14, "another", "RUNNING", "None", "node3")
else:
    sys.exit("slurm_load_jobs error: Invalid job id specified")
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    script = tmp_path / "played.py"
    script.write_text(PLAYED, encoding="utf-8")
    file = tmp_path / "cluster.toml"
    file.write_text(SITE.format(python=sys.executable, script=script), encoding="utf-8")
    return tmp_path


def jobs(site: Path, *options: str, name: str = "played") -> subprocess.CompletedProcess[str]:
    variables = {"TWINRUN_CLUSTER": str(site / "cluster.toml"), "TWINRUN_CACHE": str(site / "cache")}
    return invoke(ROOT, "jobs", "--cluster", name, *options, variables=variables)


def test_jobs_of_ours_are_listed(site: Path) -> None:
    done = jobs(site)
    assert done.returncode == 0, done.stderr
    _, running, waiting = (line.split() for line in done.stdout.splitlines())
    assert running == ["12", "RUNNING", "None", "10.0", "alice", "twinrun-nodes=2", "node[1-2]"]
    assert waiting == ["13", "PENDING", "Resources", "10.0", "alice", "twinrun-nodes=4"]


def test_a_job_is_cancelled(site: Path) -> None:
    assert jobs(site, "--cancel", "12").returncode == 0
    assert (site / "cancelled").read_text(encoding="utf-8") == "12"


@pytest.mark.parametrize("number", ["twelve", "12;true"])
def test_what_is_no_job_is_refused(site: Path, number: str) -> None:
    done = jobs(site, "--cancel", number)
    assert "a job is named by its number" in error_message(done, 2)
    assert not (site / "cancelled").exists()


def test_a_misspelt_site_is_refused(site: Path) -> None:
    message = error_message(jobs(site, name="playd"), 2)
    assert "unknown site" in message
    assert "played" in message
