"""Slurm's own commands: what they say of jobs and nodes, and whether a site can take jobs."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence

from twinrun.foundation.errors import InputError, MachineError, RunError
from twinrun.foundation.manifest import Frozen
from twinrun.foundation.processes import last_lines
from twinrun.manifests.cluster import LoadedSite, Site

_FIELD = re.compile(r"(\w+)=(\S*)")
_ANSWER_SECONDS = 60
_OUT_OF_SERVICE = re.compile("DOWN|DRAIN|FAIL|FUTURE")
# Slurm and munge say this of a key or clock unlike the controller's, and of a munge that does not run.
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

    def nodes(self) -> list[dict[str, str]]:
        """Return the fields of the nodes of the site's partition that are in service."""
        lines = self.ask("scontrol", "show", "node", "--oneliner").splitlines()
        found = [fields_of(line) for line in lines if line.startswith("NodeName=")]
        wanted = self.site.site.partition
        found = [one for one in found if not _OUT_OF_SERVICE.search(one.get("State", ""))]
        return [one for one in found if wanted is None or wanted in one.get("Partitions", "").split(",")]

    def partition(self) -> dict[str, str]:
        """Return what the controller says of the site's partition, or of the default one."""
        name = self.site.site.partition
        lines = self.ask(
            "scontrol", "show", "partition", *([name] if name else []), "--oneliner"
        ).splitlines()
        found = [fields_of(line) for line in lines if line.startswith("PartitionName=")]
        return next((one for one in found if name or one.get("Default") == "YES"), found[0] if found else {})

    def setting(self, name: str) -> str:
        """Return a setting of the controller, empty where it has none."""
        shown = re.search(rf"^{name}\s*=\s*(.*)$", self.ask("scontrol", "show", "config"), re.MULTILINE)
        return shown[1].strip() if shown else ""

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
    fields = fields_of(line)
    try:
        status, _, signal = fields["ExitCode"].partition(":")
        return JobState(
            id=fields["JobId"],
            name=fields.get("JobName", ""),
            state=fields["JobState"],
            reason=fields.get("Reason", ""),
            status=-int(signal) if int(signal or 0) else int(status),
            nodes=fields.get("NodeList", "").replace("(null)", ""),
            run_seconds=seconds_of(fields.get("RunTime", "")),
            limit_seconds=seconds_of(fields.get("TimeLimit", "")),
            output=fields.get("StdOut", ""),
            user=fields.get("UserId", "").partition("(")[0],
        )
    except (KeyError, ValueError):
        raise RunError("this is no state of a job", place="scontrol", found=line[:200]) from None


def fields_of(line: str) -> dict[str, str]:
    """Return the fields of a line of `scontrol show`, the first of each name."""
    fields: dict[str, str] = {}
    for name, value in _FIELD.findall(line):
        fields.setdefault(name, value)
    return fields


def seconds_of(text: str) -> float:
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
