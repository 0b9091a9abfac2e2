"""The nodes of the allocation: their names, their clocks and their interfaces."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

from peers import gathered, host, join, unlike

from twinrun.protocol.checks import ChecksJob
from twinrun.train.checks import CheckError, UndecidedError

NETWORK = Path("/sys/class/net")
BOOT = Path("/proc/sys/kernel/random/boot_id")
ROUTES = Path("/proc/net/route")
SKEW_SECONDS, CLOCK_ROUNDS = 1.0, 5


def enumerate_workers(job: ChecksJob) -> None:
    """Hold names, kernels and clocks of all ranks against each other."""
    device = join(job)
    hosts: dict[str, set[str]] = {}
    for name, boot in gathered([host(), BOOT.read_text().strip()], device):
        hosts.setdefault(name, set()).add(boot)
    twice = [name for name, boots in hosts.items() if len(boots) > 1]
    if twice:
        raise CheckError(
            f"two machines are called {', '.join(twice)}", remedy="give each its own name", nodes=twice
        )
    off = {name: by for name, by in clock_offsets(device).items() if abs(by) > SKEW_SECONDS}
    if off:
        shown = ", ".join(f"{name} by {value:+.1f} s" for name, value in off.items())
        raise CheckError(f"clocks are off: {shown}", remedy="start chrony or ntpd there", nodes=list(off))


def clock_offsets(device: Any) -> dict[str, float]:
    """Return by how many seconds each node's clock is off the middle one.

    The least of some rounds: a busy node may look at its clock late, but not always.
    """
    found: dict[str, float] = {}
    for _ in range(CLOCK_ROUNDS):
        # Ranks look when all have told the others what they saw before.
        clocks = dict(gathered([host(), clock()], device))
        middle = sorted(clocks.values())[(len(clocks) - 1) // 2]
        for name, value in clocks.items():
            found[name] = min(value - middle, found.get(name, math.inf), key=abs)
    return found


def network_interfaces(job: ChecksJob) -> None:
    """Hold the interface that each node's ranks use against those of its peers."""
    variable = variable_of(job)
    demand_interface(variable)
    device = join(job)
    answers = dict(gathered([host(), interface(variable)], device))
    unnamed = [name for name, one in answers.items() if not one["exists"]]
    if unnamed:
        raise UndecidedError(
            f"no default route on {', '.join(unnamed)}", remedy=f"name the interface in {variable}"
        )
    odd = unlike({name: one["mtu"] for name, one in answers.items()})
    if odd:
        shown = ", ".join(f"{name} has {mtu}" for name, mtu in odd.items())
        raise CheckError(
            f"the MTU differs from the peers': {shown}", remedy="ip link set DEV mtu", nodes=list(odd)
        )


def variable_of(job: ChecksJob) -> str:
    """Return the variable that tells the collectives of this run their interface."""
    return "NCCL_SOCKET_IFNAME" if job.accelerator else "GLOO_SOCKET_IFNAME"


def demand_interface(variable: str) -> None:
    """Raise CheckError where this node's interface is absent or down: nobody would hear it otherwise."""
    own, nodes = interface(variable), [host()]
    if own["name"] and not own["exists"]:
        raise CheckError(f"{host()} has no {own['name']}", remedy=f"correct {variable}", nodes=nodes)
    if own["exists"] and own["state"] not in ("up", "unknown"):
        raise CheckError(f"{own['name']} is down on {host()}", remedy="ip link set DEV up", nodes=nodes)


def clock() -> float:
    """Return this node's time."""
    return time.time()


def interface(variable: str) -> dict[str, Any]:
    """Return the interface that ranks are told to use, else that of the default route."""
    name = os.environ.get(variable, "").strip("=^").split(",")[0] or _default_route()
    folder = NETWORK / name
    exists = bool(name) and folder.is_dir()
    return {
        "name": name,
        "exists": exists,
        "state": (folder / "operstate").read_text().strip() if exists else "",
        "mtu": int((folder / "mtu").read_text()) if exists else 0,
    }


def _default_route() -> str:
    lines = ROUTES.read_text().splitlines()[1:] if ROUTES.exists() else []
    return next((line.split()[0] for line in lines if line.split()[1] == "00000000"), "")
