"""`doctor --cluster` and `cluster describe`: cluster.toml held against the scheduler, or written from it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from twinrun.execution.batch import ENDLESS, BatchScheduler
from twinrun.execution.schedulers import client_of
from twinrun.execution.site_qualification import (
    contradictions,
    fast_link,
    is_slow,
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
# A check's name, what was found, what is needed, the status, and what to do where that is not `ok`.
Row = tuple[str, str, str, str, str]


def check_site(root: Path, site: LoadedSite) -> Diagnosis:
    """Ask the scheduler of a site for what cluster.toml says of it, and say what was measured there."""
    client, rows = client_of(site), list[Row]()
    for check in (_scheduler, _nodes, _job):
        try:
            rows += check(client)
        except TwinrunError as error:
            # What the scheduler refuses fails its check.
            found = " ".join(str(error.found or error.message).split())
            rows.append((check.__name__[1:], found, "an answer", "fail", f"see {site.place}"))
    rows += _declared(root, site)
    keys = ("name", "found", "needed", "status", "hint")
    told = (row if row[3] != "ok" else (*row[:4], None) for row in rows)
    return Diagnosis(
        checks=tuple(HostCheck.model_validate(dict(zip(keys, row, strict=True))) for row in told)
    )


def _scheduler(client: BatchScheduler) -> Iterator[Row]:
    yield "scheduler", client.version(), "a scheduler that answers", "ok", ""
    name, limit = client.longest(client.site.site.partition)
    wanted = client.site.site.minutes * 60
    found = f"{name or 'none'}, jobs of up to {'any time' if limit >= ENDLESS else duration(limit)}"
    status, hint = "fail" if limit < wanted else "ok", f"lower {client.site.place}.minutes"
    yield "partition", found, f"jobs of {duration(wanted)}", status, hint


def _nodes(client: BatchScheduler) -> Iterator[Row]:
    """Yield how many nodes there are, and whether the least that jobs get of one is enough."""
    site, nodes = client.site.site, client.nodes()
    status = "fail" if not nodes else "warn" if len(nodes) < site.nodes else "ok"
    hint = f"lower {client.site.place}.nodes, or ask why nodes are out of service: {client.faults()}"
    yield "nodes", f"{len(nodes)} up", str(site.nodes), status, hint
    client.demand()
    count, gres = site.devices_per_node, site.gres if site.devices_by == "gres" else None
    there = ", ".join(sorted({key for one in nodes for key in one.devices})) or "no resource"
    least = {
        "devices": (
            [_count(one.devices, gres) for one in nodes],
            count if gres else 0,
            "gres or .devices_per_node",
        ),
        "cores": ([one.cores for one in nodes], count * site.rank_cores, "cores_per_node or .cores_per_rank"),
        "memory": ([one.memory_gib for one in nodes], site.memory_gib or 0, "memory_gib"),
    }
    for name, (has, wanted, key) in least.items():
        found, status = (
            ", ".join(map(str, sorted(set(has)))),
            "fail" if min(has, default=0) < wanted else "ok",
        )
        hint = f"correct {client.site.place}.{key}; nodes have {there}"
        yield name, f"{found} of a node for jobs", f"{wanted}", status, hint


def _job(client: BatchScheduler) -> Iterator[Row]:
    found, silent = client.judged(), f"{client.title} judges no job before it is queued"
    needed, status = "options that the scheduler takes", "ok" if found else "unknown"
    yield "job", found or silent, needed, status, "the first run shows it"


def _declared(root: Path, site: LoadedSite) -> Iterator[Row]:
    """Yield what was measured of the declarations, and speaks against them; and folders that no node sees."""
    one, found, fast = site.site, qualification_of(site), fast_link(site.site)
    over = ", ".join(one.interfaces) or "the interface that leads to the first node"
    link = f"{fast}; sockets over {over} to meet" if fast else f"TCP sockets over {over}"
    qualify = f"`twinrun site qualify {site.name}` measures it, in one job of one node and one of two"
    if found and found.transport:
        speed = f", {found.bus_gb_s:.2f} GB/s" if found.bus_gb_s else ""
        hint = "sockets carried what a fast link is declared for: mend the site, then qualify it again"
        measured = f"measured {found.created:%Y-%m-%d}: {found.transport}{speed}"
        yield "network", measured, link, "fail" if is_slow(one, found) else "ok", hint
    else:
        without = one.gpu and one.nodes > 1 and not fast
        hint = f"set `infiniband`, or load the plugin for libfabric; {qualify}" if without else qualify
        status = "unknown" if one.nodes > 1 else "ok"
        yield "network", f"declared, not measured: {link}", "", status, hint
    needed = "what cluster.toml declares"
    if found:
        wrong, file = contradictions(one, found, gpus=known_gpus(root)), qualification_file(site)
        signature, signer = Path(f"{file}{SUFFIX}"), UNSIGNED
        if signature.exists():
            digest, text, own = sha256_of_bytes(file.read_bytes()), signature_in(signature), signers_of(root)
            signer = signed_by(digest, text, place=str(signature), signers=own, when=found.created)
        well = f"as declared, on {', '.join(found.nodes)}, {found.created:%Y-%m-%d}, {signer}"
        hint = f"correct {site.place}, or mend the site and qualify it again"
        yield "measured", "; ".join(wrong) or well, needed, "fail" if wrong else "ok", hint
    else:
        yield "measured", "nothing: all is only declared", needed, "unknown", qualify
    folders = (root / "runs", cache_root())
    hidden = [folder for folder in folders if not any(folder.is_relative_to(seen) for seen in one.shared)]
    hint = f"choose others with --out and TWINRUN_CACHE, or add them to {site.place}.shared"
    shown, needed = ", ".join(map(str, hidden or folders)), f"runs and cache below {', '.join(one.shared)}"
    yield "folders", shown, needed, "fail" if hidden else "ok", hint


def _count(devices: dict[str, int], name: str | None) -> int:
    """Return how many of a resource a node has, of any type where the name has none."""
    return sum(count for key, count in devices.items() if name in (key, key.partition(":")[0]))


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
    counted = (one for one in resources if scheduler == "slurm" or one[0] in _DEVICES)
    resource, devices = next(counted, (None, 1))
    kind = (resource or "").partition(":")[2].replace("_", "-").lower()
    row = next((one for one in gpus if kind and (one == kind or one.startswith(f"{kind}-"))), None)
    accounts = asking.accounts() or [""]
    keys = {
        "scheduler": scheduler,
        "nodes": count,
        "devices_per_node": devices,
        "cores_per_node": cores,
        "memory_gib": memory,
        "vendor": gpus[row].vendor if row else "cpu",
        "gpu": row,
        "cores_per_rank": cores // devices if cores >= devices and cores % devices else None,
        "account": accounts[0],
        "partition": name,
        "gres": resource,
        "client": list(client),
        "parallel_environment": "mpi" if scheduler == "gridengine" else None,
        "minutes": max(1, min(int(limit // 60), _MOST_MINUTES)),
        "shared": ["/shared"],
    }
    remarks = {
        "vendor": "" if row else "complete: a folder of images/vendors, and `gpu`, a row of images/gpus.toml",
        "account": f"of {', '.join(accounts)}",
        "parallel_environment": "complete: one of `qconf -spl`",
        "shared": "complete: folders that all nodes see",
    }
    lines = [
        f"# What {asking.title} says of {count} of {kinds.total()} nodes of {name}; complete what is marked.",
        f"[site.{name.lower().replace('_', '-') or 'cluster'}]",
        *(f"{key} = {json.dumps(value)}  # {remarks.get(key, '')}" for key, value in keys.items() if value),
    ]
    return "".join(f"{line.removesuffix('  # ')}\n" for line in lines)
