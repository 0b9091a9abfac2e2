"""Image of a cluster's containers, and the files that they share: Slurm's configuration, munge's key."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from twinrun.foundation.files import write_atomically
from twinrun.images.apt_archive import KEYRING, own_mirror
from twinrun.images.root_filesystem import mmdebstrap
from twinrun.machine.daemon import daemon_errors, find_image

if TYPE_CHECKING:
    from docker import DockerClient

REPOSITORY = "twinrun/cluster"
SUITE = "trixie"
# An engine compresses and unpacks the whole root before it answers.
_IMPORT_SECONDS = 600
CONTROLLER = "controller"
PARTITION, ACCOUNT = "main", "research"
# Devices of a node stand for its GPUs, so that generic resources can be asked for.
GRES, DEVICES_PER_NODE = "slot", 2
# A second partition with a shorter limit, and a node that is out of service from the start.
SHORT, DRAINED = "short", "worker0"
# Of a node, and what a job gets of each core unless it asks, in MB; what the site asks for, in GiB.
MEMORY, DEFAULT_MEMORY, SITE_MEMORY = 8000, 100, 6
_SLURM = """\
ClusterName=local
SlurmctldHost={controller}
SlurmUser=slurm
AuthType=auth/munge
# A job that is requeued waits as long: by default two minutes.
AuthInfo=cred_expire=10
StateSaveLocation=/var/lib/slurm/slurmctld
SlurmdSpoolDir=/var/lib/slurm/slurmd
SlurmctldPidFile=/run/slurm/slurmctld.pid
SlurmdPidFile=/run/slurm/slurmd.pid
# In a container without privileges control groups are read-only, so cores are bound by affinity alone and
# memory is counted by the accounting plugin, which ends a job that takes more than it asked for.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
JobAcctGatherParams=OverMemoryKill
JobAcctGatherFrequency=task=2
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
# A job that asks for no memory gets too little for ranks.
DefMemPerCPU={default_memory}
PriorityType=priority/multifactor
PriorityWeightQOS=1000
PriorityWeightFairshare=1000
PreemptType=preempt/qos
PreemptMode=REQUEUE
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={controller}
AccountingStorageEnforce=associations,limits,qos
JobAcctGatherType=jobacct_gather/linux
# Nodes share the machine, so each has what is said here and not what it finds.
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=15
KillWait=30
GresTypes={gres}
NodeName=worker[1-{nodes}] CPUs={cores} RealMemory={memory} Gres={gres}:{devices} State=UNKNOWN
NodeName={drained} NodeAddr=127.0.0.1 CPUs={cores} RealMemory={memory} State=DRAIN Reason="a fan is broken"
PartitionName={partition} Nodes=ALL Default=YES MaxTime=60 State=UP
PartitionName={short} Nodes=worker1 MaxTime=5 State=UP
"""
_DATABASE = """\
AuthType=auth/munge
DbdHost={controller}
SlurmUser=slurm
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=slurm
StorageLoc=slurm
PidFile=/run/slurm/slurmdbd.pid
"""
_SITE = """\
# Written by `invoke cluster up`.
[site.local]
scheduler = "slurm"
engine = "{engine}"
vendor = "{vendor}"
nodes = {nodes}
devices_per_node = 1
cores_per_node = {cores}
memory_gib = {memory_gib}
partition = "{partition}"
account = "{account}"
gres = "{gres}"
minutes = 60
shared = {shared}
client = {client}
poll_seconds = 0.5
"""


def recipe_folder(root: Path) -> Path:
    """Return what the containers are made of and start with."""
    return root / "images" / "cluster"


def image_name(root: Path) -> str:
    """Return the name of the image, which changes with its packages."""
    listed = (recipe_folder(root) / "packages.txt").read_bytes()
    return f"{REPOSITORY}:{SUITE}-{hashlib.sha256(listed).hexdigest()[:12]}"


def ensure_image(client: DockerClient, root: Path, *, architecture: str, say: Callable[[str], None]) -> str:
    """Return the name of the image, making it where the engine does not have it.

    Raises:
        MachineError: the packages are out of reach, or the engine refuses the image.
    """
    name = image_name(root)
    if find_image(client, name) is None:
        packages = (recipe_folder(root) / "packages.txt").read_text(encoding="utf-8").split()
        say(f"making {name} of {len(packages)} Debian packages and what they need, once")
        with tempfile.TemporaryDirectory(prefix="twinrun-cluster-") as folder:
            tar = Path(folder) / "root.tar"
            _write_root(tar, packages, architecture)
            _import(client, tar, name)
    return name


def _write_root(tar: Path, packages: list[str], architecture: str) -> None:
    mirror = own_mirror().replace("{archive}", "debian").rstrip("/")
    mmdebstrap(
        *("--variant=minbase", f"--architectures={architecture}", f"--keyring={KEYRING}"),
        *(f"--include={','.join(packages)}", SUITE, str(tar), f"deb {mirror} {SUITE} main"),
        epoch=round(time.time()),
        hint="check the network, or name a mirror in TWINRUN_DEBIAN_MIRROR",
    )


def _import(client: DockerClient, tar: Path, name: str) -> None:
    repository, _, tag = name.partition(":")
    patience, client.api.timeout = client.api.timeout, _IMPORT_SECONDS
    try:
        with daemon_errors("this image"):
            client.api.import_image_from_file(str(tar), repository=repository, tag=tag)
    finally:
        client.api.timeout = patience


def cores() -> int:
    """Return the cores of a node, all nodes share those of this machine."""
    return max(2, len(os.sched_getaffinity(0)))


def write_files(folder: Path, *, nodes: int) -> None:
    """Write what every container reads; the key is new each time, and readable for its owner alone."""
    values = {
        "controller": CONTROLLER,
        "nodes": nodes,
        "gres": GRES,
        "devices": DEVICES_PER_NODE,
        "cores": cores(),
        "memory": MEMORY,
        "default_memory": DEFAULT_MEMORY,
        "partition": PARTITION,
        "short": SHORT,
        "drained": DRAINED,
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "slurm.conf", _SLURM.format(**values))
    write_atomically(folder / "slurmdbd.conf", _DATABASE.format(**values))
    write_atomically(folder / "cgroup.conf", "CgroupPlugin=disabled\n")
    write_atomically(
        folder / "gres.conf", f"NodeName=worker[1-{nodes}] Name={GRES} Count={DEVICES_PER_NODE}\n"
    )
    key = folder / "munge.key"
    key.unlink(missing_ok=True)
    descriptor = os.open(key, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(secrets.token_bytes(1024))


def site_text(
    *, nodes: int, vendor: str, engine: str, shared: tuple[Path, ...], client: tuple[str, ...]
) -> str:
    """Return the cluster.toml of the site."""
    return _SITE.format(
        nodes=nodes,
        vendor=vendor,
        engine=engine,
        cores=cores(),
        memory_gib=SITE_MEMORY,
        partition=PARTITION,
        account=ACCOUNT,
        gres=GRES,
        shared=json.dumps([str(folder) for folder in shared]),
        client=json.dumps(list(client)),
    )
