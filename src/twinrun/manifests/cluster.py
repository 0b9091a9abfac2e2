"""cluster.toml: what the sites of a user have; each is a table `[site.NAME]`."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from twinrun.foundation.cache import cache_root
from twinrun.foundation.errors import InputError, closest
from twinrun.foundation.manifest import Frozen, load_toml
from twinrun.manifests.vendor import Gpu, Identifier, load_gpus

FILE = "cluster.toml"
# The site that `invoke cluster up` makes, in a file of its own.
LOCAL = "local"
# Slurm takes it for a name, and no shell takes it for more than a word.
Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.,:+@/-]*$", max_length=200)]
Nodes = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.,\[\]-]*$", max_length=4000)]
Folder = Annotated[str, Field(pattern=r"^/[^\x00-\x1f\x7f]*$", max_length=4000)]
Argument = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$", max_length=4000)]
SiteCount = Annotated[int, Field(gt=0, le=100_000)]
# An option that stands in a script without quotes.
Option = Annotated[
    str, Field(pattern=r"^--?[A-Za-z][A-Za-z0-9-]*([= ][A-Za-z0-9_.,:+@/%=\[\]-]+)?$", max_length=400)
]
Module = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.,:+@/ -]*$", max_length=400)]
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=200)]
BindText = Annotated[
    str, Field(pattern=r"^/[^\x00-\x1f\x7f:]*(:/[^\x00-\x1f\x7f:]*)?(:r[ow])?$", max_length=4000)
]


class Bind(Frozen):
    """A folder or file of the nodes that a container sees."""

    host: str
    inside: str
    mode: Literal["ro", "rw"] = "ro"


class Site(Frozen):
    """One cluster: what stands there, and what a job must say to get it."""

    scheduler: Identifier
    """Module of `execution/schedulers`: `slurm`, `gridengine`, `pbs`, `skypilot`."""
    engine: Identifier = "venv"
    """How the stack runs on a node."""
    launcher: Identifier = "torchrun"
    """Who starts the ranks where `--launcher` does not say: `torchrun`, `srun` or `mpirun`."""
    vendor: Identifier
    """Folder of images/vendors/."""
    gpu: Identifier | None = None
    """Row of images/gpus.toml; none for a processor."""
    nodes: SiteCount
    """The most that one job gets."""
    devices_per_node: SiteCount
    """Ranks of a node."""
    cores_per_node: SiteCount
    """Cores of a node that jobs may use."""
    cores_per_rank: SiteCount | None = None
    """Cores of each rank; `cores_per_node` divided by `devices_per_node` when left out."""
    memory_gib: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    """Memory that a job asks for on each node, 0 for all; left out, the partition's default holds."""
    exclusive: bool = False
    """Whether a job gets its nodes for itself."""
    partition: Word | None = None
    account: Word | None = None
    qos: Word | None = None
    minutes: SiteCount = 60
    """Time limit of each point."""
    gres: Word | None = None
    """Generic resource that a device is, without its count: `gpu` or `gpu:h100`."""
    devices_by: Literal["gres", "gpus-per-node", "whole-node"] = "gres"
    """How a job asks for its devices; `whole-node` where nodes come with all they have."""
    constraint: Word | None = None
    """Feature that the nodes must have."""
    parallel_environment: Word | None = None
    """Environment of Grid Engine whose allocation rule is the number of ranks of a node."""
    options: tuple[Option, ...] = ()
    """Further options of the scheduler, one a line, for example `--network=disable_rdzv_get`."""
    modules: tuple[Module, ...] = ()
    """Arguments of `module load`, one call each."""
    setup: tuple[Argument, ...] = ()
    """Lines for bash, after the modules and before the ranks start; the first that fails ends the job."""
    environment: dict[VariableName, Argument] = Field(default_factory=dict)
    """Variables of every rank, inside containers as well."""
    binds: tuple[BindText, ...] = ()
    """What containers see beside the folders of a run: `HOST`, `HOST:INSIDE` or `HOST:INSIDE:rw`."""
    infiniband: bool = False
    """Whether nodes have InfiniBand: containers get its devices, and may lock memory without limit."""
    groups: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Numbers of the groups of the device files, for pods; the script of a job reads them on its node."""
    exclude: tuple[Nodes, ...] = ()
    """Nodes that no job is to run on."""
    requeue: bool = False
    """A point starts over where its nodes are taken away or die."""
    signal_seconds: Annotated[int, Field(ge=0, le=3600)] = 0
    """How long before the time limit ranks are told to end; 0 leaves it to the scheduler."""
    watchdog_seconds: Annotated[float, Field(gt=0, le=86_400)] | None = None
    """How long a rank may make no progress before it is killed; learned from its steps when left out."""
    sniff_steps: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Steps of a training between two sniff tests, which name a slow rank; 0 for none."""
    interfaces: tuple[Word, ...] = ()
    """Network interfaces for the collectives; found on the nodes when left out."""
    network_gbit_s: Annotated[float, Field(gt=0)] | None = None
    """What a node sends, all its adapters together: predictions of several nodes need it."""
    volumes: dict[Folder, Argument] = Field(default_factory=dict)
    """For SkyPilot, what is mounted at a path of `shared`: a volume's name, or the address of a bucket."""
    shared: tuple[Folder, ...]
    """Folders that all nodes and this machine see under the same path."""
    client: tuple[Argument, ...] = ()
    """Words before each command of the scheduler, where this machine has none; they add no shell."""
    poll_seconds: Annotated[float, Field(gt=0, le=600)] = 2.0

    @model_validator(mode="after")
    def _whole_cores(self) -> Site:
        cores, ranks = self.cores_per_node, self.devices_per_node
        if self.cores_per_rank is None and cores >= ranks and cores % ranks:
            raise ValueError(
                f"{cores} cores do not divide over {ranks} devices: set `cores_per_rank`,"
                f" for example {cores // ranks}"
            )
        if (self.cores_per_rank or 1) * ranks > max(cores, ranks):
            raise ValueError(f"{ranks} ranks of {self.cores_per_rank} cores need more than {cores}")
        return self

    @property
    def rank_cores(self) -> int:
        """Cores of each rank."""
        return self.cores_per_rank or max(1, self.cores_per_node // self.devices_per_node)

    @property
    def bound(self) -> tuple[Bind, ...]:
        """`binds`, taken apart."""
        found = []
        for text in self.binds:
            writes = text.endswith(":rw")
            host, _, inside = text.removesuffix(":rw").removesuffix(":ro").partition(":")
            found.append(Bind(host=host, inside=inside or host, mode="rw" if writes else "ro"))
        return tuple(found)


class SiteGpu(Gpu):
    """A GPU that images/gpus.toml does not have: it is known by its name, and is one device a card."""

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, row: dict[str, object]) -> dict[str, object]:
        return {"match": (re.escape(str(row.get("name", ""))),), "devices_per_card": 1, **row}


