"""Slurm's own commands: what they say of jobs and nodes, and whether a site can take jobs."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from twinrun.foundation.cache import cache_root
from twinrun.foundation.errors import InputError, MachineError, RunError, TwinrunError
from twinrun.foundation.manifest import Frozen
from twinrun.foundation.processes import last_lines
from twinrun.machine.checks import HostCheck
from twinrun.machine.doctor import Diagnosis
from twinrun.manifests.cluster import LoadedSite, Site

_FIELD = re.compile(r"(\w+)=(\S*)")
_ANSWER_SECONDS = 60
# What Slurm and munge say of a key or a clock that is not the controller's, or of a munge that is not there.
_DISTRUST = re.compile(r"authentication error|munge (en|de)code failed|invalid credential", re.IGNORECASE)
# Where a job is in no state that it leaves by itself.
ENDED = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
    *("PREEMPTED", "REVOKED", "SPECIAL_EXIT", "TIMEOUT"),
}


class JobState(Frozen):
    """What the controller knows of a job."""

    id: str
    name: str
    state: str
    """Slurm's name of the state, for example RUNNING."""
    reason: str
    status: int
    """Exit status; a negative one is a signal."""
    nodes: str
    """Host names as Slurm abbreviates them; empty while the job waits."""
    run_seconds: float
    limit_seconds: float
    user: str
    output: str
    """File that the script prints to."""

    @property
    def ended(self) -> bool:
        """Whether nothing of it runs any more."""
        return self.state in ENDED


class SlurmClient:
    """Runs the commands of one site."""

    def __init__(self, site: LoadedSite) -> None:
        """Take a site; raises InputError where it has another scheduler."""
        if site.site.scheduler != "slurm":
            found = site.site.scheduler
            raise InputError(
                "no site of Slurm", place=f"{site.place}.scheduler", found=found, allowed="slurm"
            )
        self.site = site

    def ask(self, *arguments: str) -> str:
        """Return what a command prints.

        Raises:
            RunError: Slurm refuses, in its own words, or does not answer.
            MachineError: the command cannot be started, or Slurm does not know this machine.
        """
        command = [*self.site.site.client, *arguments]
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=_ANSWER_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise RunError("no answer from Slurm", place=arguments[0], found=f"{_ANSWER_SECONDS} s") from None
        except OSError as error:
            raise MachineError(
                f"cannot start: {error.strerror}",
                place=command[0],
                hint=f"run twinrun where Slurm's commands are, or set {self.site.place}.client",
            ) from None
        if done.returncode:
            text = last_lines(done.stderr or done.stdout, 4)
            if _DISTRUST.search(text):
                raise _distrusted(arguments[0], text)
            raise RunError("Slurm refuses", place=" ".join(arguments[:1]), found=text)
        return done.stdout

    def job(self, number: str) -> JobState:
        """Return the state of a job; raises RunError, also where the controller has forgotten it."""
        return parse_job(self.ask("scontrol", "show", "job", number, "--oneliner"))

    def jobs(self) -> list[JobState]:
        """Return the jobs of twinrun that the controller knows."""
        lines = self.ask("scontrol", "show", "job", "--oneliner").splitlines()
        found = [parse_job(line) for line in lines if line.startswith("JobId=")]
        return [job for job in found if job.name.startswith("twinrun-")]

    def hosts(self, nodes: str) -> tuple[str, ...]:
        """Return host names written out; empty for none."""
        if nodes in ("", "(null)"):
            return ()
        return tuple(self.ask("scontrol", "show", "hostnames", nodes).split())

    def size(self) -> int:
        """Return how many nodes the site's partition has that are not down."""
        wanted = _partition(self.site)
        states = "--states=idle,mixed,allocated,completing"
        listed = self.ask("sinfo", "--noheader", "--Node", states, "--format=%N", *wanted)
        return len(set(listed.split()))


def _distrusted(command: str, text: str) -> MachineError:
    return MachineError(
        "Slurm does not accept the credentials of this machine",
        place=command,
        found=text,
        hint="munge must run here with the controller's key, and the clocks must agree",
    )


def parse_job(line: str) -> JobState:
    """Read one line of `scontrol show job --oneliner`; raises RunError."""
    fields: dict[str, str] = {}
    for name, value in _FIELD.findall(line):
        fields.setdefault(name, value)
    try:
        status, _, signal = fields["ExitCode"].partition(":")
        return JobState(
            id=fields["JobId"],
            name=fields.get("JobName", ""),
            state=fields["JobState"],
            reason=fields.get("Reason", ""),
            status=-int(signal) if int(signal or 0) else int(status),
            nodes=fields.get("NodeList", "").replace("(null)", ""),
            run_seconds=_seconds(fields.get("RunTime", "")),
            limit_seconds=_seconds(fields.get("TimeLimit", "")),
            output=fields.get("StdOut", ""),
            user=fields.get("UserId", "").partition("(")[0],
        )
    except (KeyError, ValueError):
        raise RunError("this is no state of a job", place="scontrol", found=line[:200]) from None


