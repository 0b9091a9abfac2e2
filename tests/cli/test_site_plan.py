"""`invoke run --cluster SITE --dry`: the plan of a site that no machine here is."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.commands import ROOT, invoke, invoke_anew

SITE = """
[site.big]
scheduler = "slurm"
engine = "venv"
vendor = "cuda"
gpu = "h200"
nodes = 1024
devices_per_node = 8
cores_per_node = 96
partition = "gpu"
gres = "gpu:h200"
shared = ["/shared"]
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    file = tmp_path / "cluster.toml"
    file.write_text(SITE, encoding="utf-8")
    return file


def dry(
    cluster: Path, *options: str, run: Callable[..., subprocess.CompletedProcess[str]] = invoke
) -> subprocess.CompletedProcess[str]:
    command = ["run", "recipes/mpt7b-scaling", "--cluster", "big", "--scale", "node", "--dry", *options]
    variables = {"TWINRUN_CLUSTER": str(cluster), "TWINRUN_CACHE": str(cluster.parent / "cache")}
    return run(ROOT, *command, variables=variables)


def test_a_thousand_nodes_are_planned_on_one_page(cluster: Path) -> None:
    sets = [f"--set={text}" for text in ("devices=8192", "global_batch=8192", "model=mpt-7b")]
    done = dry(cluster, *sets, "--json", run=invoke_anew)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    (point,) = printed["plan"]["points"]
    assert (point["nodes"], point["devices_per_node"]) == (1024, 8)
    script = printed["scripts"]["devices=8192"]
    assert "#SBATCH --nodes=1024\n" in script
    assert "#SBATCH --gres=gpu:h200:8\n" in script
    assert len(script.splitlines()) < 50
    page = dry(cluster, *sets).stdout
    assert len(page.splitlines()) < 100
    assert "#SBATCH --nodes=1024\n" in re.sub(r" +$", "", page, flags=re.MULTILINE)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("partition", "partion", "did you mean `partition`?"),
        ('"gpu"', '"gpu; true"', "cluster.toml:site.big.partition"),
        ("h200", "h201", "cluster.toml:site.big.g"),
        ('"cuda"', '"cudaa"', "cudaa"),
        ('"venv"', '"conda"', "cluster.toml:site.big.engine: unknown engine"),
        ("site.big", "site.bigg", "unknown site"),
    ],
)
def test_a_wrong_cluster_toml_is_named(cluster: Path, old: str, new: str, said: str) -> None:
    cluster.write_text(SITE.replace(old, new, 1), encoding="utf-8")
    done = dry(cluster)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("devices", [9, 12])
def test_devices_must_fill_nodes(cluster: Path, devices: int) -> None:
    batch = f"--set=global_batch={16 * devices}"
    done = dry(cluster, f"--set=devices={devices}", batch, "--set=model=mpt-1b")
    assert done.returncode == 2
    assert "the devices do not fill the nodes" in done.stderr


def test_a_prediction_counts_the_nodes_of_the_site(cluster: Path) -> None:
    """More than one node needs the site's link; with it each point has a time."""
    asked = ("--set=devices=8,32", "--set=model=mpt-7b", "--json")
    points = json.loads(dry(cluster, *asked).stdout)["plan"]["points"]
    assert [bool(point["predicted"][0]["seconds"]) for point in points] == [True, False]
    assert "network_gbit_s" in points[1]["predicted"][0]["unknown"]
    cluster.write_text(f"{SITE}network_gbit_s = 400\n", encoding="utf-8")
    one, four = (
        point["predicted"][0]["seconds"]
        for point in json.loads(dry(cluster, *asked).stdout)["plan"]["points"]
    )
    assert four > one / 4
