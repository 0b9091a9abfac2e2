"""cluster.toml: what the sites of a user have; each is a table `[site.NAME]`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from twinrun.foundation.cache import cache_root
from twinrun.foundation.errors import InputError, closest
from twinrun.foundation.manifest import Frozen, load_toml
from twinrun.manifests.vendor import Identifier

FILE = "cluster.toml"
# The site that `invoke cluster up` makes, in a file of its own.
LOCAL = "local"
# Slurm takes this for a name, and a shell for nothing but a word.
Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.,:+@-]*$", max_length=200)]
Nodes = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.,\[\]-]*$", max_length=4000)]
Folder = Annotated[str, Field(pattern=r"^/[^\x00-\x1f\x7f]*$", max_length=4000)]
Argument = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$", max_length=4000)]
SiteCount = Annotated[int, Field(gt=0, le=100_000)]


class Site(Frozen):
    """One cluster: what stands there, and what a job must say to get it."""

    scheduler: Literal["slurm", "kubernetes"]
    engine: Identifier = "venv"
    """How the stack runs on a node."""
    vendor: Identifier
    """Folder of images/vendors/."""
    gpu: Identifier | None = None
    """Row of images/gpus.toml; none for a processor."""
    nodes: SiteCount
    """The most that one job gets."""
    devices_per_node: SiteCount
    """Ranks of a node."""
    cores_per_node: SiteCount
    partition: Word | None = None
    account: Word | None = None
    qos: Word | None = None
    minutes: SiteCount = 60
    """Time limit of each point."""
    gres: Word | None = None
    """Generic resource that a device is, without its count: `gpu` or `gpu:h100`."""
    exclude: tuple[Nodes, ...] = ()
    """Nodes that no job is to run on."""
    requeue: bool = False
    """A point starts over where its nodes are taken away or die."""
    signal_seconds: Annotated[int, Field(ge=0, le=3600)] = 0
    """How long before the time limit ranks are told to end; 0 leaves it to the scheduler."""
    watchdog_seconds: Annotated[float, Field(gt=0, le=86_400)] | None = None
    """How long a rank may make no progress before it is killed; learned from its steps when left out."""
    interfaces: tuple[Word, ...] = ()
    """Network interfaces for the collectives; found on the nodes when left out."""
    network_gbit_s: Annotated[float, Field(gt=0)] | None = None
    """What a node sends, all its adapters together: predictions of several nodes need it."""
    shared: tuple[Folder, ...]
    """Folders that all nodes and this machine see under the same path."""
    client: tuple[Argument, ...] = ()
    """Words before each command of the scheduler, where this machine has none; they add no shell."""
    poll_seconds: Annotated[float, Field(gt=0, le=600)] = 2.0


class ClusterTable(Frozen):
    """cluster.toml."""

    site: dict[Identifier, Site]


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
    files = [file for file in site_files(root) if file.is_file()]
    tables = {file: load_toml(file, ClusterTable).site for file in files}
    for file, sites in tables.items():
        if name in sites:
            return LoadedSite(name=name, place=f"{file}:site.{name}", site=sites[name])
    known = sorted({site for sites in tables.values() for site in sites})
    hint = closest(name, known) or "`invoke cluster up` makes `local`; cluster.toml has the others"
    raise InputError("unknown site", place="--cluster", found=name, allowed=known, hint=hint)


def site_files(root: Path) -> tuple[Path, ...]:
    """Return where sites are looked for: $TWINRUN_CLUSTER, the checkout, the cluster of this machine."""
    own = os.environ.get("TWINRUN_CLUSTER")
    return (*([Path(own)] if own else []), root / FILE, local_folder() / FILE)


def local_folder() -> Path:
    """Return the folder of the cluster that `invoke cluster up` starts."""
    return cache_root() / "clusters" / LOCAL
