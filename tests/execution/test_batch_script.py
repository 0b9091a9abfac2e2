"""The script of a job: golden for the sites of the guide, as long for any number of nodes, safe to quote."""

from __future__ import annotations

import json
import os
import re
import subprocess
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml  # type: ignore[import-untyped]
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from tests.execution.clusters import changed
from tests.execution.placements import SITE, PlacementStandIn, commands_of
from tests.goldens import check_golden
from twinrun.execution.containers import Docker
from twinrun.execution.engine import Engine, Workspace, log_folder
from twinrun.execution.engines import ENGINES, Apptainer, ImageFile, Interpreter, Pyxis, Singularity
from twinrun.execution.launchers import LAUNCHERS as KNOWN
from twinrun.execution.ranks import Launch
from twinrun.execution.schedulers import SCHEDULERS
from twinrun.foundation.errors import InputError, MachineError
from twinrun.foundation.manifest import validate
from twinrun.manifests.cluster import ClusterTable, LoadedSite
from twinrun.manifests.vendor import load_gpus, load_vendors

ROOT = Path(__file__).resolve().parents[2]
LAUNCHERS = ("mpirun", "srun", "torchrun")
# Each makes a file where a shell obeys it.
ATTACKS = (
    *("; touch {canary} ;", "$(touch {canary})", "`touch {canary}`", "'; touch {canary}; '"),
    *('"; touch {canary}; "', "\ntouch {canary}\n", "\n#SBATCH --output={canary}\ntouch {canary}"),
    *("\\\ntouch {canary}", "}}\ntouch {canary}\nstart() {{", "${{RUN@P}}$(touch {canary})"),
    *("$RUN$(touch {canary})", "$TWINRUN_NODE`touch {canary}`", "&& touch {canary} #", "| touch {canary}"),
    *("> {canary}", "a\r\ntouch {canary}", "!touch {canary}", "$'\\ntouch {canary}'"),
    *("--wrap=touch {canary}", "\x1b]0;\x07; touch {canary}"),
)
# Stand-ins for what the script calls: they print what they are given, and start the body once.
FAKES = """
scontrol() { echo localhost; }
squeue() { echo RUNNING; }
srun() { while [[ $1 != bash ]]; do shift; done; SLURM_NODEID=0 SLURM_PROCID=0 SLURM_LOCALID=0 "$@"; }
mpirun() { while [[ $1 != bash ]]; do shift; done; OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_LOCAL_RANK=0 "$@"; }
exec() { if [[ $# -gt 0 ]]; then "$@"; exit; fi; builtin exec; }
SLURM_JOB_NODELIST=node1 SLURM_JOB_ID=1
"""


