"""`invoke jobs` at a site whose Slurm a script plays: what is listed, followed, cancelled, and refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
# A job goes on to its next state each time it is asked for; a node prints while it runs.
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
elif arguments == ["show", "job", "12", "--oneliner"]:
    states = here / "states"
    now, *left = states.read_text().split()
    states.write_text(" ".join(left))
    with (here / "log" / "launcher-1.log").open("a") as stream:
        print("while", now, file=stream)
    show(12, "twinrun-nodes=2", now, "None", "node[1-2]")
else:
    sys.exit("slurm_load_jobs error: Invalid job id specified")
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "launcher.log").write_text("the script\n", encoding="utf-8")
    (tmp_path / "states").write_text("PENDING RUNNING COMPLETED", encoding="utf-8")
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
    running, waiting = (line.split() for line in done.stdout.splitlines())
    assert running == ["12", "RUNNING", "10", "s", "alice", "twinrun-nodes=2", "node[1-2]"]
    assert waiting == ["13", "PENDING", "10", "s", "alice", "twinrun-nodes=4", "Resources"]


def test_a_job_is_followed_to_its_end(site: Path) -> None:
    done = jobs(site, "--follow", "12")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        *("12 COMPLETED", "the script", "while COMPLETED", "while PENDING", "while RUNNING")
    ]
    assert done.stdout.endswith("12 COMPLETED\n")


def test_a_job_is_cancelled(site: Path) -> None:
    assert jobs(site, "--cancel", "12").returncode == 0
    assert (site / "cancelled").read_text(encoding="utf-8") == "12"


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        (("--follow", "twelve"), 2, "a job is named by its number"),
        (("--cancel", "12;true"), 2, "a job is named by its number"),
        (("--follow", "99"), 4, "Slurm does not know this job"),
    ],
)
def test_what_is_no_job_is_refused(site: Path, options: tuple[str, ...], status: int, said: str) -> None:
    done = jobs(site, *options)
    assert done.returncode == status, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not (site / "cancelled").exists()


def test_a_misspelt_site_is_refused(site: Path) -> None:
    done = jobs(site, name="playd")
    assert done.returncode == 2
    assert "unknown site" in done.stderr
    assert "played" in done.stderr
