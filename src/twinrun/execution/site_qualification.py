"""What is true of a site, measured by one job of one node and one of two, in the engine that runs will use.

Each says what its ranks get, times an all-reduce, and is cancelled: what still writes its pulse then was left
behind. The second shows whether two nodes find each other, and what carries messages between them.
"""

from __future__ import annotations

import contextlib
import datetime
import re
import time
from collections.abc import Mapping
from pathlib import Path

from twinrun.execution.batch import BatchScheduler
from twinrun.execution.engine import Engine, log_folder, point_folder
from twinrun.execution.ranks import METRICS, Launch, RankCommands, Ranks, rank_reports
from twinrun.execution.task import forget_pending
from twinrun.foundation.errors import InputError, RunError, TwinrunError
from twinrun.foundation.files import canonical_json, sha256_of_bytes, write_atomically
from twinrun.foundation.manifest import Frozen, load_json
from twinrun.foundation.processes import end_of, last_lines
from twinrun.foundation.signatures import SUFFIX, signature_of
from twinrun.manifests.cluster import LoadedSite, Site
from twinrun.manifests.vendor import Gpu
from twinrun.protocol.allocation import Placement
from twinrun.protocol.job import Job, ProofResult
from twinrun.protocol.signals import PULSE

# What the ranks run: they say what they are given, and stay until they are killed; SIGTERM they ignore.
PROOF: str | Path = "twinrun.train.proof"
_POLL_SECONDS, _START_SECONDS, _LEFT_SECONDS = 0.5, 1800.0, 5.0
# How NCCL, and RCCL after it, name what carries messages between nodes.
_NETWORK = re.compile(r"Using network (\S[^\n]*)")
# Modules that bring the plugin for libfabric.
_PLUGINS = ("ofi", "rccl-net-plugin", "singularity-AI-bindings")
# Below this share of what the links can do something is wrong.
ENOUGH = 0.5


class NodeFacts(Frozen):
    """What a node's ranks get, as a process among them found it."""

    host: str
    cores: int
    memory_gib: int
    """The job's limit, or the machine's where it has none."""
    devices: tuple[str, ...] = ()
    """Names of the GPUs that the framework sees."""
    interfaces: tuple[str, ...] = ()


class Qualification(Frozen):
    """What was measured at a site."""

    site: str
    declared_sha256: str
    """Digest of the site's table as it was then."""
    engine: str
    image: str | None = None
    created: datetime.datetime
    nodes: tuple[str, ...] = ()
    facts: NodeFacts | None = None
    cold_start_s: float | None = None
    """From the start of the job's script to the first word of its process."""
    left_after_cancel: bool | None = None
    """Whether something of the job still wrote five seconds after it was cancelled."""
    transport: str = ""
    bus_gb_s: float | None = None
    """Bytes that each link carries in a second while two nodes all-reduce, in GB."""
    faults: tuple[str, ...] = ()
    """What could not be run, in the words of its error."""

    @property
    def slow(self) -> bool:
        """Whether sockets carried the messages."""
        return bool(re.match(r"Socket|TCP", self.transport))


def qualification_file(site: LoadedSite) -> Path:
    """Return the file beside the site's that holds what was measured; its signature has the suffix `.sig`."""
    return Path(site.place.rpartition(":")[0]).with_name(f"qualification-{site.name}.json")


def qualification_of(site: LoadedSite) -> Qualification | None:
    """Return what was measured at a site, None where nothing was, or its table is another now."""
    # Another version measured other things.
    with contextlib.suppress(InputError, FileNotFoundError):
        found = load_json(qualification_file(site), Qualification)
        return found if found.declared_sha256 == _digest(site.site) else None
    return None


def qualify(
    site: LoadedSite, *, engine: Engine, commands: RankCommands, accelerator: bool, key: Path | None = None
) -> Qualification:
    """Run the two jobs of a site, and write what they found beside it.

    The caller has opened the engine for the stack that runs will use, in a run folder that the nodes see, and
    composed `commands` as for a run, with `NCCL_DEBUG=INFO` among their variables.

    Args:
        accelerator: whether ranks use GPUs.
        key: private SSH key that signs the file; unsigned when left out.

    Raises:
        InputError: the key does not sign. What fails at the site stands in `faults`.
    """
    found: dict[str, object] = {}
    faults = []
    for nodes in range(1, min(site.site.nodes, 2) + 1):
        try:
            measured = _measured(nodes, site.site, engine, commands, accelerator=accelerator)
        except TwinrunError as error:
            faults.append(" ".join(f"{error.place or ''}: {error.message}: {error.found or ''}".split()))
        else:
            # The first job starts cold.
            left = bool(measured["left_after_cancel"] or found.get("left_after_cancel"))
            found = measured | found | {"nodes": measured["nodes"], "left_after_cancel": left}
    found |= {"site": site.name, "declared_sha256": _digest(site.site), "engine": site.site.engine}
    found |= {"image": engine.image_digest, "created": datetime.datetime.now(datetime.UTC)}
    qualification = Qualification.model_validate(found | {"faults": tuple(faults)})
    file, text = qualification_file(site), qualification.model_dump_json(indent=1) + "\n"
    write_atomically(file, text)
    if key:
        write_atomically(Path(f"{file}{SUFFIX}"), signature_of(sha256_of_bytes(text.encode()), key=key))
    return qualification


