"""Each rank on the cores beside its device: the PCI address leads to them in sysfs, whoever made the device.

Imports without torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from twinrun.protocol.allocation import Binding

SYSFS = Path("/sys")


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
    numa = _number(_device(own, sysfs) / "numa_node")
    allowed = os.sched_getaffinity(0)
    near = beside[own] & allowed
    if not near:
        return Binding(address=own, numa_node=numa, cores=cpu_list(allowed), bound=False)
    sharers = [number for number, one in enumerate(addresses) if one and beside[one] == beside[own]]
    share = _share(near, sharers.index(local), len(sharers), sysfs)
    os.sched_setaffinity(0, share)
    return Binding(address=own, numa_node=numa, cores=cpu_list(share), bound=True)


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


def _device(address: str, sysfs: Path) -> Path:
    return sysfs / "bus" / "pci" / "devices" / address


def _beside(address: str, sysfs: Path) -> frozenset[int]:
    """Return the processors beside a device, none where the kernel does not say."""
    return frozenset(parse_cpu_list(_text(_device(address, sysfs) / "local_cpulist") or ""))


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


def _number(file: Path) -> int | None:
    """Return a number of sysfs; where a machine has one node, the kernel may say -1."""
    text = _text(file)
    return int(text) if text and text.lstrip("-").isdecimal() else None


def _text(file: Path) -> str | None:
    try:
        return file.read_text(encoding="ascii").strip()
    except OSError:
        return None
