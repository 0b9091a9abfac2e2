"""What the node of a rank is, and by which interface it reaches the others. Imports without torch."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import re
import socket
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil

from twinrun.protocol.allocation import IMAGE_VARIABLE, Binding, Interface, NodeDevice, NodeReport

# Gloo takes the first; NCCL, and RCCL after it, the second.
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_TRANSPORT = re.compile(r"^(NCCL|RCCL|GLOO|UCX|OMPI_MCA|FI)_")
_SECRET = re.compile(r"TOKEN|SECRET|PASS|KEY|CREDENTIAL|AUTH", re.IGNORECASE)
_DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version"))


def choose_interface() -> None:
    """Name the interface that leads to the first node to the collectives, where nobody did.

    They take the one that the host's name resolves to, which may be the loopback or a management network.
    """
    first, ranks = os.environ.get("MASTER_ADDR"), int(os.environ.get("WORLD_SIZE", "1"))
    if first is None or ranks == int(os.environ.get("LOCAL_WORLD_SIZE", ranks)):
        return
    name = interface_to(first, interfaces())
    for variable in INTERFACE_VARIABLES if name else ():
        os.environ.setdefault(variable, name or "")


def interface_to(host: str, known: tuple[Interface, ...]) -> str | None:
    """Return the interface whose address this node has towards `host`; None for the loopback."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket sends nothing: the kernel only chooses the route.
        probe.connect((host, 9))
        own = str(probe.getsockname()[0])
        return next((one.name for one in known if one.address == own and one.name != "lo"), None)
    return None


def interfaces() -> tuple[Interface, ...]:
    """Return the interfaces of this node that have an IPv4 address."""
    stats = psutil.net_if_stats()
    return tuple(
        # One that is down or virtual has no speed.
        Interface(name=name, address=one.address, mtu=stats[name].mtu, speed_mbit=stats[name].speed or None)
        for name, addresses in psutil.net_if_addrs().items()
        for one in addresses
        if one.family == socket.AF_INET and name in stats
    )


def describe() -> NodeReport:
    """Return what this node is."""
    transport = filter(_TRANSPORT.match, sorted(os.environ))
    return NodeReport(
        cpu=processor(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        kernel=platform.release(),
        devices=_devices(),
        driver=_driver(),
        interfaces=interfaces(),
        transport={name: os.environ[name] for name in transport if not _SECRET.search(name)},
        software_sha256=software_digest(),
        image=os.environ.get(IMAGE_VARIABLE),
    )


def processor() -> str:
    """Return the model name of the processor."""
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        if found := re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE):
            return found[1].strip()
    return platform.machine()


def software_digest() -> str:
    """Return a digest over the interpreter and everything that it can import as a package."""
    packages = {f"{one.metadata['Name']}=={one.version}" for one in importlib.metadata.distributions()}
    lines = "\n".join([platform.python_version(), *sorted(packages)])
    return hashlib.sha256(lines.encode()).hexdigest()


def _devices() -> tuple[NodeDevice, ...]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return ()
    found = []
    for one in map(torch.cuda.get_device_properties, range(torch.cuda.device_count())):
        # On the one side a name with switches behind it, on the other two numbers.
        arch = one.gcnArchName.partition(":")[0] if torch.version.hip else f"sm_{one.major}{one.minor}"
        found.append(NodeDevice(name=str(one.name), arch=arch, memory_bytes=int(one.total_memory)))
    return tuple(found)


def _driver() -> str | None:
    for file in _DRIVERS:
        with contextlib.suppress(OSError):
            text = file.read_text(encoding="utf-8", errors="replace")
            if found := re.search(r"\d+\.\d+(?:\.\d+)*", text):
                return found[0]
    return None


# Each rank on the cores beside its device: the PCI address leads to them in sysfs, whoever made the device.
SYSFS, _DEVICES = Path("/sys"), "bus/pci/devices"


def bind(
    local: int, ranks: int, *, address_of: Callable[[int], str | None], sysfs: Path = SYSFS
) -> Binding | None:
    """Bind this process to its share of the cores beside its device, of those that it may use.

    Ranks whose devices lie beside the same cores share them in the order of their devices, whole cores each.

    Args:
        local: number of this process among the `ranks` of its node.
        address_of: returns the PCI address of a device of this node by its number.

    Returns:
        What was done, None where there is no device or its address is not known.
    """
    addresses = [address_of(number) for number in range(ranks)]
    own = addresses[local] if local < len(addresses) else None
    if own is None:
        return None
    beside = {address: _beside(address, sysfs) for address in addresses if address}
    numa = _text(sysfs / _DEVICES / own / "numa_node")
    allowed = os.sched_getaffinity(0)
    # Where a machine has one node, the kernel may say -1.
    known = int(numa) if numa and numa.lstrip("-").isdecimal() else None
    place: dict[str, Any] = {"address": own, "numa_node": known}
    near = beside[own] & allowed
    if not near:
        return Binding(**place, cores=cpu_list(allowed), bound=False)
    sharers = [number for number, one in enumerate(addresses) if one and beside[one] == beside[own]]
    share = _share(near, sharers.index(local), len(sharers), sysfs)
    os.sched_setaffinity(0, share)
    return Binding(**place, cores=cpu_list(share), bound=True)


def _share(processors: Iterable[int], place: int, sharers: int, sysfs: Path) -> set[int]:
    """Return the processors of one of `sharers` equal parts, which never cut a core of several threads."""
    cores: dict[str, list[int]] = {}
    for number in sorted(processors):
        topology = sysfs / "devices" / "system" / "cpu" / f"cpu{number}" / "topology"
        siblings = _text(topology / "thread_siblings_list") or str(number)
        cores.setdefault(siblings, []).append(number)
    whole = list(cores.values())
    if len(whole) < sharers:
        return {number for core in whole for number in core}
    first, last = len(whole) * place // sharers, len(whole) * (place + 1) // sharers
    return {number for core in whole[first:last] for number in core}


def _beside(address: str, sysfs: Path) -> frozenset[int]:
    """Return the processors beside a device, none where the kernel does not say."""
    return frozenset(parse_cpu_list(_text(sysfs / _DEVICES / address / "local_cpulist") or ""))


def parse_cpu_list(text: str) -> set[int]:
    """Return the numbers of a list as the kernel writes it, for example `0-3,8`."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def cpu_list(numbers: Iterable[int]) -> str:
    """Return numbers as the kernel writes such a list."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _text(file: Path) -> str | None:
    try:
        return file.read_text(encoding="ascii").strip()
    except OSError:
        return None
