"""Whether a site can take jobs, asked without submitting one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from twinrun.execution.slurm_client import SlurmClient
from twinrun.foundation.cache import cache_root
from twinrun.foundation.errors import TwinrunError
from twinrun.machine.checks import HostCheck
from twinrun.machine.doctor import Diagnosis
from twinrun.manifests.cluster import LoadedSite


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
    options += [f"--gres={one.gres}:{one.devices_per_node}"] if one.gres else []
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
