"""`doctor --cluster`: what cluster.toml says, held against the scheduler and against what was measured."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from twinrun.execution.batch import ENDLESS, BatchScheduler, client_of
from twinrun.execution.site_qualification import Qualification, contradictions, qualification_of
from twinrun.foundation.cache import cache_root
from twinrun.foundation.errors import TwinrunError
from twinrun.foundation.text import duration
from twinrun.machine.checks import HostCheck
from twinrun.machine.doctor import Diagnosis
from twinrun.manifests.cluster import LoadedSite, Site
from twinrun.manifests.vendor import Gpu, load_gpus

# Programs that engines and launchers need on every node; the others bring their own.
_PROGRAMS = {
    **{name: name for name in ("docker", "podman", "apptainer", "singularity", "mpirun")},
    "srun": "srun",
}
# Modules that bring the plugin for libfabric.
_PLUGINS = ("ofi", "rccl-net-plugin", "singularity-AI-bindings")


def check_site(root: Path, site: LoadedSite) -> Diagnosis:
    """Ask the scheduler of a site for what cluster.toml says of it, and say what was measured there."""
    client, one, measured = client_of(site), site.site, qualification_of(site)
    checks: dict[str, Callable[[], HostCheck]] = {
        "scheduler": lambda: _check("scheduler", client.version(), "a scheduler that answers"),
        "nodes": lambda: _nodes(client),
        "partition": lambda: _partition(client),
        "account": lambda: _account(client),
        "devices": lambda: _devices(client),
        "cores": lambda: _cores(client),
        "memory": lambda: _memory(client),
        "job": lambda: _job(client),
        "engine": lambda: _program("engine", one.engine, site),
        "launcher": lambda: _program("launcher", one.launcher, site),
        "network": lambda: _network(one, measured),
        "measured": lambda: _measured(site, measured, load_gpus(root)),
        "run folder": lambda: _shared("run folder", root / "runs", site, "--out"),
        "cache": lambda: _shared("cache", cache_root(), site, "TWINRUN_CACHE"),
    }
    return Diagnosis(checks=tuple(_guarded(name, check, site) for name, check in checks.items()))


def _check(
    name: str,
    found: str,
    needed: str,
    *,
    status: Literal["ok", "warn", "fail", "unknown"] = "ok",
    hint: str | None = None,
) -> HostCheck:
    """Return a row of the page; the hint of one that is well is left out."""
    return HostCheck(
        name=name, status=status, found=found, needed=needed, hint=hint if status != "ok" else None
    )


def _nodes(client: BatchScheduler) -> HostCheck:
    found, wanted = client.size(), client.site.site.nodes
    status: Literal["fail", "warn", "ok"] = "fail" if not found else "warn" if found < wanted else "ok"
    hint = f"lower {client.site.place}.nodes, or ask why nodes are out of service: {client.faults()}"
    return _check("nodes", f"{found} up", str(wanted), status=status, hint=hint)


def _partition(client: BatchScheduler) -> HostCheck:
    name, limit = client.longest(client.site.site.partition)
    wanted = client.site.site.minutes * 60
    found = "any time" if limit >= ENDLESS else duration(limit)
    return _check(
        "partition",
        f"{name or 'none'}, jobs of up to {found}",
        f"jobs of {duration(wanted)}",
        status="fail" if limit < wanted else "ok",
        hint=f"lower {client.site.place}.minutes",
    )


def _account(client: BatchScheduler) -> HostCheck:
    accounts, wanted = client.accounts(), client.site.site.account
    if accounts is None:
        return _check("account", "no accounting", wanted or "an account", status="unknown")
    missing = wanted is not None and bool(accounts) and wanted not in accounts
    return _check(
        "account",
        ", ".join(accounts) or "no accounts are kept",
        wanted or "any",
        status="fail" if missing else "ok",
        hint=f"choose one of them in {client.site.place}.account",
    )


def _devices(client: BatchScheduler) -> HostCheck:
    client.demand()
    one, nodes = client.site.site, client.nodes()
    found = sorted({", ".join(f"{key}:{count}" for key, count in node.devices.items()) for node in nodes})
    wanted = one.gres if one.devices_by == "gres" else None
    few = wanted and any(_count(node.devices, wanted) < one.devices_per_node for node in nodes)
    return _check(
        "devices",
        "; ".join(found) or "none",
        f"{wanted}:{one.devices_per_node}" if wanted else f"asked for by {one.devices_by}",
        status="fail" if few else "ok",
        hint=f"correct {client.site.place}.gres or .devices_per_node",
    )


def _count(devices: dict[str, int], name: str) -> int:
    """Return how many of a resource a node has, of any type where the name has none."""
    return sum(count for key, count in devices.items() if key == name or key.partition(":")[0] == name)


def _cores(client: BatchScheduler) -> HostCheck:
    one, found = client.site.site, sorted({node.cores for node in client.nodes()})
    few = bool(found) and found[0] < one.rank_cores * one.devices_per_node
    plugin = client.setting("TaskPlugin")
    return _check(
        "cores",
        f"{', '.join(map(str, found))} of a node for jobs{f'; {plugin}' if plugin else ''}",
        f"{one.devices_per_node} x {one.rank_cores}",
        status="fail" if few else "ok",
        hint=f"lower {client.site.place}.cores_per_node or set cores_per_rank",
    )


def _memory(client: BatchScheduler) -> HostCheck:
    found, wanted = sorted({node.memory_gib for node in client.nodes()}), client.site.site.memory_gib
    few = bool(found) and wanted is not None and found[0] < wanted
    default = client.setting("DefMemPerCPU") or client.setting("DefMemPerNode")
    little = wanted is None and default.isdecimal()
    by_default = f"; by default {default} MB a core" if default else ""
    return _check(
        "memory",
        f"{', '.join(f'{one} GiB' for one in found)} of a node for jobs{by_default}",
        "what the ranks need" if wanted is None else f"{wanted} GiB" if wanted else "all of a node",
        status="fail" if few else "warn" if little else "ok",
        hint=f"set {client.site.place}.memory_gib",
    )


def _job(client: BatchScheduler) -> HostCheck:
    options, needed = client.judged(), "options that the scheduler takes"
    if options is None:
        return _check("job", f"{client.title} judges no job before it is queued", needed, status="unknown")
    return _check("job", options, needed)


def _program(name: str, value: str, site: LoadedSite) -> HostCheck:
    """Look for the program of an engine or a launcher where the scheduler's commands run."""
    program = _PROGRAMS.get(value)
    if program is None:
        return _check(name, value, "nothing of the node")
    there = bool(site.site.client) or shutil.which(program) is not None
    hint = f"{program} is not here; a module of {site.place}.modules may bring it"
    return _check(name, value, f"{program} on the nodes", status="ok" if there else "warn", hint=hint)


