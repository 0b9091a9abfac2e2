"""GPU models, vendors and their probes as data: `images/gpus.toml` and `images/vendors/`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from twinrun.foundation.errors import InputError, require_equal, require_known
from twinrun.foundation.manifest import Frozen, load_toml

PositiveNumber = Annotated[float, Field(gt=0)]
Identifier = Annotated[str, Field(pattern=r"^[a-z0-9]+([.-][a-z0-9]+)*$")]


class Probe(Frozen):
    """How a machine is asked for devices: through NVML, a library of the driver, or the kernel's files."""

    name: str
    timeout_s: Annotated[float, Field(gt=0)] = 30
    folders: str | None = None
    """Shell pattern of the kernel's folders of devices; null where the library is asked."""
    parts: tuple[str, ...] = ()
    """Files to read in each folder, with lines of a key and a number."""
    where: dict[str, re.Pattern[str]] = Field(default_factory=dict)
    """What those lines must match to be of a device."""
    driver_file: str | None = None
    """File that holds the driver's version."""


class Gpu(Frozen):
    """A GPU model; figures are of a card, which may be several devices."""

    id: Identifier
    name: str
    vendor: str
    """Folder of images/vendors/."""
    arch: str
    """Name that the vendor's compiler uses."""
    match: tuple[re.Pattern[str], ...]
    """Expressions, one of which is found in the name that a probe prints."""
    devices_per_card: Annotated[int, Field(gt=0)]
    """Devices the framework sees of one card."""
    compute_units: int | None = None
    """Compute units of a device, where they tell models of one name apart."""
    memory_gb: PositiveNumber
    bandwidth_gb_s: PositiveNumber
    peak_bf16_tflops: PositiveNumber
    """Dense."""
    peak_fp32_tflops: PositiveNumber | None = None
    """Rate of the vector units; a multiply-add is two. Null in records from before bounds were held."""
    exp2_per_fma: PositiveNumber | None = None
    """Rate of exponentials over that of multiply-adds of the vector units."""
    fp8: bool = False
    """Whether its matrix units multiply fp8, of either kind."""
    fp4_over_bf16: PositiveNumber | None = None
    """Dense peak of four bits over that of bf16; null where its matrix units have none."""
    link_gb_s: PositiveNumber | None = None
    """Rate of a device to the others of its node by all links, in one direction, as its data sheet says."""
    power_w: PositiveNumber | None = None
    """Most that a card draws, as its data sheet says."""
    clock_mhz: PositiveNumber | None = None
    """Peak engine clock; under load a power limit may keep it lower."""
    source: str

    @property
    def device_memory_bytes(self) -> int:
        """Nominal memory of a device; a probe finds up to 7 % more."""
        return int(self.memory_gb * 1e9 / self.devices_per_card)

    @property
    def device_bandwidth_bytes_s(self) -> float:
        """Peak memory bandwidth of a device, in bytes per second."""
        return self.bandwidth_gb_s * 1e9 / self.devices_per_card

    @property
    def device_peak_flops(self) -> float:
        """Dense BF16 peak of a device, in FLOP per second."""
        return self.peak_bf16_tflops * 1e12 / self.devices_per_card

    def rate_of(self, resource: str) -> float | None:
        """Return what a device does of a resource in a second at most; None where nobody says it.

        Args:
            resource: as benchmarks call it: `copy` is bytes, the others are operations.
        """
        fma = self.peak_fp32_tflops and self.peak_fp32_tflops * 1e12 / 2 / self.devices_per_card
        rates = {
            "copy": self.device_bandwidth_bytes_s,
            "fp32": fma,
            "exp2": fma and self.exp2_per_fma and fma * self.exp2_per_fma,
            "fp16-products": self.device_peak_flops,
            "bf16-products": self.device_peak_flops,
        }
        return rates.get(resource)


class GpuTable(Frozen):
    """images/gpus.toml."""

    gpu: tuple[Gpu, ...]


class ContainerAccess(Frozen):
    """What a container is given so that it can use the devices, without privileges."""

    devices: tuple[str, ...] = ()
    """Device files or folders of the host."""
    groups_of: tuple[str, ...] = ()
    """Patterns of files whose numeric groups the container's user joins."""
    driver: str | None = None
    """Device driver of the container engine, asked for all devices."""
    capabilities: tuple[str, ...] = ()
    resource: str | None = None
    """Kind of the devices as the container device interface names them, for Podman."""
    apptainer: tuple[str, ...] = ()
    """Options with which Apptainer passes the devices on."""
    enroot: dict[str, str] = Field(default_factory=dict)
    """Variables on which Enroot, under Pyxis, passes the devices on."""


