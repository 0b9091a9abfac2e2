"""`invoke doctor --cluster`: what cluster.toml says of a site, held against what its Slurm says."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from twinrun.execution.slurm_client import SlurmClient, demand_devices, device_options, seconds_of
from twinrun.foundation.cache import cache_root
from twinrun.foundation.errors import RunError, TwinrunError
from twinrun.foundation.text import duration
from twinrun.machine.checks import HostCheck
from twinrun.machine.doctor import Diagnosis
from twinrun.manifests.cluster import LoadedSite, Site

# Programs that engines and launchers need on every node; the others bring their own.
_PROGRAMS = {"docker": "docker", "apptainer": "apptainer", "singularity": "singularity", "mpirun": "mpirun"}
# Modules that bring the plugin for libfabric.
_PLUGINS = ("ofi", "rccl-net-plugin", "singularity-AI-bindings")


def check_site(root: Path, site: LoadedSite) -> Diagnosis:
    """Ask the scheduler of a site for what cluster.toml says of it."""
    client = SlurmClient(site)
    checks: dict[str, Callable[[], HostCheck]] = {
        "scheduler": lambda: _scheduler(client),
        "nodes": lambda: _nodes(client, site),
        "partition": lambda: _partition(client, site),
        "account": lambda: _account(client, site),
        "devices": lambda: _devices(client, site),
        "cores": lambda: _cores(client, site),
        "memory": lambda: _memory(client, site),
        "job": lambda: _job(client, site),
        "engine": lambda: _program("engine", site.site.engine, site),
        "launcher": lambda: _program("launcher", site.site.launcher, site),
        "network": lambda: _network(site.site),
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


def _partition(client: SlurmClient, site: LoadedSite) -> HostCheck:
    found = client.partition()
    limit = seconds_of(found.get("MaxTime", ""))
    short = limit < site.site.minutes * 60
    return HostCheck(
        name="partition",
        status="fail" if short else "ok",
        found=f"{found.get('PartitionName', 'none')}, jobs of up to {found.get('MaxTime', 'any time')}",
        needed=f"jobs of {duration(site.site.minutes * 60)}",
        hint=f"lower {site.place}.minutes" if short else None,
    )


def _account(client: SlurmClient, site: LoadedSite) -> HostCheck:
    """Ask which accounts this user may charge."""
    user = client.ask("id", "-un").strip()
    try:
        listed = client.ask(
            "sacctmgr", "--noheader", "--parsable2", "show", "assoc", f"user={user}", "format=Account"
        )
    except RunError:
        return HostCheck(name="account", status="unknown", found="no accounting", needed="an account")
    accounts = sorted(set(listed.split()))
    missing = site.site.account is not None and bool(accounts) and site.site.account not in accounts
    return HostCheck(
        name="account",
        status="fail" if missing else "ok",
        found=", ".join(accounts) or "no accounts are kept",
        needed=site.site.account or "any",
        hint=f"choose one of them in {site.place}.account" if missing else None,
    )


def _devices(client: SlurmClient, site: LoadedSite) -> HostCheck:
    demand_devices(site)
    found = sorted({one.get("Gres", "(null)") for one in client.nodes()})
    wanted = site.site.gres if site.site.devices_by == "gres" else None
    few = wanted is not None and not all(_count(text, wanted) >= site.site.devices_per_node for text in found)
    return HostCheck(
        name="devices",
        status="fail" if few else "ok",
        found=", ".join(found),
        needed=f"{wanted}:{site.site.devices_per_node}" if wanted else f"asked for by {site.site.devices_by}",
        hint=f"correct {site.place}.gres or .devices_per_node" if few else None,
    )


def _count(gres: str, name: str) -> int:
    """Return how many of a resource a node has, of any type where the name has none."""
    total = 0
    for part in gres.replace("(null)", "").split(","):
        words = part.partition("(")[0].split(":")
        if ":".join(words[:-1]) == name or (words[0] == name and ":" not in name):
            total += int(words[-1]) if words[-1].isdecimal() else 1
    return total


def _cores(client: SlurmClient, site: LoadedSite) -> HostCheck:
    found = sorted({int(one.get("CPUTot", "0")) for one in client.nodes()})
    few = bool(found) and found[0] < site.site.rank_cores * site.site.devices_per_node
    plugin = client.setting("TaskPlugin")
    return HostCheck(
        name="cores",
        status="fail" if few else "ok",
        found=f"{', '.join(map(str, found))} of a node; {plugin or 'no task plugin'}",
        needed=f"{site.site.devices_per_node} x {site.site.rank_cores}",
        hint=f"lower {site.place}.cores_per_node or set cores_per_rank" if few else None,
    )


def _memory(client: SlurmClient, site: LoadedSite) -> HostCheck:
    found = sorted({int(one.get("RealMemory", "0")) for one in client.nodes()})
    wanted = site.site.memory_gib
    few = bool(found) and wanted is not None and found[0] < wanted * 1024
    default = client.setting("DefMemPerCPU") or client.setting("DefMemPerNode") or "UNLIMITED"
    little = wanted is None and default.isdecimal()
    return HostCheck(
        name="memory",
        status="fail" if few else "warn" if little else "ok",
        found=f"{', '.join(f'{one // 1024} GiB' for one in found)} of a node; by default {default} MB a core",
        needed="what the ranks need" if wanted is None else f"{wanted} GiB" if wanted else "all of a node",
        hint=f"set {site.place}.memory_gib" if few or little else None,
    )


def _program(name: str, value: str, site: LoadedSite) -> HostCheck:
    """Look for the program of an engine or a launcher where the scheduler's commands run."""
    program = _PROGRAMS.get(value)
    if program is None:
        return HostCheck(name=name, status="ok", found=value, needed="nothing of the node")
    there = bool(site.site.client) or shutil.which(program) is not None
    return HostCheck(
        name=name,
        status="ok" if there else "warn",
        found=value,
        needed=f"{program} on the nodes",
        hint=None if there else f"{program} is not here; a module of {site.place}.modules may bring it",
    )


def _network(site: Site) -> HostCheck:
    """Say what the collectives will choose, as far as the site file decides it."""
    plugin = site.environment.get("NCCL_NET_PLUGIN") or next(
        (one for one in site.modules if any(word in one for word in _PLUGINS)), None
    )
    over = ", ".join(site.interfaces) or "the interface that leads to the first node"
    if plugin:
        found = f"libfabric, by {plugin}; sockets over {over} to meet"
    elif site.infiniband:
        found = (
            f"InfiniBand, {site.environment.get('NCCL_IB_HCA', 'every adapter')}; sockets over {over} to meet"
        )
    else:
        found = f"TCP sockets over {over}"
    slow = site.gpu is not None and site.nodes > 1 and not plugin and not site.infiniband
    hint = "set `infiniband`, or load the plugin for libfabric; `--proof` measures it" if slow else None
    return HostCheck(name="network", status="warn" if slow else "ok", found=found, needed="", hint=hint)


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
