"""`doctor --cluster` and `cluster describe`: cluster.toml held against the scheduler, or written from it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from twinrun.execution.batch import ENDLESS, BatchScheduler
from twinrun.execution.schedulers import client_of
from twinrun.execution.site_qualification import (
    Qualification,
    contradictions,
    fast_link,
    qualification_file,
    qualification_of,
)
from twinrun.foundation.cache import cache_root
from twinrun.foundation.errors import MachineError, TwinrunError
from twinrun.foundation.files import sha256_of_bytes
from twinrun.foundation.signatures import SUFFIX, UNSIGNED, signature_in, signed_by, signers_of
from twinrun.foundation.text import duration
from twinrun.machine.checks import HostCheck
from twinrun.machine.doctor import Diagnosis
from twinrun.manifests.cluster import LoadedSite, Site, known_gpus
from twinrun.manifests.vendor import Gpu

# A limit that no point of ours needs.
_MOST_MINUTES = 240
# Countable resources of PBS and Grid Engine that are devices.
_DEVICES = ("gpu", "ngpus", "gpus")
# What was found, what is needed, the status, and what to do where that is not `ok`.
Row = tuple[str, str, str, str]


def check_site(root: Path, site: LoadedSite) -> Diagnosis:
    """Ask the scheduler of a site for what cluster.toml says of it, and say what was measured there."""
    doctor = _Doctor(root, site)
    names = ("scheduler", "nodes", "partition", "account", "devices", "cores", "memory", "job", "network")
    return Diagnosis(checks=tuple(map(doctor.check, (*names, "measured", "folders"))))


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
            found, needed, status, hint = getattr(self, f"_{name}")()
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
        hint = f"lower {self._place}.minutes"
        return found, f"jobs of {duration(wanted)}", "fail" if limit < wanted else "ok", hint

    def _account(self) -> Row:
        accounts, wanted = self._client.accounts(), self._site.account
        if accounts is None:
            return "no accounting", wanted or "an account", "unknown", f"{self._client.title} tells none"
        missing = wanted is not None and bool(accounts) and wanted not in accounts
        found, hint = ", ".join(accounts) or "no accounts are kept", f"choose one in {self._place}.account"
        return found, wanted or "any", "fail" if missing else "ok", hint

    def _devices(self) -> Row:
        self._client.demand()
        kinds, count = [one.devices for one in self._client.nodes()], self._site.devices_per_node
        found = sorted({", ".join(f"{key}:{number}" for key, number in one.items()) for one in kinds})
        wanted = self._site.gres if self._site.devices_by == "gres" else None
        few = wanted and any(_count(one, wanted) < count for one in kinds)
        needed = f"{wanted}:{count}" if wanted else f"asked for by {self._site.devices_by}"
        hint = f"correct {self._place}.gres or .devices_per_node"
        return "; ".join(found) or "none", needed, "fail" if few else "ok", hint

    def _cores(self) -> Row:
        ranks, each = self._site.devices_per_node, self._site.rank_cores
        counts, plugin = (
            sorted({node.cores for node in self._client.nodes()}),
            self._client.setting("TaskPlugin"),
        )
        found = f"{', '.join(map(str, counts))} of a node for jobs{f'; {plugin}' if plugin else ''}"
        hint = f"lower {self._place}.cores_per_node or set cores_per_rank"
        return found, f"{ranks} x {each}", "fail" if counts and counts[0] < each * ranks else "ok", hint

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

    def _network(self) -> Row:
        """Say what carried the collectives, where that was measured, else what the site file declares."""
        site, found, fast = self._site, self._measurement, fast_link(self._site)
        over = ", ".join(site.interfaces) or "the interface that leads to the first node"
        declared = f"{fast}; sockets over {over} to meet" if fast else f"TCP sockets over {over}"
        if found and found.transport:
            speed = f", {found.bus_gb_s:.2f} GB/s" if found.bus_gb_s else ""
            hint = "sockets carried what a fast link is declared for: mend the site, then qualify it again"
            measured = f"measured {found.created:%Y-%m-%d}: {found.transport}{speed}"
            return measured, declared, "fail" if fast and found.slow else "ok", hint
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

    def _folders(self) -> Row:
        shared, own = self._site.shared, (self._root / "runs", cache_root())
        hidden = [one for one in own if not any(one.is_relative_to(folder) for folder in shared)]
        hint = f"choose others with --out and TWINRUN_CACHE, or add them to {self._place}.shared"
        needed = f"runs and cache below one of {', '.join(shared)}"
        return ", ".join(map(str, hidden or own)), needed, "fail" if hidden else "ok", hint


def _count(devices: dict[str, int], name: str) -> int:
    """Return how many of a resource a node has, of any type where the name has none."""
    return sum(count for key, count in devices.items() if key == name or key.partition(":")[0] == name)


def describe(
    *, client: Sequence[str], partition: str | None, gpus: Mapping[str, Gpu], scheduler: str = "slurm"
) -> str:
    """Return the text of a first cluster.toml for the nodes of one partition that are alike.

    Args:
        client: words before each command of the scheduler.
        partition: name of one, or of a queue; the default when left out.
        gpus: rows of images/gpus.toml, one of which the type of a resource may name.
        scheduler: `slurm`, `pbs` or `gridengine`.

    Raises:
        MachineError: the scheduler is not here, or the partition has no node.
    """
    told = {"scheduler": scheduler, "partition": partition, "client": tuple(client)}
    least = dict.fromkeys(("nodes", "devices_per_node", "cores_per_node"), 1)
    asked = Site.model_validate({**told, **least, "shared": ("/",), "vendor": "cpu"})
    asking = client_of(LoadedSite(name="described", place="cluster.toml:site.described", site=asked))
    name, limit = asking.longest(partition)
    # The nodes that most are like; others have another partition, or another feature.
    kinds = Counter(
        (one.cores, one.memory_gib, tuple(sorted(one.devices.items()))) for one in asking.nodes(name)
    )
    if not kinds:
        raise MachineError("the partition has no node", place="cluster describe", found=name or partition)
    (cores, memory, resources), count = kinds.most_common(1)[0]
    counted = [one for one in resources if scheduler == "slurm" or one[0] in _DEVICES]
    resource, devices = counted[0] if counted else (None, 1)
    row, accounts = _row(resource, gpus), asking.accounts() or []
    title = (asking.setting("ClusterName") or "cluster").lower().replace("_", "-")

    def lines() -> Iterator[str]:
        complete = "                    # complete: "
        nodes = f"{count} of {kinds.total()} nodes of {name}"
        yield f"# What {asking.title} says of {nodes}; complete the marked lines.\n[site.{title}]"
        yield f'scheduler = "{scheduler}"\nnodes = {count}\ndevices_per_node = {devices}'
        yield f"cores_per_node = {cores}\nmemory_gib = {memory}"
        if row:
            yield f'vendor = "{gpus[row].vendor}"\ngpu = "{row}"'
        else:
            yield f'vendor = "cpu"{complete}a folder of images/vendors'
        if resource and not row:
            yield f'# gpu = "..."{complete}a row of images/gpus.toml'
        if cores >= devices and cores % devices:
            yield f"cores_per_rank = {cores // devices}"
        if accounts:
            yield f"account = {json.dumps(accounts[0])}  # of {', '.join(accounts)}"
        known = {"partition": name, "gres": resource, "client": list(client)}
        yield from (f"{key} = {json.dumps(value)}" for key, value in known.items() if value)
        if scheduler == "gridengine":
            yield f'parallel_environment = "mpi"{complete}one of `qconf -spl`'
        yield f"minutes = {max(1, min(int(limit // 60), _MOST_MINUTES))}"
        yield f'shared = ["/shared"]{complete}folders that all nodes see'

    return "".join(f"{line}\n" for line in lines())


def _row(resource: str | None, gpus: Collection[str]) -> str | None:
    """Return the row of images/gpus.toml that the type of a resource names; None where it names none."""
    kind = (resource or "").partition(":")[2].replace("_", "-").lower()
    return next((one for one in gpus if kind and (one == kind or one.startswith(f"{kind}-"))), None)
