"""`doctor --cluster`: what cluster.toml says, held against the scheduler and against what was measured."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from twinrun.execution.batch import ENDLESS, BatchScheduler
from twinrun.execution.schedulers import client_of
from twinrun.execution.site_qualification import (
    Qualification,
    contradictions,
    qualification_file,
    qualification_of,
)
from twinrun.foundation.cache import cache_root
from twinrun.foundation.errors import TwinrunError
from twinrun.foundation.files import sha256_of_bytes
from twinrun.foundation.signatures import SUFFIX, UNSIGNED, signature_in, signed_by, signers_of
from twinrun.foundation.text import duration
from twinrun.machine.checks import HostCheck
from twinrun.machine.doctor import Diagnosis
from twinrun.manifests.cluster import LoadedSite, known_gpus

# Programs that engines and launchers need on every node; the others bring their own.
_PROGRAMS = ("docker", "podman", "apptainer", "singularity", "mpirun", "srun")
# Modules that bring the plugin for libfabric.
_PLUGINS = ("ofi", "rccl-net-plugin", "singularity-AI-bindings")
# What was found, what is needed, the status, and what to do where that is not `ok`.
Row = tuple[str, str, str, str]


def check_site(root: Path, site: LoadedSite) -> Diagnosis:
    """Ask the scheduler of a site for what cluster.toml says of it, and say what was measured there."""
    asked = _Doctor(root, site)
    names = ("scheduler", "nodes", "partition", "account", "devices", "cores", "memory", "job", "engine")
    return Diagnosis(
        checks=tuple(map(asked.check, (*names, "launcher", "network", "measured", "run folder", "cache")))
    )


class _Doctor:
    """The checks of one site, each a method of its name."""

    def __init__(self, root: Path, site: LoadedSite) -> None:
        self._root, self._place, self._name, self._site = root, site.place, site.name, site.site
        self._file = qualification_file(site)
        self._client: BatchScheduler = client_of(site)
        self._measurement: Qualification | None = qualification_of(site)

    def check(self, name: str) -> HostCheck:
        """Return the result of a check; what the scheduler refuses fails it."""
        try:
            method: Callable[[], Row] = getattr(self, f"_{name.replace(' ', '_')}")
            found, needed, status, hint = method()
        except TwinrunError as error:
            text = " ".join(str(error.found or error.message).split())
            found, needed, status, hint = text, "an answer", "fail", f"see {self._place}"
        row = {"name": name, "found": found, "needed": needed, "status": status}
        return HostCheck.model_validate(row | ({"hint": hint} if status != "ok" else {}))

    def _scheduler(self) -> Row:
        return self._client.version(), "a scheduler that answers", "ok", ""

    def _nodes(self) -> Row:
        found, wanted = self._client.size(), self._site.nodes
        hint = f"lower {self._place}.nodes, or ask why nodes are out of service: {self._client.faults()}"
        return f"{found} up", str(wanted), "fail" if not found else "warn" if found < wanted else "ok", hint

    def _partition(self) -> Row:
        name, limit = self._client.longest(self._site.partition)
        wanted = self._site.minutes * 60
        found = f"{name or 'none'}, jobs of up to {'any time' if limit >= ENDLESS else duration(limit)}"
        status = "fail" if limit < wanted else "ok"
        return found, f"jobs of {duration(wanted)}", status, f"lower {self._place}.minutes"

    def _account(self) -> Row:
        accounts, wanted = self._client.accounts(), self._site.account
        if accounts is None:
            return "no accounting", wanted or "an account", "unknown", f"{self._client.title} tells none"
        missing = wanted is not None and bool(accounts) and wanted not in accounts
        found, hint = ", ".join(accounts) or "no accounts are kept", f"choose one in {self._place}.account"
        return found, wanted or "any", "fail" if missing else "ok", hint

    def _devices(self) -> Row:
        self._client.demand()
        nodes, count = self._client.nodes(), self._site.devices_per_node
        found = sorted({", ".join(f"{key}:{one}" for key, one in node.devices.items()) for node in nodes})
        wanted = self._site.gres if self._site.devices_by == "gres" else None
        few = wanted and any(_count(node.devices, wanted) < count for node in nodes)
        needed = f"{wanted}:{count}" if wanted else f"asked for by {self._site.devices_by}"
        hint = f"correct {self._place}.gres or .devices_per_node"
        return "; ".join(found) or "none", needed, "fail" if few else "ok", hint

    def _cores(self) -> Row:
        ranks, each = self._site.devices_per_node, self._site.rank_cores
        counts = sorted({node.cores for node in self._client.nodes()})
        plugin = self._client.setting("TaskPlugin")
        found = f"{', '.join(map(str, counts))} of a node for jobs{f'; {plugin}' if plugin else ''}"
        few = bool(counts) and counts[0] < each * ranks
        hint = f"lower {self._place}.cores_per_node or set cores_per_rank"
        return found, f"{ranks} x {each}", "fail" if few else "ok", hint

    def _memory(self) -> Row:
        sizes, wanted = sorted({node.memory_gib for node in self._client.nodes()}), self._site.memory_gib
        default = self._client.setting("DefMemPerCPU") or self._client.setting("DefMemPerNode")
        found = ", ".join(f"{one} GiB" for one in sizes) + " of a node for jobs"
        found += f"; by default {default} MB a core" if default else ""
        needed = "what the ranks need" if wanted is None else f"{wanted} GiB" if wanted else "all of a node"
        few, little = bool(sizes) and sizes[0] < (wanted or 0), wanted is None and default.isdecimal()
        return found, needed, "fail" if few else "warn" if little else "ok", f"set {self._place}.memory_gib"

    def _job(self) -> Row:
        options, needed = self._client.judged(), "options that the scheduler takes"
        silent = f"{self._client.title} judges no job before it is queued"
        return options or silent, needed, "ok" if options else "unknown", "the first run shows it"

    def _engine(self) -> Row:
        return self._program(self._site.engine)

    def _launcher(self) -> Row:
        return self._program(self._site.launcher)

    def _program(self, name: str) -> Row:
        """Look for a program where the scheduler's commands run."""
        if name not in _PROGRAMS:
            return name, "nothing of the node", "ok", ""
        there = bool(self._site.client) or shutil.which(name) is not None
        hint = f"{name} is not here; a module of {self._place}.modules may bring it"
        return name, f"{name} on the nodes", "ok" if there else "warn", hint

    def _network(self) -> Row:
        """Say what carried the collectives, where that was measured, else what the site file declares."""
        site, measured = self._site, self._measurement
        modules = [one for one in site.modules if any(word in one for word in _PLUGINS)]
        plugin = site.environment.get("NCCL_NET_PLUGIN") or next(iter(modules), None)
        over = ", ".join(site.interfaces) or "the interface that leads to the first node"
        adapters = f"InfiniBand, {site.environment.get('NCCL_IB_HCA', 'every adapter')}"
        fast = f"libfabric, by {plugin}" if plugin else adapters if site.infiniband else None
        declared = f"{fast}; sockets over {over} to meet" if fast else f"TCP sockets over {over}"
        if measured and measured.transport:
            speed = f", {measured.bus_gb_s:.2f} GB/s" if measured.bus_gb_s else ""
            hint = "sockets carried what a fast link is declared for: mend the site, then qualify it again"
            status = "fail" if fast and measured.slow else "ok"
            return (
                f"measured {measured.created:%Y-%m-%d}: {measured.transport}{speed}",
                declared,
                status,
                hint,
            )
        hint = f"`twinrun site qualify {self._name}` measures it"
        if site.gpu and site.nodes > 1 and not fast:
            hint = f"set `infiniband`, or load the plugin for libfabric; {hint}"
        return f"declared, not measured: {declared}", "", "unknown" if site.nodes > 1 else "ok", hint

    def _measured(self) -> Row:
        """Say what of the declarations was measured, and what measurement speaks against."""
        measured, needed = self._measurement, "what cluster.toml declares"
        if measured is None:
            hint = f"`twinrun site qualify {self._name}` runs one job of one node and one of two"
            return "nothing: all is only declared", needed, "unknown", hint
        wrong = contradictions(self._site, measured, gpus=known_gpus(self._root))
        file, signer = Path(f"{self._file}{SUFFIX}"), UNSIGNED
        if file.exists():
            digest, signers = sha256_of_bytes(self._file.read_bytes()), signers_of(self._root)
            signer = signed_by(
                digest, signature_in(file), place=str(file), signers=signers, when=measured.created
            )
        well = f"as declared, on {', '.join(measured.nodes)}, {measured.created:%Y-%m-%d}, {signer}"
        hint = f"correct {self._place}, or mend the site and qualify it again"
        return "; ".join(wrong) or well, needed, "fail" if wrong else "ok", hint

    def _run_folder(self) -> Row:
        return self._shared(self._root / "runs", "--out")

    def _cache(self) -> Row:
        return self._shared(cache_root(), "TWINRUN_CACHE")

    def _shared(self, folder: Path, remedy: str) -> Row:
        shared = self._site.shared
        status = "ok" if any(folder.is_relative_to(one) for one in shared) else "fail"
        hint = f"choose another with {remedy}, or add it to {self._place}.shared"
        return str(folder), f"below one of {', '.join(shared)}", status, hint


def _count(devices: dict[str, int], name: str) -> int:
    """Return how many of a resource a node has, of any type where the name has none."""
    return sum(count for key, count in devices.items() if key == name or key.partition(":")[0] == name)