def _seconds(text: str) -> float:
    """Return a time as Slurm prints it, `1-02:03:04`; UNLIMITED has no end."""
    days, _, rest = text.rpartition("-")
    parts = rest.split(":")
    if len(parts) != 3 or not all(part.isdecimal() for part in (*parts, days or "0")):
        return float("1e18")
    hours, minutes, seconds = map(int, parts)
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60.0 + seconds


def device_options(site: Site, count: int) -> tuple[str, ...]:
    """Return the options by which a job asks for `count` devices of each node."""
    if site.devices_by == "gpus-per-node":
        return (f"--gpus-per-node={count}",)
    return (f"--gres={site.gres}:{count}",) if site.gres and site.devices_by == "gres" else ()


def demand_devices(site: LoadedSite) -> None:
    """Raise InputError for a site with GPUs whose jobs would ask for none."""
    if site.site.gpu and site.site.devices_by == "gres" and not site.site.gres:
        raise InputError(
            "a job of this site would get no GPU",
            place=f"{site.place}.gres",
            found="missing",
            hint='add the line `gres = "gpu"`, as `scontrol show node` has it under Gres;'
            ' or `devices_by = "gpus-per-node"`, or "whole-node" where nodes come with all they have',
        )


def _partition(site: LoadedSite) -> Sequence[str]:
    return (f"--partition={site.site.partition}",) if site.site.partition else ()


def check_site(root: Path, site: LoadedSite) -> Diagnosis:
    """Ask the scheduler of a site for what cluster.toml says of it."""
    client = SlurmClient(site)
    checks: dict[str, Callable[[], HostCheck]] = {
        "scheduler": lambda: _scheduler(client),
        "nodes": lambda: _nodes(client, site),
        "job": lambda: _job(client, site),
        "run folder": lambda: _shared("run folder", root / "runs", site, "--out"),
        "cache": lambda: _shared("cache", cache_root(), site, "TWINRUN_CACHE"),
    }
    return Diagnosis(checks=tuple(_guarded(name, check, site) for name, check in checks.items()))


def _scheduler(client: SlurmClient) -> HostCheck:
    version = client.ask("scontrol", "--version").strip()
    ping = client.ask("scontrol", "ping").strip().splitlines()[0]
    up = "is UP" in ping
    return HostCheck(
        name="scheduler",
        status="ok" if up else "fail",
        found=f"{version}; {ping}",
        needed="a controller that answers",
        hint=None if up else "start slurmctld, or wait for its backup",
    )


def _nodes(client: SlurmClient, site: LoadedSite) -> HostCheck:
    found, wanted = client.size(), site.site.nodes
    few = found < wanted
    return HostCheck(
        name="nodes",
        status="fail" if not found else "warn" if few else "ok",
        found=f"{found} up",
        needed=str(wanted),
        hint=f"`sinfo --list-reasons` says why; or lower {site.place}.nodes" if few else None,
    )


def _job(client: SlurmClient, site: LoadedSite) -> HostCheck:
    """Let sbatch judge a job of one node without queueing it."""
    one = site.site
    options = [
        f"--{name}={value}" for name in ("partition", "account", "qos") if (value := getattr(one, name))
    ]
    options += device_options(one, one.devices_per_node)
    options += [f"--ntasks-per-node={one.devices_per_node}", f"--cpus-per-task={one.rank_cores}"]
    options += [f"--mem={one.memory_gib}G"] if one.memory_gib else []
    options += [f"--constraint={one.constraint}"] if one.constraint else []
    options += one.options
    client.ask("sbatch", "--test-only", "--nodes=1", f"--time={one.minutes}", *options, "--wrap=true")
    found = ", ".join(options) or "defaults"
    return HostCheck(name="job", status="ok", found=found, needed="options that sbatch takes")


def _shared(name: str, folder: Path, site: LoadedSite, remedy: str) -> HostCheck:
    seen = any(folder.is_relative_to(shared) for shared in site.site.shared)
    return HostCheck(
        name=name,
        status="ok" if seen else "fail",
        found=str(folder),
        needed=f"below one of {', '.join(site.site.shared)}",
        hint=None if seen else f"choose another with {remedy}, or add it to {site.place}.shared",
    )


def _guarded(name: str, check: Callable[[], HostCheck], site: LoadedSite) -> HostCheck:
    """Return the result of `check`; what Slurm refuses fails it."""
    try:
        return check()
    except TwinrunError as error:
        found = " ".join(str(error.found or error.message).split())
        return HostCheck(name=name, status="fail", found=found, needed="an answer", hint=f"see {site.place}")