def _measured(
    nodes: int, site: Site, engine: Engine, commands: RankCommands, *, accelerator: bool
) -> dict[str, object]:
    """Return what a job of so many nodes gets, how fast they speak, and whether it ends with a cancel."""
    place = Placement(id=f"qualify-{nodes}", nodes=nodes, devices_per_node=site.devices_per_node)
    point, run, ranks = place.id, commands.workspace.run, Ranks(engine=engine, commands=commands)
    out, logs, inside = point_folder(run, point), log_folder(run, point), engine.inside
    if isinstance(commands.scheduler, BatchScheduler):
        # What it refuses at once would wait for nodes for ever.
        commands.scheduler.judged()
    job = Job(
        recipe="proof",
        point=point,
        world_size=place.world_size,
        accelerator=accelerator,
        out=inside(out),
        metrics=inside(run / METRICS),
        attempt="",
    )
    submitted = ranks.adopted(ranks.begin(Launch(placement=place, script=PROOF, job=job), place=0))
    file, deadline = out / "result.json", time.monotonic() + _START_SECONDS
    try:
        while not file.exists():
            if (status := submitted.poll()) is not None or time.monotonic() > deadline:
                text = last_lines(
                    "\n".join(end_of(log) for log in (*submitted.logs(), *logs.rglob("std*.log")))
                )
                raise RunError(f"the job measured nothing, and ended with {status}", place=point, found=text)
            time.sleep(_POLL_SECONDS)
        result, reports = load_json(file, ProofResult), rank_reports(out)
        # The files that the job prints to are made when it starts.
        began = min((log.stat().st_mtime for log in submitted.logs()), default=0.0)
        cold = min(one.stat().st_mtime for one in (out / "ranks").iterdir()) - began
    finally:
        submitted.cancel()
        forget_pending(run, point)
    first, written = reports[0], _written(out)
    time.sleep(_LEFT_SECONDS)
    assert first.node is not None
    over = {one.node.transport.get("GLOO_SOCKET_IFNAME", "") for one in reports if one.node} - {""}
    carried = transport(logs) or f"TCP over {', '.join(sorted(over)) or 'an interface of its choice'}"
    facts = NodeFacts(
        host=first.host,
        cores=result.cores,
        memory_gib=result.memory_bytes >> 30,
        devices=tuple(one.name for one in first.node.devices),
        interfaces=tuple(one.name for one in first.node.interfaces),
    )
    return {
        "facts": facts,
        "nodes": tuple(dict.fromkeys(one.host for one in reports)),
        "cold_start_s": cold if began else None,
        "left_after_cancel": written != _written(out),
        **({"transport": carried, "bus_gb_s": result.bus_gb_s} if nodes > 1 else {}),
    }


def _written(out: Path) -> float:
    """Return when a rank last wrote its pulse."""
    return max((one.stat().st_mtime for one in (out / PULSE).iterdir()), default=0.0)


def transport(logs: Path) -> str:
    """Return what the collectives say that they use, in their logs; empty where they are silent."""
    for file in (*sorted(logs.rglob("stdout.log")), *sorted(logs.rglob("stderr.log"))):
        if found := _NETWORK.search(file.read_text(encoding="utf-8", errors="replace")):
            return found[1].strip()
    return ""


def contradictions(site: Site, found: Qualification, *, gpus: Mapping[str, Gpu]) -> list[str]:
    """Return in words what of a site's declarations the measurement speaks against."""
    wrong = [f"could not be run: {fault}" for fault in found.faults]

    def hold(key: str, declared: object, measured: object, *, false: bool) -> None:
        if false:
            wrong.append(f"{key}: {declared} declared, {measured} found")

    if facts := found.facts:
        wanted, devices, row = (
            site.rank_cores * site.devices_per_node,
            facts.devices,
            gpus.get(site.gpu or ""),
        )
        others = {one for one in devices if not row or not any(known.search(one) for known in row.match)}
        absent = [one for one in site.interfaces if one not in facts.interfaces]
        memory, names = site.memory_gib or 0, ", ".join(sorted(others))
        hold("cores", wanted, facts.cores, false=facts.cores < wanted)
        hold("memory_gib", memory, facts.memory_gib, false=memory > facts.memory_gib + 1)
        few = bool(site.gpu) and len(devices) != site.devices_per_node
        hold("devices_per_node", site.devices_per_node, len(devices), false=few)
        hold("gpu", site.gpu or "none", names, false=bool(others))
        hold("interfaces", ", ".join(absent), ", ".join(facts.interfaces), false=bool(absent))
    left = bool(found.left_after_cancel)
    hold("cancel", "an end", "a process of the job that went on", false=left)
    hold("network", "a fast link", found.transport, false=is_slow(site, found))
    declared, gbit = site.network_gbit_s or 0.0, 8 * (found.bus_gb_s or 0.0)
    hold("network_gbit_s", f"{declared:g}", f"{gbit:.3g}", false=0 < gbit < ENOUGH * declared)
    return wrong


def fast_link(site: Site) -> str | None:
    """Return the link between nodes that a site declares beside sockets, None where it declares none."""
    modules = [one for one in site.modules if any(word in one for word in _PLUGINS)]
    if plugin := site.environment.get("NCCL_NET_PLUGIN") or next(iter(modules), None):
        return f"libfabric, by {plugin}"
    adapter = site.environment.get("NCCL_IB_HCA")
    return f"InfiniBand, {adapter or 'every adapter'}" if site.infiniband or adapter else None


def is_slow(site: Site, found: Qualification) -> bool:
    """Say whether sockets carried what a fast link is declared for."""
    return fast_link(site) is not None and found.slow


def _digest(site: Site) -> str:
    return sha256_of_bytes(canonical_json(site.model_dump(mode="json")).encode())
