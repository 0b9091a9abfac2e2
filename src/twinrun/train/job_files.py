"""The files between host and ranks: job in; the rank and its node, metrics and one result out.

Imports without torch.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import socket
import struct
import sys
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from twinrun.foundation.files import write_atomically
from twinrun.foundation.redaction import cleaned
from twinrun.protocol.allocation import IMAGE_VARIABLE, Binding, Interface, NodeReport, RankReport
from twinrun.protocol.job import STOPPED_FILE, Job, Result, Stop
from twinrun.protocol.metrics_lines import forget

AnyJob = TypeVar("AnyJob", bound=Job)


def job_argument() -> Path:
    """Return the file of the job that the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", type=Path, required=True, help="JSON file that describes the point")
    file: Path = parser.parse_args().job
    return file


# Says that ranks have begun an attempt, and may have written lines.
STARTED_FILE = "started"


def report_rank(job: Job, *, binding: Binding | None = None, forked_from: int | None = None) -> None:
    """Say which machine, cores and process this rank runs on; the first of a node says what it is."""
    choose_interface()
    node = None if rank_variable("LOCAL_RANK", 0) else describe_node()
    report = RankReport(
        rank=rank_variable("RANK", 0),
        host=platform.node(),
        node=node,
        binding=binding,
        process=os.getpid(),
        forked_from=forked_from,
    )
    _write(Path(job.out) / "ranks" / f"{report.rank}.json", report)


def append_line(job: Job, line: BaseModel) -> None:
    """Append a line to the job's metrics; for the first rank."""
    with Path(job.metrics).open("a", encoding="utf-8") as stream:
        stream.write(line.model_dump_json() + "\n")


def write_result(job: Job, result: Result) -> None:
    """Write the result of the job; for the first rank."""
    _write(Path(job.out) / "result.json", result)


def _write(path: Path, content: BaseModel) -> None:
    """Write what becomes part of a record, in whose texts no credential of this node's environment stays."""
    write_atomically(path, json.dumps(cleaned(content.model_dump(mode="json")), indent=1) + "\n")


def start_over(job: Job) -> None:
    """Take away what an earlier start of this attempt has said; for the first rank."""
    (Path(job.out) / STOPPED_FILE).unlink(missing_ok=True)
    started = Path(job.out) / STARTED_FILE
    if started.exists():
        forget(Path(job.metrics), job.point)
    else:
        write_atomically(started, "")


def write_stop(job: Job, step: int) -> None:
    """Say that all is saved up to `step`; for the first rank."""
    write_atomically(Path(job.out) / STOPPED_FILE, Stop(step=step).model_dump_json() + "\n")


def rank_variable(name: str, default: int) -> int:
    """Return what the launcher says of this rank, for example `LOCAL_RANK`."""
    return int(os.environ.get(name, default))


# Gloo takes the first; NCCL, and RCCL after it, the second.
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_TRANSPORT = re.compile(r"^(NCCL|RCCL|GLOO|UCX|OMPI_MCA|FI)_")
_SECRET = re.compile(r"TOKEN|SECRET|PASS|KEY|CREDENTIAL|AUTH", re.IGNORECASE)
_GET_ADDRESS = 0x8915
_NET = Path("/sys/class/net")
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
    found = {name: _address(name) for _, name in socket.if_nameindex()}
    return tuple(
        Interface(
            name=name, address=address, mtu=_number(name, "mtu") or 0, speed_mbit=_number(name, "speed")
        )
        for name, address in found.items()
        if address
    )


def describe_node() -> NodeReport:
    """Return what this node is."""
    return NodeReport(
        cpu=_cpu(),
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


def software_digest() -> str:
    """Return a digest over the interpreter and everything that it can import as a package."""
    packages = {f"{one.metadata['Name']}=={one.version}" for one in importlib.metadata.distributions()}
    lines = "\n".join([platform.python_version(), *sorted(packages)])
    return hashlib.sha256(lines.encode()).hexdigest()


def _address(name: str) -> str | None:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return None


def _number(name: str, fact: str) -> int | None:
    """Return a figure of an interface; one that is down or virtual has no speed, or a negative one."""
    with contextlib.suppress(OSError, ValueError):
        figure = int((_NET / name / fact).read_text(encoding="ascii"))
        return figure if figure >= 0 else None
    return None


def _cpu() -> str:
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        if found := re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE):
            return found[1].strip()
    return platform.machine()


def _devices() -> tuple[str, ...]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return ()
    return tuple(str(torch.cuda.get_device_name(index)) for index in range(torch.cuda.device_count()))


def _driver() -> str | None:
    for file in _DRIVERS:
        with contextlib.suppress(OSError):
            text = file.read_text(encoding="utf-8", errors="replace")
            if found := re.search(r"\d+\.\d+(?:\.\d+)*", text):
                return found[0]
    return None