class Compatibility(Frozen):
    """Which devices beside those of its own architecture run compiled code."""

    built: re.Pattern[str]
    """Architectures it holds for; the two groups are the major and the minor version."""
    rule: Literal["same", "same-major", "no-lower"]
    """Versions of devices that run it: the same, the same major and no lower minor, or no lower ones."""


class Advice(Frozen):
    """A setting that the vendor advises for a machine or a run, and what it changes."""

    name: str
    file: str | None = None
    """File of the machine that holds the setting; of a machine without it nothing is said."""
    variable: str | None = None
    """Environment variable; one that is not set is named, and no fault."""
    wanted: re.Pattern[str]
    """Expression that is found in the advised value."""
    gpus: re.Pattern[str] = re.compile("")
    """Expression that is found in the rows of gpus.toml that it is for."""
    changes: str
    hint: str
    source: str


class DriverNeed(Frozen):
    """The oldest driver that stacks need."""

    stacks: re.Pattern[str]
    """Expression that the whole name of a stack matches."""
    least: Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)*$")]
    source: str


class Vendor(Frozen):
    """images/vendors/<name>/vendor.toml: all that differs between vendors."""

    name: Identifier
    title: str
    backend: str
    """Backend of torch.distributed."""
    hidden_by: tuple[tuple[str, ...], ...] = ()
    """Variables that hide devices, applied in order; of a group only the first that is set."""
    device_files: tuple[str, ...] = ()
    """Patterns of the files that must be there, and that a user must be able to open."""
    later_device_files: tuple[str, ...] = ()
    """Patterns of further ones, which the driver makes when they are first needed."""
    other_device_files: tuple[str, ...] = ()
    """Patterns of files of which one stands for all of `device_files` where these are missing."""
    undivide: str | None = None
    """Command by which a card that is divided into several devices becomes one again."""
    driver: tuple[DriverNeed, ...] = ()
    advice: tuple[Advice, ...] = ()
    """What `invoke doctor` looks at on a machine with the vendor's driver."""
    container: ContainerAccess = ContainerAccess()
    arch_names: dict[str, str] = Field(default_factory=dict)
    """Spellings of architectures in probes, by the compiler's names."""
    runs_on: tuple[Compatibility, ...] = ()
    """Without an entry that fits, code runs on the architecture it was compiled for and no other."""
    probe: Probe | None = None
    """Null for the processor, which every machine has."""


def load_gpus(root: Path) -> dict[str, Gpu]:
    """Read `root/images/gpus.toml`, by identifier."""
    path = root / "images" / "gpus.toml"
    gpus: dict[str, Gpu] = {}
    folders = _vendor_folders(root)
    for number, gpu in enumerate(load_toml(path, GpuTable).gpu):
        if gpu.id in gpus:
            raise InputError("given twice", place=f"{path}:gpu.{number}.id", found=gpu.id)
        require_known(gpu.vendor, folders, "no such vendor", place=f"{path}:gpu.{number}.vendor")
        gpus[gpu.id] = gpu
    return gpus


def load_vendors(root: Path) -> dict[str, Vendor]:
    """Read every folder of `root/images/vendors`; a broken one is an InputError, never skipped."""
    vendors = {}
    for name, folder in _vendor_folders(root).items():
        path = folder / "vendor.toml"
        vendors[name] = load_toml(path, Vendor)
        require_equal(vendors[name].name, name, "the name is not the folder's", place=f"{path}:name")
    return vendors


def require_vendor(name: str, vendors: Mapping[str, Vendor]) -> None:
    """Raise InputError for an unknown vendor; a word of a title, as of its maker, leads to the vendor."""
    titles = {one.name: one.title.lower().replace(",", " ") for one in vendors.values()}
    also = {word: vendor for vendor, title in titles.items() for word in title.split()}
    require_known(name, vendors, "unknown vendor", place="--vendor", also=also)


def _vendor_folders(root: Path) -> dict[str, Path]:
    base = root / "images" / "vendors"
    if not base.is_dir():
        raise InputError("no such folder", place=str(base), hint="run twinrun from its checkout")
    return {folder.name: folder for folder in sorted(base.iterdir()) if folder.is_dir()}
