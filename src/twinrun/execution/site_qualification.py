"""What is true of a site, measured by one job of one node and one of two, in the engine that runs will use.

The first job says what a node's ranks get, and is cancelled: what still writes afterwards was left behind.
The second all-reduces over two nodes: it shows whether they find each other, and what carries messages.
"""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import Mapping
from pathlib import Path

from twinrun.execution.batch import BatchScheduler
from twinrun.execution.engine import PYTHON, Command, Engine, log_folder, point_folder
from twinrun.execution.launchers import RankPlacement
from twinrun.execution.ranks import METRICS, Launch, RankCommands, Ranks
from twinrun.execution.task import Task
from twinrun.foundation.errors import RunError, TwinrunError
from twinrun.foundation.files import canonical_json, sha256_of_bytes, write_atomically
from twinrun.foundation.manifest import Frozen, load_json
from twinrun.foundation.processes import end_of, last_lines
from twinrun.foundation.signatures import SUFFIX, signature_of
from twinrun.manifests.cluster import LoadedSite, Site
from twinrun.manifests.vendor import Gpu
from twinrun.protocol.job import Job, ProofResult

# What the node runs: it says what it is given, then writes the time until it is killed; SIGTERM it ignores.
_PROGRAM = """
import json, os, pathlib, signal, socket, sys, time
out, first = pathlib.Path(sys.argv[1]), sys.argv[2]
signal.signal(signal.SIGTERM, signal.SIG_IGN)
group = open("/proc/self/cgroup").read().strip().rpartition("::")[2]
own = pathlib.Path("/sys/fs/cgroup") / group.lstrip("/")
limits = [one / "memory.max" for one in (own, *own.parents)]
texts = [one.read_text().strip() for one in limits if one.is_file()]
whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
memory = min([whole, *(int(one) for one in texts if one != "max")])
try:
    import torch
    devices = [torch.cuda.get_device_name(one) for one in range(torch.cuda.device_count())]
except ImportError:
    devices = []
facts = {"host": socket.gethostname(), "cores": len(os.sched_getaffinity(0)), "memory_gib": memory >> 30}
facts |= {"devices": devices, "interfaces": [name for _, name in socket.if_nameindex()], "resolved": True}
try:
    socket.getaddrinfo(first, None)
except OSError:
    facts["resolved"] = False
(out / "alive").write_text("begins")
(out / "facts.part").write_text(json.dumps(facts))
(out / "facts.part").rename(out / "facts.json")
for _ in range(1200):
    (out / "alive").write_text(str(time.time()))
    time.sleep(0.5)
"""
_POLL_SECONDS, _START_SECONDS, _LEFT_SECONDS = 0.5, 1800.0, 5.0
# How NCCL, and RCCL after it, name what carries messages between nodes.
_NETWORK = re.compile(r"Using network (\S[^\n]*)")
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
    resolved: bool = True
    """Whether the name of the job's first node leads to an address."""


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


class Nodes(Frozen):
    """All devices of so many nodes."""

    id: str
    nodes: int
    devices_per_node: int

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.nodes * self.devices_per_node


def qualification_file(site: LoadedSite) -> Path:
    """Return the file beside the site's that holds what was measured; its signature has the suffix `.sig`."""
    return Path(site.place.rpartition(":")[0]).with_name(f"qualification-{site.name}.json")


def qualification_of(site: LoadedSite) -> Qualification | None:
    """Return what was measured at a site, None where nothing was, or its table was changed since."""
    file = qualification_file(site)
    found = load_json(file, Qualification) if file.is_file() else None
    return found if found and found.declared_sha256 == _digest(site.site) else None


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
            if nodes == 1:
                found |= _measured_node(site.site, engine, commands)
            else:
                found |= _measured_pair(site.site, engine, commands, accelerator=accelerator)
        except TwinrunError as error:
            faults.append(" ".join(f"{error.place or ''}: {error.message}: {error.found or ''}".split()))
    found |= {"site": site.name, "declared_sha256": _digest(site.site), "engine": site.site.engine}
    found |= {"image": engine.image_digest, "created": datetime.datetime.now(datetime.UTC)}
    qualification = Qualification.model_validate(found | {"faults": tuple(faults)})
    file, text = qualification_file(site), qualification.model_dump_json(indent=1) + "\n"
    write_atomically(file, text)
    if key:
        write_atomically(Path(f"{file}{SUFFIX}"), signature_of(sha256_of_bytes(text.encode()), key=key))
    return qualification