@pytest.fixture(scope="module", autouse=True)
def _cache() -> Iterator[None]:
    """Golden files have no place of one machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TWINRUN_CACHE", "/shared/cache")
        yield


class ScriptJob(BaseModel):
    """The least that a job has."""

    out: str = "/run"


def script(launcher: str, *, site: LoadedSite = SITE, engine: str = "", **told: Any) -> str:
    """Return the script of a placement: of two nodes with eight devices, of folders that all nodes see."""
    placement = told.get("placement", PlacementStandIn(id="nodes=2", nodes=2, devices_per_node=8))
    root, run = told.get("root", Path("/shared/project")), told.get("run", Path("/shared/run"))
    workspace = Workspace(root=root, run=run, data=Path("/shared/data"), nodes=site.site)
    own: dict[str, Any] = {"vendor": load_vendors(ROOT)[site.site.vendor], "workspace": workspace}
    python = told.get("python", "/shared/environment/bin/python")
    renderer: Engine = Interpreter(python=python, workspace=workspace)
    kinds: dict[str, type[ImageFile]] = {"apptainer": Apptainer, "pyxis": Pyxis, "singularity": Singularity}
    if engine == "docker":
        renderer = Docker(image="twinrun/stack:a1b2", **own)
    elif engine in kinds:
        renderer = kinds[engine](file=Path(f"/shared/stack.{kinds[engine].form}"), **own)
    variables = {"TOLD": told.get("payload", "told"), **site.site.environment}
    ranks = commands_of(renderer, workspace, launcher=launcher, site=site, **variables)
    job: Any = ScriptJob()
    task = ranks.task(Launch(placement=placement, script=root / "train.py", job=job), attempt="a1b2")
    made = ranks.scheduler.script(task, run=str(run), logs=str(log_folder(run, placement.id)))
    assert made is not None
    return made


GUIDE = (ROOT / "docs" / "guides" / "describe-a-cluster.md").read_text(encoding="utf-8")
OTHERS = Path(__file__).with_name("sites.toml").read_text(encoding="utf-8")
TABLES = [
    validate(tomllib.loads(text), ClusterTable, place="cluster.toml")
    for text in (*re.findall(r"```toml\n(.*?)```", GUIDE, re.DOTALL), OTHERS)
]
SITES = {
    name: LoadedSite(name=name, place=f"cluster.toml:site.{name}", site=site)
    for table in TABLES
    for name, site in table.site.items()
}
# The one table: site, which has the scheduler, with the launchers and engines that it can have.
CASES = [
    *(("mi250", launcher, "docker") for launcher in LAUNCHERS),
    *(("lumi-g", "srun", engine) for engine in ("singularity", "venv")),
    *(("frontier", launcher, "venv") for launcher in ("srun", "torchrun")),
    *(("h100", launcher, "pyxis") for launcher in ("srun", "torchrun")),
    *((site, "torchrun", "venv") for site in ("grid", "polaris")),
    *((site, "torchrun", "singularity") for site in ("leonardo", "marenostrum5")),
    ("juwels", "srun", "apptainer"),
    *((site, "torchrun", "docker") for site in ("eks", "lab", "cloud")),
]
SKY = [name for name, one in SITES.items() if one.site.scheduler == "skypilot"]


def golden(site: str, launcher: str, engine: str) -> str:
    """Return the script of two whole nodes of a site, as it is on any machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "getuid", lambda: 1234)
        patch.setattr(os, "getgid", lambda: 1234)
        ranks = SITES[site].site.devices_per_node
        placement = PlacementStandIn(id="nodes=2", nodes=2, devices_per_node=ranks)
        return script(launcher, site=SITES[site], placement=placement, engine=engine)


@pytest.mark.parametrize(("site", "launcher", "engine"), CASES)
def test_the_script_is_the_golden_one(site: str, launcher: str, engine: str) -> None:
    text = golden(site, launcher, engine)
    check_golden(f"task-{site}.yaml" if site in SKY else f"job-{site}-{launcher}-{engine}.sh", text)
    body = textwrap.dedent(text.partition("run: |\n")[2]) if site in SKY else text
    subprocess.run(["bash", "-n"], input=body, text=True, check=True)


def test_every_kind_of_part_and_ten_sites_are_in_the_table() -> None:
    assert {case[1] for case in CASES} == set(KNOWN)
    # What is not there starts on one machine, or as the others do.
    assert set(ENGINES) - {case[2] for case in CASES} == {"host", "podman"}
    assert set(SCHEDULERS) - {SITES[case[0]].site.scheduler for case in CASES} == {"local"}
    rows = set(load_gpus(ROOT)) | {one.id for table in TABLES for one in table.gpu}
    assert {name: one.site.gpu for name, one in SITES.items() if one.site.gpu not in rows} == {}
    assert len(SITES) == len({case[0] for case in CASES}) > 10


