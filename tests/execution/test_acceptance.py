"""The acceptance of three nodes through Slurm: all 18 checks are judged, and none raises an alarm."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.execution.clusters import ROOT, SECONDS, cluster
from twinrun.manifests.cluster import LoadedSite
from twinrun.protocol.measurements import Check

pytestmark = pytest.mark.cluster

NODES = ("worker1", "worker2", "worker3")
ALLOWED_SECONDS = 180
# Without a GPU nobody can know.
UNKNOWN = {"enumerate-gpus", "network-topology"}


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """What a run of the recipe left."""

    status: int
    checks: tuple[Check, ...]
    excluded: str

    @property
    def seconds(self) -> float:
        """What the checks took, one after the other."""
        longest: defaultdict[str, float] = defaultdict(float)
        for one in self.checks:
            longest[one.id] = max(longest[one.id], one.seconds or 0)
        return sum(longest.values())

    def having(self, outcome: str) -> set[str]:
        return {one.id for one in self.checks if one.outcome == outcome}

    def failed(self) -> dict[str, set[str]]:
        """Return the nodes that each check blames."""
        found: defaultdict[str, set[str]] = defaultdict(set)
        for one in self.checks:
            if one.outcome == "fail":
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
    command = [sys.executable, "-m", "invoke", "run", "recipes/cluster-acceptance", *options]
    began = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=SECONDS)
    whole = time.monotonic() - began
    assert done.returncode in (0, 1), done.stderr
    file = Path(json.loads(done.stdout)["record"])
    (point,) = json.loads(file.read_text(encoding="utf-8"))["points"]
    found = Accepted(
        status=done.returncode,
        checks=tuple(Check.model_validate_json(json.dumps(one)) for one in point["checks"]),
        excluded=file.with_name("exclude.txt").read_text(encoding="utf-8").strip(),
    )
    for one in found.checks:
        sys.stdout.write(f"{one.id}, {one.place}: {one.outcome} {one.reason}\n")
    sys.stdout.write(f"{whole:.0f} s, of which the checks {found.seconds:.0f}\n")
    return found


def test_alike_nodes_are_accepted_in_three_minutes(folder: Path) -> None:
    found = accepted(folder)
    assert len({one.id for one in found.checks}) == 18
    assert found.failed() == {}
    assert found.having("unknown") == UNKNOWN
    assert (found.status, found.excluded) == (0, "")
    # Of the checks: what else a machine does before them is not theirs.
    assert found.seconds < ALLOWED_SECONDS
