"""The memory that processes of this machine may take, by the kernel and by the control groups around them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from twinrun.foundation.manifest import Frozen

_PROCESSES = Path("/proc")
_GROUPS = Path("/sys/fs/cgroup")
# The first version of control groups writes a number of this size for "no limit".
_NO_LIMIT = 1 << 60


class ProcessorMemory(Frozen):
    """Memory of this machine that a run may count on."""

    limit_bytes: int
    """The least of the machine's memory and the limits of its control groups."""
    available_bytes: int
    """What of that nobody else holds now; file caches count as free."""
    limited_by: str
    """`this machine`, or the control group with the lowest limit."""


def processor_memory(processes: Path = _PROCESSES, groups: Path = _GROUPS) -> ProcessorMemory:
    """Return the memory that this process and its children may take.

    Args:
        processes: where the kernel describes processes.
        groups: where control groups are mounted.
    """
    text = (processes / "meminfo").read_text(encoding="ascii")
    sizes = {name: int(size) << 10 for name, size in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
    total = sizes["MemTotal"]
    found = [(total, sizes.get("MemAvailable", sizes["MemFree"]), "this machine")]
    for folder, limit, used in _limits(processes, groups):
        found.append((limit, limit - used, f"the control group {folder}"))
    limit, _, by = min(found)
    available = max(0, min(free for _, free, _ in found))
    return ProcessorMemory(limit_bytes=limit, available_bytes=available, limited_by=by)


def _limits(processes: Path, groups: Path) -> Iterator[tuple[Path, int, int]]:
    """Yield each control group of this process that limits memory, with the limit and what is used."""
    for folder, limit_file, used_file in _memory_groups(processes, groups):
        for group in (folder, *folder.parents):
            if not group.is_relative_to(groups):
                break
            limit = _number(group / limit_file)
            if limit is not None and limit < _NO_LIMIT:
                used = (_number(group / used_file) or 0) - _cached(group)
                yield group, limit, max(0, used)


def _memory_groups(processes: Path, groups: Path) -> Iterator[tuple[Path, str, str]]:
    for line in kernel_text(processes / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield groups / path.lstrip("/"), "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            folder = groups / "memory" / path.lstrip("/")
            yield folder, "memory.limit_in_bytes", "memory.usage_in_bytes"


def _number(file: Path) -> int | None:
    """Return the number in a file of a control group; None for no such file, or no limit."""
    text = kernel_text(file).strip()
    return int(text) if text.isdecimal() else None


def _cached(group: Path) -> int:
    """Return the bytes of file caches, which the kernel takes back before a limit is met."""
    sizes = re.findall(r"^(?:in)?active_file (\d+)$", kernel_text(group / "memory.stat"), re.MULTILINE)
    return sum(map(int, sizes))


def kernel_text(file: Path) -> str:
    """Return what the kernel says in a file, nothing where it has none."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
