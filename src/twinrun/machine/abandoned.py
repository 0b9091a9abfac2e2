"""Containers whose twinrun was killed before it could remove them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from twinrun.machine.daemon import daemon_errors

if TYPE_CHECKING:
    from docker import DockerClient

OWNER = "dev.twinrun.owner"
# In /proc/PID/stat, counted after the name of the program.
_START_TIME = 19


def owner() -> str:
    """Return the label of a container of this process: its space of numbers, its number and its start."""
    return f"{_space()} {os.getpid()} {_start_time('self')}"


def remove_abandoned(client: DockerClient) -> list[str]:
    """Remove the containers whose process of this machine is gone, and return their names."""
    from docker.errors import NotFound  # noqa: PLC0415 - the SDK is slow to import

    removed = []
    with daemon_errors("containers"):
        for container in client.containers.list(all=True, filters={"label": OWNER}, ignore_removed=True):
            if _is_gone(container.labels[OWNER]):
                with contextlib.suppress(NotFound):
                    container.remove(force=True)
                    removed.append(str(container.name))
    return removed


def _is_gone(label: str) -> bool:
    """Say whether the process of a label has ended; one of another machine or container is never said to."""
    space, _, process = label.rpartition(" ")[0].rpartition(" ")
    return space == _space() and process.isdigit() and _start_time(process) != label.rpartition(" ")[2]


def _space() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


def _start_time(process: str) -> str | None:
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()[_START_TIME]
