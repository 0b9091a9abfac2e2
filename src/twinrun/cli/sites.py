"""`twinrun build`, `lock`, `doctor`, `cluster`, `site`, `jobs`: what runs need, and what a site has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from rich.console import Group

from twinrun import api
from twinrun.cli.console import Shown, listed, resumable, tell, written
from twinrun.cli.program import Dry, Out, Paths, Word, demand_with, demand_without
from twinrun.execution.schedulers import client_of
from twinrun.execution.site_checks import check_site, describe
from twinrun.execution.site_qualification import contradictions, qualification_file
from twinrun.foundation.cache import SHIPPED, project_root, runs_folder
from twinrun.foundation.errors import InputError, MachineError
from twinrun.foundation.files import write_atomically
from twinrun.foundation.terminal import VisibleConsole
from twinrun.foundation.text import plural
from twinrun.images import checks, command, local_cluster
from twinrun.images import lock as locks
from twinrun.images.plan import BuildRequest
from twinrun.machine.doctor import diagnose
from twinrun.manifests.cluster import FILE, known_gpus, load_site
from twinrun.planning.project import Project
from twinrun.report.terminal import diagnosis_lines
from twinrun.runs.prepared import demand_room

Parts = tuple[Literal["python", "system"], ...]
Do = Literal["up", "status", "down", "describe"]
_NOTHING = BuildRequest()


def build(*, request: Annotated[BuildRequest, Parameter("*")] = _NOTHING, dry: Dry = False) -> Shown:
    """Build the image of a stack from its locks.

    Args:
        dry: print the plan and stop; with --json all of it
    """
    paths = {name: path.absolute() for name, path in vars(request).items() if isinstance(path, Path)}
    root, request = project_root(), replace(request, **paths)  # type: ignore[arg-type]
    plan = command.plan_request(root, request)
    if request.save:
        folder = request.save.parent if request.save.suffix == ".tar" else request.save
        demand_room(folder, 0, option="--save")
    lines = command.plan_lines(plan)
    if dry:
        return Shown("\n".join(lines), plan.summary())
    with command.BuildProgress() as progress, resumable(plan.image):
        for line in lines:
            progress.say(line)
        if request.context:
            return written(command.write_context(root, plan, request, progress.say))
        result = command.run_build(root, plan, request, progress.say)
    return Shown("\n".join(command.result_lines(result)), result)


def lock(
    *, stack: Word = None, index: Word = None, upgrade: bool = False, only: Parts = (), check: bool = False
) -> Shown:
    """Resolve every pin of stacks: packages to hashes, the root file system made of them to a digest.

    Args:
        stack: one stack; all when left out
        index: URL in place of the framework's own package index, which --check asks
        upgrade: let packages move that nothing pins
        only: python or system; may be given many times
        check: write nothing; say which pins an index does not have, and exit 1 then
    """
    root, rows, findings = project_root(), dict[str, list[str]](), list[locks.PinFinding]()
    for name in locks.stack_names(root, stack):
        if check:
            found = locks.check(root, name, index=index, only=only, say=tell)
            rows[name], findings = [str(one) for one in found], [*findings, *found]
        else:
            rows[name] = list(locks.refresh(root, name, upgrade=upgrade, only=only, say=tell))
    noun = "finding" if check else "change"
    lines = ["\n  ".join([f"{name}: {plural(len(of), noun)}", *of]) for name, of in rows.items()]
    return Shown("\n".join(lines), rows, locks.exit_code(findings))


def doctor(*, stack: Word = None, engine: Word = None, cluster: Word = None) -> Shown:
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
        outcomes = checks.run_checks(root, stack, engine=engine, say=tell)
        return Shown(f"{stack}: {len(outcomes)} checks passed", outcomes)
    found = check_site(root, load_site(root, cluster)) if cluster else diagnose(root)
    console = VisibleConsole()
    width = console.width if console.is_terminal else None
    return Shown(Group(*diagnosis_lines(found, width=width)), found, found.exit_code)


def cluster(
    action: Do, /, *, nodes: int = 3, mount: Paths = (), partition: Word = None, cluster: Word = None
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
        paths = tuple(one.resolve() for one in mount)
        found = local_cluster.up(project_root(), nodes=nodes, mounts=paths, say=tell)
    else:
        found = local_cluster.status()
    return listed(found, "name", "container", "slurm", none="no cluster; `twinrun cluster up` starts one")


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
    from twinrun.runs.run import qualified

    tell(f"{action} {site}")
    project, declared = Project(project_root()), load_site(project_root(), site)
    found = qualified(project, site, key=key.expanduser() if key else None, say=tell)
    wrong, file = contradictions(declared.site, found, gpus=project.gpus), qualification_file(declared)
    data = {**found.model_dump(mode="json"), "differs": wrong, "file": file}
    lines = [f"{name:18} {value}" for name, value in data.items() if name not in ("faults", "differs")]
    view = "\n".join([*lines, *(f"differs   {one}" for one in wrong)])
    return Shown(view, data, MachineError.exit_code if wrong else 0)


def jobs(*, cluster: Word = None, out: Out = None, cancel: Word = None) -> Shown:
    """List what detached runs wait for, or the jobs of twinrun at a site; end one.

    Args:
        cluster: site of cluster.toml, whose jobs are listed; what waits to be collected when left out
        out: folder of the runs instead of runs/
        cancel: number of a job to end
    """
    demand_with("--cluster", cluster, cancel=cancel)
    if cluster is None:
        folder = out or runs_folder(project_root())
        none = f"no job of a run in {folder} waits to be collected; --cluster SITE lists those of a site"
        rows = api.waiting(folder, root=project_root())
        return listed(rows, "handle", "site", "state", "point", "run", none=none)
    if cancel and not cancel.partition(".")[0].isdecimal():
        raise InputError("a job is named by its number", place="twinrun jobs", found=cancel)
    client = client_of(load_site(project_root(), cluster))
    if cancel:
        client.end(cancel)
    columns = ("id", "state", "reason", "run_seconds", "user", "name", "nodes")
    return listed(client.jobs(), *columns, none=f"no jobs of twinrun at {cluster}")
