"""GPUs of a node: how many, which, and how they are connected."""

from __future__ import annotations

import os
import re
from pathlib import Path

from clocks import clocks_under_load

from twinrun.protocol.checks import ChecksJob
from twinrun.train.checks import CheckError, UndecidedError

PCI = Path("/sys/bus/pci/devices")
STATUS = Path("/proc/self/status")
# Display controllers and processing accelerators.
CLASSES = ("0x03", "0x12")


def enumerate_gpus(job: ChecksJob) -> str:
    """Open every GPU that the ranks of this node need, and say their clocks while all of them work."""
    import torch  # noqa: PLC0415 - only in the check's own process

    if not job.accelerator:
        raise UndecidedError("this run uses no GPU", remedy="run it at node scale on a machine with GPUs")
    needed, found = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if found < needed:
        raise CheckError(
            f"{found} GPUs are seen, {needed} needed", remedy="see the kernel's log, reseat or reboot"
        )
    for index in range(found):
        torch.ones(1, device=f"cuda:{index}").sum().item()
    models = {torch.cuda.get_device_name(index) for index in range(found)}
    if len(models) > 1:
        raise CheckError(f"GPUs of several models: {', '.join(sorted(models))}", remedy="exclude the node")
    return clocks_under_load(job.power, found)


def network_topology(job: ChecksJob) -> None:
    """Hold the width of each GPU's PCIe link against what it can have, and ask who reaches whom."""
    narrow, counted = narrow_links(PCI)
    if narrow:
        raise CheckError(
            f"PCIe links below their width: {', '.join(narrow)}", remedy="reseat the card or riser"
        )
    if not job.accelerator or not counted:
        raise UndecidedError(
            "no GPU with a PCIe link is used", remedy="run it at node scale on a machine with GPUs"
        )
    import torch  # noqa: PLC0415

    own = torch.cuda.get_device_properties(int(os.environ.get("LOCAL_RANK", "0")))
    # Newer PyTorch alone says where a GPU is.
    if hasattr(own, "pci_bus_id"):
        address = f"{own.pci_domain_id:04x}:{own.pci_bus_id:02x}:{own.pci_device_id:02x}.0"
        if distant := distant_memory(PCI / address, STATUS):
            raise CheckError(
                distant, remedy="bind the rank to its GPU's NUMA node, as numactl --membind does"
            )
    count = torch.cuda.device_count()
    apart = [
        f"{one} and {other}"
        for one in range(count)
        for other in range(count)
        if one != other and not torch.cuda.can_device_access_peer(one, other)
    ]
    if apart:
        raise CheckError(
            f"GPUs that do not reach each other: {', '.join(apart)}", remedy="see IOMMU and ACS settings"
        )


def narrow_links(folder: Path) -> tuple[list[str], int]:
    """Return the GPUs whose link is narrower than it can be, and how many GPUs have a link."""
    narrow, counted = [], 0
    for device in sorted(folder.glob("*")):
        if not _read(device / "class").startswith(CLASSES):
            continue
        now, most = (_read(device / f"{name}_link_width") for name in ("current", "max"))
        if most.isdecimal() and now.isdecimal() and int(most):
            counted += 1
            if int(now) < int(most):
                narrow.append(f"{device.name} x{now} of x{most}")
    return narrow, counted


def distant_memory(device: Path, status: Path) -> str:
    """Say where the memory of a GPU's NUMA node is not this process's to use; nothing where it is.

    On a GPU that shares its memory with a processor, every page then lies on another die.
    """
    node = _read(device / "numa_node")
    allowed = re.search(r"^Mems_allowed_list:\s*(\S+)", _read(status), re.MULTILINE)
    if not node.isdecimal() or allowed is None:
        return ""
    ranges = [tuple(map(int, part.split("-"))) for part in allowed[1].split(",")]
    if any(one[0] <= int(node) <= one[-1] for one in ranges):
        return ""
    return f"{device.name} has NUMA node {node}, and this process may use memory of {allowed[1]} alone"


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
