"""`cluster describe`: a first cluster.toml, from what the scheduler of a login node says."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from twinrun.execution.batch import ENDLESS
from twinrun.execution.schedulers import client_of
from twinrun.foundation.errors import MachineError
from twinrun.manifests.cluster import LoadedSite, Site
from twinrun.manifests.vendor import Gpu

# A limit that no point of ours needs.
_MOST_MINUTES = 240
# Countable resources of PBS and Grid Engine that are devices.
_DEVICES = ("gpu", "ngpus", "gpus")


def describe(
    *, client: Sequence[str], partition: str | None, gpus: Mapping[str, Gpu], scheduler: str = "slurm"
) -> str:
    """Return the text of a cluster.toml for the nodes of one partition that are alike.

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
    nodes = [one for one in asking.nodes() if not (name and one.partitions) or name in one.partitions]
    if not nodes:
        raise MachineError("the partition has no node", place="cluster describe", found=name or partition)
    # The nodes that most are like; others have another partition, or another feature.
    kinds = Counter((one.cores, one.memory_gib, tuple(sorted(one.devices.items()))) for one in nodes)
    (cores, memory, resources), count = kinds.most_common(1)[0]
    resource, devices = next(
        ((key, number) for key, number in resources if scheduler == "slurm" or key in _DEVICES), (None, 1)
    )
    row = _row(resource, gpus)
    vendor = gpus[row].vendor if row else "cpu"
    accounts = asking.accounts() or []
    cluster = asking.setting("ClusterName") or "cluster"
    complete = "                    # complete: "
    unknown = resource and f'# gpu = "..."{complete}a row of images/gpus.toml'
    limited = _MOST_MINUTES if limit >= ENDLESS else max(1, min(int(limit // 60), _MOST_MINUTES))
    others = f"  # or {', '.join(accounts[1:])}" if accounts[1:] else ""
    lines = (
        f"# What {asking.title} says of {count} of {len(nodes)} nodes of {name}; complete the marked lines.",
        f"[site.{cluster.lower().replace('_', '-')}]",
        f'scheduler = "{scheduler}"',
        f'vendor = "{vendor}"' + ("" if row else f"{complete}a folder of images/vendors"),
        f'gpu = "{row}"' if row else unknown,
        f"nodes = {count}",
        f"devices_per_node = {devices}",
        f"cores_per_node = {cores}",
        f"cores_per_rank = {cores // devices}" if cores >= devices and cores % devices else None,
        f"memory_gib = {memory}",
        name and f"partition = {json.dumps(name)}",
        f"account = {json.dumps(accounts[0])}{others}" if accounts else None,
        resource and f"gres = {json.dumps(resource)}",
        scheduler == "gridengine" and f'parallel_environment = "mpi"{complete}one of `qconf -spl`',
        f"minutes = {limited}",
        'shared = ["/shared"]              # complete: folders that all nodes see',
        f"client = {json.dumps(list(client))}" if client else None,
    )
    return "".join(f"{line}\n" for line in lines if line)


def _row(resource: str | None, gpus: Collection[str]) -> str | None:
    """Return the row of images/gpus.toml that the type of a resource names; None where it names none."""
    kind = (resource or "").partition(":")[2].replace("_", "-").lower()
    return next((one for one in gpus if kind and (one == kind or one.startswith(f"{kind}-"))), None)
