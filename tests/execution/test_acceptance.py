"""The acceptance of three nodes through Slurm: all 18 checks are judged, and faults found at their nodes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.execution.clusters import ROOT, SECONDS, cluster, container, docker
from twinrun.manifests.cluster import LoadedSite
from twinrun.protocol.measurements import Check

pytestmark = pytest.mark.cluster

NODES = ("worker1", "worker2", "worker3")
# Without a GPU nobody can know.
UNKNOWN = {"enumerate-gpus", "network-topology"}
LIMIT = "tc qdisc add dev eth0 root tbf rate 10mbit burst 32kb latency 400ms"
MTU = "ip link set eth0 mtu 1400"
HANGS = r"printf '#!/bin/sh\nexec sleep 600\n' > /usr/local/bin/mpirun; chmod +x /usr/local/bin/mpirun"
NO_LIMIT = "sacctmgr --immediate --quiet modify qos low set MaxJobsPerUser=-1"


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """What a run of the recipe left."""

    status: int
    checks: tuple[Check, ...]
    excluded: str

    def having(self, outcome: str) -> dict[str, set[str]]:
        """Return the nodes that each check with an outcome names."""
        found: defaultdict[str, set[str]] = defaultdict(set)
        for one in self.checks:
            if one.outcome == outcome:
                found[one.id].update(one.nodes)
        return dict(found)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module", autouse=True)
def site(folder: Path) -> Iterator[LoadedSite]:
    with cluster(nodes=len(NODES), folder=folder) as site:
        yield site


def accepted(folder: Path) -> Accepted:
    """Run the recipe on all nodes."""
    options = ["--cluster", "local", "--set", f"devices={len(NODES)}", "--out", str(folder), "--json"]
    command = [sys.executable, "-m", "twinrun", "run", "recipes/cluster-acceptance", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=SECONDS)
    assert done.returncode in (0, 1), done.stderr
    file = Path(json.loads(done.stdout)["record"])
    (point,) = json.loads(file.read_text(encoding="utf-8"))["points"]
    checks = tuple(Check.model_validate_json(json.dumps(one)) for one in point["result"]["checks"])
    excluded = file.with_name("exclude.txt").read_text(encoding="utf-8").strip()
    return Accepted(status=done.returncode, checks=checks, excluded=excluded)


def on_network(*, of: str, words: str) -> None:
    """Run a program of this machine in the network of a node."""
    ask = ["docker", "inspect", "--format={{.State.Pid}}", container(of)]
    pid = subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip()
    subprocess.run(["nsenter", "--target", pid, "--net", *words.split()], check=True, capture_output=True)


def test_alike_nodes_are_accepted(folder: Path) -> None:
    found = accepted(folder)
    assert len({one.id for one in found.checks}) == 18
    assert found.having("fail") == {}
    assert found.having("unknown").keys() == UNKNOWN
    assert (found.status, found.excluded) == (0, "")


@pytest.mark.needs("root", "ip", "tc", "nsenter")
def test_faults_are_found_at_their_nodes(folder: Path) -> None:
    """The last: nothing of it is taken back."""
    on_network(of="worker2", words=LIMIT)
    on_network(of="worker3", words=MTU)
    docker("exec", container("worker1"), "sh", "-c", HANGS)
    docker("exec", container("controller"), *NO_LIMIT.split())
    found = accepted(folder)
    assert found.having("fail") == {
        "network-interfaces": {"worker3"},
        "mpi-launch": {"worker1"},
        "link-performance": {"worker2"},
        "collective-performance": {"worker2"},
        "qos-enforcement": set(NODES),
    }
    assert found.status == 1
    assert found.excluded == ",".join(NODES)