@pytest.mark.parametrize("site", SKY)
def test_skypilot_takes_the_task_file(site: str) -> None:
    """By the schemas that its parser holds a task file against."""
    schemas = json.loads(Path(__file__).with_name("skypilot.schema.json").read_text(encoding="utf-8"))
    task = yaml.safe_load(golden(site, "torchrun", "docker"))
    jsonschema.validate(task, schemas["task"])
    jsonschema.validate(task["resources"], schemas["resources"])
    for bucket in task.get("file_mounts", {}).values():
        jsonschema.validate(bucket, schemas["storage"])
    assert task["resources"]["accelerators"] == {SITES[site].site.gres: SITES[site].site.devices_per_node}
    assert task["resources"]["image_id"] == "docker:twinrun/stack:a1b2"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(task | {"nodes": 2}, schemas["task"])


@pytest.mark.parametrize(("status", "left"), [(0, "0"), (7, "7")])
def test_a_task_of_skypilot_leaves_its_status_and_its_log(status: int, left: str, tmp_path: Path) -> None:
    """The first node's script run here: the stack's interpreter is played."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/bash\necho ranks of $TWINRUN_NODE\nexit {status}\n", encoding="utf-8")
    python.chmod(0o755)
    site = changed(SITES["lab"], vendor="cpu", gpu=None, gres=None, setup=(), shared=(str(tmp_path),))
    text = script("torchrun", site=site, root=tmp_path, run=tmp_path / "run", python=str(python))
    logs = tmp_path / "run" / "log" / "nodes=2"
    logs.mkdir(parents=True)
    told = os.environ | {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    run = textwrap.dedent(text.partition("run: |\n")[2])
    assert subprocess.run(["bash", "-c", run], env=told, check=False).returncode == status
    assert (logs / "status").read_text(encoding="ascii") == f"{left}\n"
    assert (logs / "launcher-0.log").read_text(encoding="utf-8") == "ranks of 0\n"


@pytest.mark.parametrize(
    ("site", "ranks", "asked"),
    [("leonardo", 4, 480), ("leonardo", 1, 120), ("lumi-g", 1, 480), ("h100", 1, 0)],
)
def test_a_part_of_a_shared_node_asks_for_its_share_of_the_memory(site: str, ranks: int, asked: int) -> None:
    """A site with whole or exclusive nodes has no other job that uses the rest."""
    placement = PlacementStandIn(id="devices=1", devices_per_node=ranks)
    made = script("torchrun", site=SITES[site], placement=placement)
    assert f"#SBATCH --mem={asked}{'G' if asked else ''}\n" in made


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_thousand_nodes_need_no_more_lines_than_two(launcher: str) -> None:
    many = script(launcher, placement=PlacementStandIn(id="nodes=1024", nodes=1024, devices_per_node=8))
    assert len(many.splitlines()) == len(script(launcher).splitlines()) < 52
    assert len(many) < 4000


def test_pyxis_starts_under_srun_alone() -> None:
    with pytest.raises(MachineError, match=r"srun alone starts commands of this engine[^~]*mpirun"):
        script("mpirun", engine="pyxis")
    with pytest.raises(InputError, match="no mount of Pyxis can name this folder"):
        script("srun", engine="pyxis", root=Path("/shared/a,b"))


def run_here(made: str, folder: Path, fakes: str = FAKES) -> subprocess.CompletedProcess[str]:
    """Run a script, whose scheduler is played, with the programs of `folder` first."""
    (folder / "run" / "log" / "nodes=2").mkdir(parents=True, exist_ok=True)
    told = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}
    return subprocess.run(["bash"], input=fakes + made, env=told, text=True, capture_output=True, check=False)


@pytest.mark.parametrize("known", [True, False])
def test_each_node_says_which_image_it_has(tmp_path: Path, *, known: bool) -> None:
    """A program plays the engine: it knows the image or refuses, and shows what a container is told."""
    engine, seen = tmp_path / "docker", tmp_path / "seen"
    answer = "echo sha256:0f1e" if known else "echo no such image >&2; exit 1"
    shown = f'elif [[ $1 == run ]]; then env > {seen}; echo "$@" >> {seen}; fi'
    engine.write_text(f"#!/bin/bash\nif [[ $1 == image ]]; then {answer}\n{shown}\n", encoding="utf-8")
    engine.chmod(0o755)
    done = run_here(script("torchrun", root=tmp_path, run=tmp_path / "run", engine="docker"), tmp_path)
    assert (done.returncode == 0) is seen.exists() is known, done.stderr
    assert known or "no such image" in done.stderr
    if known:
        text = seen.read_text(encoding="utf-8")
        assert ("TWINRUN_IMAGE=sha256:0f1e\n" in text, "--env TWINRUN_IMAGE " in text) == (True, True)
    # Without a network the container has its node's name, not that of the machine that plans.
    alone = PlacementStandIn(id="nodes=1", nodes=1, devices_per_node=8)
    assert '--hostname "$TWINRUN_FIRST_NODE" ' in script("torchrun", placement=alone, engine="docker")


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_a_node_that_cannot_name_the_first_says_so_at_once(launcher: str, tmp_path: Path) -> None:
    made = script(launcher, root=tmp_path, run=tmp_path / "run", python="/bin/true")
    done = run_here(made, tmp_path, FAKES.replace("echo localhost", "echo no-such-node.invalid"))
    assert done.returncode == 96
    logs = (tmp_path / "run").rglob("*.log")
    said = done.stderr + "".join(file.read_text(encoding="utf-8") for file in logs)
    assert "does not know the name no-such-node.invalid" in said


payloads = st.builds(
    lambda before, attack, after: f"{before}{attack}{after}",
    st.text(max_size=8).filter(lambda text: "\0" not in text and text.isprintable()),
    st.sampled_from(ATTACKS),
    st.sampled_from(["", "'", '"', "\\", "\n", ")", "$(", " #"]),
)


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
@settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(attack=payloads)
def test_nothing_that_the_script_quotes_is_run(launcher: str, attack: str, tmp_path: Path) -> None:
    """200 payloads in every string of a plan that reaches the script, run by bash."""
    canary = tmp_path / "canary"
    text = attack.replace("{canary}", str(canary)).replace("{{", "{").replace("}}", "}")
    folder = tmp_path / "here"
    folder.mkdir(exist_ok=True)
    python, heard = tmp_path / "python", tmp_path / "heard"
    python.write_text(f'#!/bin/bash\nprintf %s "$TOLD" > {heard}\n', encoding="utf-8")
    python.chmod(0o755)
    heard.unlink(missing_ok=True)
    placement = PlacementStandIn(id=text.replace("/", "_"), devices_per_node=1)
    made = script(
        launcher, placement=placement, root=folder, run=folder / "run", python=str(python), payload=text
    )
    assert all(line.startswith("#SBATCH --") for line in made.splitlines() if "SBATCH" in line[:8])
    options = [line for line in made.splitlines() if line.startswith("#SBATCH")]
    assert all(set(" ;$`'\"\\&|<>").isdisjoint(line.partition(" ")[2]) for line in options)
    subprocess.run(
        ["bash"], input=FAKES + made, text=True, cwd=folder, capture_output=True, check=False, timeout=30
    )
    assert not canary.exists(), made
    # The command was started all the same, and was told the text as it is.
    assert "$RUN" in text or "$TWINRUN_" in text or heard.read_bytes().decode() == text


TEXTS = ("partition", "account", "qos", "gres")
LISTS = ("exclude", "interfaces")


@pytest.mark.parametrize("attack", ATTACKS)
def test_cluster_toml_refuses_what_is_no_word(attack: str) -> None:
    text = attack.replace("{canary}", "canary")
    site = SITE.site.model_dump(mode="json")
    for key in (*TEXTS, *LISTS, "vendor", "engine", "gpu"):
        given_here = {**site, key: [text] if key in LISTS else text}
        with pytest.raises(InputError) as caught:
            validate({"site": {"hpc": given_here}}, ClusterTable, place="cluster.toml")
        assert f"cluster.toml:site.hpc.{key}" in str(caught.value)
