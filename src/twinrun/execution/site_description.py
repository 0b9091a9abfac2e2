"""`invoke cluster describe`: a first cluster.toml, from what the Slurm of a login node says."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Sequence

from twinrun.execution.slurm_client import SlurmClient, seconds_of
from twinrun.foundation.errors import MachineError
from twinrun.manifests.cluster import LoadedSite, Site

# A limit that no point of ours needs.
_MOST_MINUTES = 240


def describe(*, client: Sequence[str], partition: str | None, gpus: Collection[str]) -> str:
    """Return the text of a cluster.toml for the nodes of one partition that are alike.

    Args:
        client: words before each command of Slurm.
        partition: name of one; the default partition when left out.
        gpus: rows of images/gpus.toml, one of which the type of a generic resource may name.

    Raises:
        MachineError: Slurm is not here, or the partition has no node.
    """
    asked = Site(
        scheduler="slurm",
        vendor="cpu",
        nodes=1,
        devices_per_node=1,
        cores_per_node=1,
        partition=partition,
        shared=("/",),
        client=tuple(client),
    )
    slurm = SlurmClient(LoadedSite(name="described", place="cluster.toml:site.described", site=asked))
    found = slurm.partition()
    name = found.get("PartitionName")
    nodes = [one for one in slurm.nodes() if name in one.get("Partitions", "").split(",")]
    if not nodes:
        raise MachineError("the partition has no node", place="invoke cluster describe", found=partition)
    # The nodes that most are like; others have another partition, or another feature.
    (cores, memory, gres), count = Counter(
        (one.get("CPUTot", "1"), one.get("RealMemory", "0"), one.get("Gres", "(null)")) for one in nodes
    ).most_common(1)[0]
    resource, devices = _devices(gres)
    limit = seconds_of(found.get("MaxTime", "")) // 60
    cluster = slurm.setting("ClusterName") or "cluster"
    lines = [
        f"# What Slurm says of {count} of {len(nodes)} nodes of {name}; complete the marked lines.",
        f"[site.{cluster.lower().replace('_', '-')}]",
        'scheduler = "slurm"',
        'vendor = "cpu"                    # complete: a folder of images/vendors',
        *_gpu(resource, gpus),
        f"nodes = {count}",
        f"devices_per_node = {devices or 1}",
        f"cores_per_node = {cores}",
        *_rank_cores(int(cores), devices or 1),
        f"memory_gib = {int(memory) // 1024}",
        f"partition = {json.dumps(name)}",
        *([f"gres = {json.dumps(resource)}"] if resource else []),
        f"minutes = {max(1, min(int(limit), _MOST_MINUTES))}",
        'shared = ["/shared"]              # complete: folders that all nodes see',
        *([f"client = {json.dumps(list(client))}"] if client else []),
    ]
    return "\n".join([*lines, ""])


def _devices(gres: str) -> tuple[str | None, int]:
    """Return the generic resource of a node, and how many it has of it; None where it has none."""
    first = gres.replace("(null)", "").split(",")[0].partition("(")[0]
    *words, count = first.split(":") if first else ("0",)
    return (":".join(words), int(count)) if words and count.isdecimal() else (None, 0)


def _gpu(resource: str | None, gpus: Collection[str]) -> list[str]:
    """Return the line with the row of images/gpus.toml that the type of a resource names, or asks for it."""
    kind = (resource or "").partition(":")[2].replace("_", "-").lower()
    row = next((one for one in gpus if kind and (one == kind or one.startswith(f"{kind}-"))), None)
    if row:
        return [f"gpu = {json.dumps(row)}"]
    return ['# gpu = "..."                    # complete: a row of images/gpus.toml'] if resource else []


def _rank_cores(cores: int, ranks: int) -> list[str]:
    return [f"cores_per_rank = {cores // ranks}"] if cores >= ranks and cores % ranks else []