class ClusterTable(Frozen):
    """cluster.toml."""

    site: dict[Identifier, Site] = Field(default_factory=dict)
    gpu: tuple[SiteGpu, ...] = ()
    """Rows beside those of images/gpus.toml."""


class LoadedSite(Frozen):
    """A site with where it was read."""

    name: str
    place: str
    """`FILE:site.NAME`, for messages about one of its keys."""
    site: Site


def load_site(root: Path, name: str) -> LoadedSite:
    """Return the site called `name`.

    Raises:
        InputError: no such site, or a file that does not hold.
    """
    tables = {file: load_toml(file, ClusterTable).site for file in site_files(root)}
    for file, sites in tables.items():
        if name in sites:
            return LoadedSite(name=name, place=f"{file}:site.{name}", site=sites[name])
    known = sorted({site for sites in tables.values() for site in sites})
    hint = closest(name, known) or "`invoke cluster up` makes `local`; cluster.toml has the others"
    raise InputError("unknown site", place="--cluster", found=name, allowed=known, hint=hint)


def known_gpus(root: Path) -> dict[str, Gpu]:
    """Return the rows of `root/images/gpus.toml` and those of the user's files of sites, by identifier."""
    own = {one.id: one for file in site_files(root) for one in load_toml(file, ClusterTable).gpu}
    return load_gpus(root) | own


def site_files(root: Path) -> list[Path]:
    """Return the files of sites: $TWINRUN_CLUSTER, that of the checkout, the cluster of this machine."""
    own = os.environ.get("TWINRUN_CLUSTER")
    places = (*([Path(own)] if own else []), root / FILE, local_folder() / FILE)
    return [file for file in places if file.is_file()]


def local_folder() -> Path:
    """Return the folder of the cluster that `invoke cluster up` starts."""
    return cache_root() / "clusters" / LOCAL
