"""The machines that ranks ran on, which need not be the one that started them, and the state of the code."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from twinrun.foundation.manifest import Frozen

# Where a node tells its ranks which image they run in.
IMAGE_VARIABLE = "TWINRUN_IMAGE"
# Folder of a point in which ranks say what they had loaded.
LOADED = "loaded"


# Names of points are parts of paths: one name of a file system, which neither hides nor leads elsewhere.
PointId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._=@,+-]*$", max_length=120)]


class Placement(Frozen):
    """Where the ranks of something go, one rank a device."""

    id: PointId
    nodes: Annotated[int, Field(gt=0)]
    devices_per_node: Annotated[int, Field(gt=0)]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.nodes * self.devices_per_node


class Interface(Frozen):
    """A network interface of a node."""

    name: str
    address: str
    """IPv4."""
    mtu: int
    speed_mbit: int | None
    """None where the driver does not say."""


class NodeDevice(Frozen):
    """A device as the framework of a rank sees it."""

    name: str
    """What the framework calls it, which is a hint: some call every model the same."""
    arch: str | None = None
    """Name that the vendor's compiler uses; null in older reports."""
    memory_bytes: Annotated[int, Field(gt=0)] | None = None


class NodeReport(Frozen):
    """What a node is, as its first rank found it; by default what is known of one that did not report."""

    cpu: str = "an unknown processor"
    cores: int = 0
    """Processors that the rank may run on."""
    memory_bytes: int = 0
    kernel: str = ""
    devices: tuple[NodeDevice, ...] = ()
    """The GPUs that the rank sees."""
    driver: str | None = None
    interfaces: tuple[Interface, ...] = ()
    transport: dict[str, str] = Field(default_factory=dict)
    """Variables that choose interfaces and transports of the collectives, as set when the rank started."""
    software_sha256: str = ""
    """Digest over the interpreter's version, and name and version of every package that it finds."""
    image: str | None = None
    """ID that the node's engine has for the image; null without one, and where one machine is all."""


class Binding(Frozen):
    """Where a rank runs on its node, beside its device."""

    address: str
    """PCI address of the device."""
    numa_node: int | None
    """Memory node that the kernel has the device at; -1 where the machine has one."""
    cores: str
    """Processors that the rank may run on, as the kernel lists them: `48-55`."""
    bound: bool
    """Whether the rank chose them; false where none beside the device may be used."""


class Allocation(Frozen):
    """What a scheduler gave to one start."""

    scheduler: str
    nodes: Annotated[tuple[str, ...], Field(min_length=1)]
    """Host names in the order of their first ranks."""
    site: str | None = None
    """Name in cluster.toml; null for this machine."""
    reports: dict[str, NodeReport] = Field(default_factory=dict)
    """By host name; empty in records from before nodes were asked."""
    network: str | None = None
    """What was measured at the site against the network that it declares; null where nothing was."""
    bindings: tuple[Binding | None, ...] = ()
    """Cores that each rank keeps to, in their order; null without a device, empty in older records."""


class RankReport(Frozen):
    """What each rank says of itself, in `ranks/<rank>.json` of the folder of its point."""

    rank: Annotated[int, Field(ge=0)]
    host: str
    """Name of the machine, as its kernel has it."""
    node: NodeReport | None = None
    """Report of its node; only the first rank of a node gives one."""
    binding: Binding | None = None
    """Cores that it runs on, null where no device says which are near."""
    process: int | None = None
    """Number of its process, in the container where there is one; null in older reports."""


class LoadedFiles(Frozen):
    """What the first rank of a node had loaded when its work was done, in `loaded/<rank>.json`."""

    host: str
    began: float
    """When the process was started, in seconds since 1970 by the clock of its machine."""
    ended: float
    files: dict[str, str]
    """SHA-256 of each module and native library of its environment, by path; of a large one, of its ends."""
    written: tuple[str, ...]
    """Those of them that were written after the process had started."""


class Device(Frozen):
    """What the framework sees as one GPU: a die, where a card has several."""

    index: int
    """Place in the probe's list, counted before any variable hides devices."""
    name: str
    """Name that the probe prints."""
    gpu: str | None
    """Row of images/gpus.toml; null for a model, or a part of one, that has no row."""
    arch: str | None
    memory_bytes: int | None
    unique_id: str | None
    driver: str | None


class Machine(Frozen):
    """One host, and the devices of one vendor on it."""

    vendor: str
    devices: tuple[Device, ...]
    driver: str | None
    host: str
    cpu: str
    cpu_count: int
    """Processors this process may run on."""
    memory_bytes: int
    kernel: str
    probe: str
    """Which probes were tried and what they answered."""


class Revision(Frozen):
    """The state of the project's own files."""

    commit: str | None
    changes_sha256: str | None
    """Digest of what ranks could import that the commit does not have; null when there is none."""
    tree: str | None = None
    """Digest of all that ranks could import; null in records from before it was kept."""
    unknown: str | None = None
    """Why git did not say what the commit has; null where it did."""
    changed: tuple[str, ...] = ()
    """Files of the copy that ranks import from, and of their environment, that were edited while they ran."""

    @property
    def is_clean(self) -> bool:
        """Whether the commit alone says what ran."""
        known = self.commit is not None and self.unknown is None
        return known and self.changes_sha256 is None and not self.changed
