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
from pathlib import Path

import psutil

from twinrun.protocol.allocation import IMAGE_VARIABLE, Interface, NodeDevice, NodeReport

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
    return NodeReport(
        cpu=processor(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        kernel=platform.release(),
        devices=_devices(),
        driver=_driver(),
        interfaces=interfaces(),
        transport={
            name: value
            for name, value in sorted(os.environ.items())
            if _TRANSPORT.match(name) and not _SECRET.search(name)
        },
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
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return tuple(
        NodeDevice(
            name=str(one.name),
            # On the one side a name with switches behind it, on the other two numbers.
            arch=one.gcnArchName.partition(":")[0] if torch.version.hip else f"sm_{one.major}{one.minor}",
            memory_bytes=int(one.total_memory),
        )
        for one in found
    )


def _driver() -> str | None:
    for file in _DRIVERS:
        with contextlib.suppress(OSError):
            text = file.read_text(encoding="utf-8", errors="replace")
            if found := re.search(r"\d+\.\d+(?:\.\d+)*", text):
                return found[0]
    return None