def _network(site: Site, measured: Qualification | None) -> HostCheck:
    """Say what carried the collectives, where that was measured, else what the site file declares."""
    plugin = site.environment.get("NCCL_NET_PLUGIN") or next(
        (one for one in site.modules if any(word in one for word in _PLUGINS)), None
    )
    over = ", ".join(site.interfaces) or "the interface that leads to the first node"
    adapters = site.environment.get("NCCL_IB_HCA", "every adapter")
    fast = f"libfabric, by {plugin}" if plugin else f"InfiniBand, {adapters}" if site.infiniband else None
    declared = f"{fast}; sockets over {over} to meet" if fast else f"TCP sockets over {over}"
    if measured and measured.transport:
        slow = bool(fast) and measured.slow
        found = f"measured {measured.created:%Y-%m-%d}: {measured.transport}"
        found += f", {measured.bus_gb_s:.2f} GB/s" if measured.bus_gb_s else ""
        hint = f"{declared} is declared, and sockets carried it: mend the site, then qualify it again"
        return _check("network", found, declared, status="fail" if slow else "ok", hint=hint)
    hint = "`twinrun site qualify` measures what carries the collectives"
    if site.gpu and site.nodes > 1 and not fast:
        hint = f"set `infiniband`, or load the plugin for libfabric; {hint}"
    status: Literal["unknown", "ok"] = "unknown" if site.nodes > 1 else "ok"
    return _check("network", f"declared, not measured: {declared}", "", status=status, hint=hint)


def _measured(site: LoadedSite, measured: Qualification | None, gpus: Mapping[str, Gpu]) -> HostCheck:
    """Say what of the declarations was measured, and what measurement speaks against."""
    needed = "what cluster.toml declares"
    if measured is None:
        hint = f"`twinrun site qualify {site.name}` runs one job of one node and one of two"
        return _check("measured", "nothing: all is only declared", needed, status="unknown", hint=hint)
    wrong = contradictions(site.site, measured, gpus=gpus)
    return _check(
        "measured",
        "; ".join(wrong) or f"as declared, on {', '.join(measured.nodes)}, {measured.created:%Y-%m-%d}",
        needed,
        status="fail" if wrong else "ok",
        hint=f"correct {site.place}, or mend the site and qualify it again",
    )


def _shared(name: str, folder: Path, site: LoadedSite, remedy: str) -> HostCheck:
    seen = any(folder.is_relative_to(shared) for shared in site.site.shared)
    return _check(
        name,
        str(folder),
        f"below one of {', '.join(site.site.shared)}",
        status="ok" if seen else "fail",
        hint=f"choose another with {remedy}, or add it to {site.place}.shared",
    )


def _guarded(name: str, check: Callable[[], HostCheck], site: LoadedSite) -> HostCheck:
    """Return the result of `check`; what the scheduler refuses fails it."""
    try:
        return check()
    except TwinrunError as error:
        found = " ".join(str(error.found or error.message).split())
        return _check(name, found, "an answer", status="fail", hint=f"see {site.place}")