def _measured_node(site: Site, engine: Engine, commands: RankCommands) -> dict[str, object]:
    """Return what one node gives to a job, when it began, and whether something outlived its end."""
    point, scheduler, run = "qualify-1", commands.scheduler, commands.workspace.run
    logs, out = log_folder(run, point), point_folder(run, point)
    for folder in (logs, out):
        folder.mkdir(parents=True, exist_ok=True)
    if isinstance(scheduler, BatchScheduler):
        # What it refuses at once would wait for nodes for ever.
        scheduler.judged()
    words = (PYTHON, "-c", _PROGRAM, engine.inside(out), scheduler.first_node())
    command = engine.render(Command(arguments=words, variables=dict(commands.variables), reaches_nodes=True))
    ranks, cores = site.devices_per_node, site.rank_cores
    task = Task(point=point, nodes=1, ranks_per_node=ranks, cores_per_rank=cores, commands=(command,))
    job = scheduler.submit(task, run=run, logs=logs, start=lambda one, log: engine.start(one, log=log))
    file, alive, deadline = out / "facts.json", out / "alive", time.monotonic() + _START_SECONDS
    try:
        while not file.exists():
            if (status := job.poll()) is not None or time.monotonic() > deadline:
                text = last_lines("\n".join(end_of(log) for log in job.logs()))
                raise RunError(f"the job said nothing, and ended with {status}", place=point, found=text)
            time.sleep(_POLL_SECONDS)
        facts = load_json(file, NodeFacts)
        # The files that the job prints to are made when it starts, and stay empty.
        began = min((log.stat().st_mtime for log in job.logs()), default=None)
        cold = file.stat().st_mtime - began if began else None
    finally:
        job.cancel()
    before = alive.read_text(encoding="ascii")
    time.sleep(_LEFT_SECONDS)
    left = before != alive.read_text(encoding="ascii")
    return {"facts": facts, "nodes": (facts.host,), "cold_start_s": cold, "left_after_cancel": left}


def _measured_pair(
    site: Site, engine: Engine, commands: RankCommands, *, accelerator: bool
) -> dict[str, object]:
    """Return what carries messages between two nodes, and how fast."""
    placement: RankPlacement = Nodes(id="qualify-2", nodes=2, devices_per_node=site.devices_per_node)
    run, point, size = commands.workspace.run, placement.id, placement.world_size
    out, metrics = point_folder(run, point), engine.inside(run / METRICS)
    told = {"recipe": "proof", "attempt": "", "accelerator": accelerator, "world_size": size}
    job = Job.model_validate(told | {"point": point, "out": engine.inside(out), "metrics": metrics})
    launch = Launch(placement=placement, script="twinrun.train.proof", job=job)
    done = Ranks(engine=engine, commands=commands).run(launch, show=lambda _line: None)
    if done is None:
        raise RunError("a message of the all-reduce did not fit into a device", place=point)
    over = {one.transport.get("GLOO_SOCKET_IFNAME", "") for one in done.allocation.reports.values()}
    carried = transport(log_folder(run, point))
    carried = carried or f"TCP over {', '.join(sorted(over - {''})) or 'an interface of its choice'}"
    speed = load_json(out / "result.json", ProofResult).bus_gb_s
    return {"nodes": done.allocation.nodes, "bus_gb_s": speed, "transport": carried}


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
        hold("names", "a first node", "no address of its name", false=not facts.resolved)
    left = bool(found.left_after_cancel)
    hold("cancel", "an end", "a process of the job that went on", false=left)
    hold("network", "a fast link", found.transport, false=is_slow(site, found))
    declared, gbit = site.network_gbit_s or 0.0, 8 * (found.bus_gb_s or 0.0)
    hold("network_gbit_s", f"{declared:g}", f"{gbit:.3g}", false=0 < gbit < ENOUGH * declared)
    return wrong


def is_slow(site: Site, found: Qualification) -> bool:
    """Say whether sockets carried what a fast link is declared for."""
    fast = site.infiniband or {"NCCL_NET_PLUGIN", "NCCL_IB_HCA"} & site.environment.keys()
    return bool(fast) and found.slow


def _digest(site: Site) -> str:
    return sha256_of_bytes(canonical_json(site.model_dump(mode="json")).encode())
