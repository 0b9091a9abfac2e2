"""`twinrun doctor`, `cluster`, `site` and `jobs`: what a machine or a site offers, and what runs there."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from rich.console import Group

from twinrun.cli.console import Out, Shown, demand_with, demand_without, tell
from twinrun.execution.engine import log_folder
from twinrun.execution.ranks import FOLDER, Pending, all_pending
from twinrun.execution.schedulers import client_of
from twinrun.execution.site_checks import check_site, describe
from twinrun.execution.site_qualification import contradictions, qualification_file
from twinrun.foundation.cache import SHIPPED, project_root, runs_folder
from twinrun.foundation.errors import InputError, MachineError, RunError, RunInterruptedError
from twinrun.foundation.files import write_atomically
from twinrun.foundation.terminal import VisibleConsole
from twinrun.images import local_cluster
from twinrun.machine.doctor import diagnose
from twinrun.manifests.cluster import FILE, known_gpus, load_site
from twinrun.planning.project import Project
from twinrun.report.terminal import diagnosis_lines


def doctor(*, stack: str | None = None, engine: str | None = None, cluster: str | None = None) -> Shown:
    """Check what this machine offers: GPUs, engines, disk, permissions; or that a stack or a site works.

    Args:
        stack: run the checks of this stack instead, inside its image or environment
        engine: where the stack's checks run: docker, apptainer, venv or host; docker when its image is there
        cluster: check this site of cluster.toml instead
    """
    demand_without("cluster", cluster, stack=stack, engine=engine)
    demand_with("--stack", stack, engine=engine)
    root = project_root()
    if stack:
        from twinrun.images.checks import run_checks

        outcomes = run_checks(root, stack, engine=engine, say=tell)
        return Shown(f"{stack}: {len(outcomes)} checks passed", outcomes)
    found = check_site(root, load_site(root, cluster)) if cluster else diagnose(root)
    console = VisibleConsole()
    width = console.width if console.is_terminal else None
    return Shown(Group(*diagnosis_lines(found, width=width)), found, found.exit_code)


def cluster(
    action: Literal["up", "status", "down", "describe"],
    /,
    *,
    nodes: int = 3,
    mount: tuple[Path, ...] = (),
    partition: str | None = None,
    cluster: str | None = None,
) -> Shown:
    """Start, list or remove a Slurm cluster of containers on this machine; or describe another one.

    Args:
        action: up, status or down; describe writes a first cluster.toml from what the scheduler says here
        nodes: workers
        mount: folder that nodes see beside checkout, interpreter and cache; may be given many times
        partition: of describe: the partition; the default one when left out
        cluster: of describe: a site whose `client` leads to the scheduler, where this machine has no commands
    """
    demand_with("describe", action == "describe", partition=partition, cluster=cluster)
    if action == "describe":
        return _described(cluster, partition)
    if action == "down":
        removed = local_cluster.down()
        return Shown(f"{removed} containers removed", {"removed": removed})
    if action == "up":
        mounts = tuple(one.resolve() for one in mount)
        found = local_cluster.up(project_root(), nodes=nodes, mounts=mounts, say=tell)
    else:
        found = local_cluster.status()
    lines = [f"{node.name:12} {node.container:10} {node.slurm}" for node in found]
    data = [{"node": one.name, "container": one.container, "slurm": one.slurm} for one in found]
    return Shown("\n".join(lines) or "no cluster; `twinrun cluster up` starts one", data)


def _described(site: str | None, partition: str | None) -> Shown:
    """Write a first cluster.toml from what the scheduler says here, or show it where there is one."""
    root = project_root()
    known = load_site(root, site).site if site else None
    client, scheduler = (known.client, known.scheduler) if known else ((), "slurm")
    text = describe(client=client, partition=partition, gpus=known_gpus(root), scheduler=scheduler)
    file = (Path.cwd() if root == SHIPPED else root) / FILE
    shown = text.rstrip("\n")
    if not (file.exists() or site):
        write_atomically(file, text)
        shown = f"written: {file}; `twinrun doctor --cluster SITE` holds it against the site"
    return Shown(shown, {"file": file, "text": text})


def site(action: Literal["qualify"], site: str, /, *, key: Path | None = None) -> Shown:
    """Measure what a site gives its jobs, in the engine and image that runs use there; 3 where it differs.

    Args:
        action: qualify: one job of one node, which is cancelled, and one of two
        site: site of cluster.toml
        key: private key of SSH that signs what was measured
    """
    from twinrun.runs.qualification import qualified

    tell(f"{action} {site}")
    project, declared = Project(project_root()), load_site(project_root(), site)
    found = qualified(project, site, key=key.expanduser() if key else None, say=tell)
    wrong, file = contradictions(declared.site, found, gpus=project.gpus), qualification_file(declared)
    facts = found.model_dump(mode="json")
    lines = [f"{name:18} {value}" for name, value in facts.items() if name != "faults"]
    lines += [*(f"differs   {one}" for one in wrong), f"written: {file}"]
    data = facts | {"differs": wrong, "file": file}
    return Shown("\n".join(lines), data, MachineError.exit_code if wrong else 0)


def jobs(*, cluster: str | None = None, out: Out = None, cancel: str | None = None) -> Shown:
    """List what detached runs wait for, or the jobs of twinrun at a site; end one.

    Args:
        cluster: site of cluster.toml, whose jobs are listed; what waits to be collected when left out
        out: folder of the runs instead of runs/
        cancel: number of a job to end
    """
    demand_with("--cluster", cluster, cancel=cancel)
    if cluster is None:
        return _waiting(out or runs_folder(project_root()))
    if cancel and not cancel.partition(".")[0].isdecimal():
        raise InputError("a job is named by its number", place="twinrun jobs", found=cancel)
    client = client_of(load_site(project_root(), cluster))
    if cancel:
        client.end(cancel)
    found = client.jobs()
    lines = [
        f"{job.id:>8}  {job.state:12} {job.run_seconds:6.0f} s  {job.user:12} {job.name}"
        f"  {job.nodes or job.reason}"
        for job in found
    ]
    return Shown("\n".join(lines) or f"no jobs of twinrun at {cluster}", found)


def pending(run: Path) -> Shown:
    """Return what a detached run has submitted, and how it is collected."""
    found = all_pending(run)
    lines = [f"{one.handle:>8}  {one.site:12} {one.point}" for one in found]
    how = f"submitted from {run}; `twinrun jobs` shows them, the same command with --resume collects them"
    return Shown("\n".join([*lines, how]), {"run": run, "jobs": found})


def _waiting(folder: Path) -> Shown:
    """Return what runs below a folder have submitted and not collected."""
    runs = sorted({file.parent.parent for file in folder.glob(f"*/*/{FOLDER}/*.json")})
    found = [(run, one, _state(run, one)) for run in runs for one in all_pending(run)]
    lines = [f"{one.handle:>8}  {one.site:12} {state:34} {one.point}  {run}" for run, one, state in found]
    none = f"no job of a run in {folder} waits to be collected; --cluster SITE lists those of a site"
    data = [{"run": run, "state": state, **dict(one)} for run, one, state in found]
    return Shown("\n".join(lines) or none, data)


def _state(run: Path, one: Pending) -> str:
    """Return in words whether a job has ended."""
    try:
        scheduler = client_of(load_site(project_root(), one.site))
        submission = scheduler.adopt(one.handle, point=one.point, logs=log_folder(run, one.point))
        if submission.poll() is not None:
            return "ended, --resume collects it"
        return f"runs on {submission.nodes[0]}" if submission.nodes else "waits for nodes"
    except (InputError, MachineError) as error:
        return f"not known: {error.message}"
    except (RunError, RunInterruptedError) as error:
        return f"ended: {error.message}"
