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
from twinrun.execution.engine import log_folder, point_folder
from twinrun.execution.ranks import METRICS, Launch, Ranks, rank_reports
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


def qualify(site: LoadedSite, *, ranks: Ranks, accelerator: bool, key: Path | None = None) -> Qualification:
    """Run the two jobs of a site, and write what they found beside it.

    The caller has opened the engine for the stack that runs will use, in a run folder that the nodes see, and
    composed `ranks` as for a run, with `NCCL_DEBUG=INFO` among their variables.

    Args:
        accelerator: whether ranks use GPUs.
        key: private SSH key that signs the file; unsigned when left out.

    Raises:
        InputError: the key does not sign. What fails at the site stands in `faults`.
    """
    found: dict[str, object] = {"site": site.name, "declared_sha256": _digest(site.site)}
    found |= {"engine": site.site.engine, "image": ranks.engine.image_digest}
    faults = []
    for nodes in range(1, min(site.site.nodes, 2) + 1):
        try:
            measured = _measured(nodes, site.site, ranks, accelerator=accelerator)
        except TwinrunError as error:
            faults.append(" ".join(f"{error.place or ''}: {error.message}: {error.found or ''}".split()))
        else:
            # The first job starts cold.
            left = bool(measured["left_after_cancel"] or found.get("left_after_cancel"))
            found = measured | found | {"nodes": measured["nodes"], "left_after_cancel": left}
    found |= {"created": datetime.datetime.now(datetime.UTC), "faults": tuple(faults)}
    qualification = Qualification.model_validate(found)
    file, text = qualification_file(site), qualification.model_dump_json(indent=1) + "\n"
    write_atomically(file, text)
    if key:
        write_atomically(Path(f"{file}{SUFFIX}"), signature_of(sha256_of_bytes(text.encode()), key=key))
    return qualification


def _measured(nodes: int, site: Site, ranks: Ranks, *, accelerator: bool) -> dict[str, object]:
    """Return what a job of so many nodes gets, how fast they speak, and whether it ends with a cancel."""
    place = Placement(id=f"qualify-{nodes}", nodes=nodes, devices_per_node=site.devices_per_node)
    run, inside = ranks.workspace.run, ranks.engine.inside
    out, logs = point_folder(run, place.id), log_folder(run, place.id)
    if isinstance(ranks.scheduler, BatchScheduler):
        # What it refuses at once would wait for nodes for ever.
        ranks.scheduler.judged()
    told = {"recipe": "proof", "point": place.id, "world_size": place.world_size, "accelerator": accelerator}
    told |= {"out": inside(out), "metrics": inside(run / METRICS), "attempt": ""}
    launch = Launch(placement=place, script=PROOF, job=Job.model_validate(told))
    submitted = ranks.adopted(ranks.begin(launch, place=0))
    file, deadline = out / "result.json", time.monotonic() + _START_SECONDS
    try:
        while not file.exists():
            if (status := submitted.poll()) is not None or time.monotonic() > deadline:
                ends = [end_of(log) for log in (*submitted.logs(), *logs.rglob("std*.log"))]
                message, found = f"the job measured nothing, and ended with {status}", "\n".join(ends)
                raise RunError(message, place=place.id, found=last_lines(found))
            time.sleep(_POLL_SECONDS)
        result, reports = load_json(file, ProofResult), rank_reports(out)
        # The files that the job prints to are made when it starts.
        began = min((log.stat().st_mtime for log in submitted.logs()), default=0.0)
        cold = min(one.stat().st_mtime for one in (out / "ranks").iterdir()) - began
    finally:
        ranks.end(submitted, place.id)
    written = _written(out)
    time.sleep(_LEFT_SECONDS)
    first = [one.node for one in reports if one.node]
    over = sorted({one.transport.get("GLOO_SOCKET_IFNAME", "") for one in first} - {""})
    carried = transport(logs) or f"TCP over {', '.join(over) or 'an interface of its choice'}"
    facts = NodeFacts(
        host=reports[0].host,
        cores=result.cores,
        memory_gib=result.memory_bytes >> 30,
        devices=tuple(one.name for one in first[0].devices),
        interfaces=tuple(one.name for one in first[0].interfaces),
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
    files = (file for name in ("stdout.log", "stderr.log") for file in sorted(logs.rglob(name)))
    found = (_NETWORK.search(file.read_text(encoding="utf-8", errors="replace")) for file in files)
    return next((one[1].strip() for one in found if one), "")


def contradictions(site: Site, found: Qualification, *, gpus: Mapping[str, Gpu]) -> list[str]:
    """Return in words what of a site's declarations the measurement speaks against."""
    gbit, declared = 8 * (found.bus_gb_s or 0.0), site.network_gbit_s or 0.0
    # What is named, declared and found, and whether that is false.
    rows: list[tuple[str, object, object, object]] = []
    if facts := found.facts:
        devices, count, memory = facts.devices, site.devices_per_node, site.memory_gib or 0
        cores, row = site.rank_cores * count, gpus.get(site.gpu or "")
        others = sorted(
            {one for one in devices if not (row and any(known.search(one) for known in row.match))}
        )
        absent = [one for one in site.interfaces if one not in facts.interfaces]
        rows += [
            ("cores", cores, facts.cores, facts.cores < cores),
            ("memory_gib", memory, facts.memory_gib, memory > facts.memory_gib + 1),
            ("devices_per_node", count, len(devices), site.gpu and len(devices) != count),
            ("gpu", site.gpu or "none", ", ".join(others), others),
            ("interfaces", ", ".join(absent), ", ".join(facts.interfaces), absent),
        ]
    rows += [
        ("cancel", "an end", "a process of the job that went on", found.left_after_cancel),
        ("network", "a fast link", found.transport, is_slow(site, found)),
        ("network_gbit_s", f"{declared:g}", f"{gbit:.3g}", 0 < gbit < ENOUGH * declared),
    ]
    wrong = [f"{key}: {told} declared, {measured} found" for key, told, measured, false in rows if false]
    return [*(f"could not be run: {fault}" for fault in found.faults), *wrong]


def fast_link(site: Site) -> str | None:
    """Return the link between nodes that a site declares beside sockets, None where it declares none."""
    modules = [one for one in site.modules if any(word in one for word in _PLUGINS)]
    if plugin := site.environment.get("NCCL_NET_PLUGIN") or next(iter(modules), None):
        return f"libfabric, by {plugin}"
    adapter = site.environment.get("NCCL_IB_HCA")
    return f"InfiniBand, {adapter or 'every adapter'}" if site.infiniband or adapter else None


def is_slow(site: Site, found: Qualification) -> bool:
    """Say whether sockets carried what a fast link is declared for."""
    return fast_link(site) is not None and found.transport.startswith(("Socket", "TCP"))


def _digest(site: Site) -> str:
    return sha256_of_bytes(canonical_json(site.model_dump(mode="json")).encode())
