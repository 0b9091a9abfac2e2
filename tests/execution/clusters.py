"""A cluster of containers for tests, and what they do to its nodes."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from twinrun.images import local_cluster
from twinrun.manifests.cluster import LoadedSite, load_site

ROOT = Path(__file__).resolve().parents[2]
# So long is waited for what comes: a machine with other work on it is no failure.
SECONDS = 600


@contextlib.contextmanager
def cluster(*, nodes: int, folder: Path) -> Iterator[LoadedSite]:
    """Yield the site of a cluster whose nodes see `folder`; nothing of it is left."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TWINRUN_CLUSTER", raising=False)
        try:
            found = local_cluster.up(ROOT, nodes=nodes, mounts=(folder,), say=print)
            workers = [(name, "idle") for name in local_cluster.node_names(nodes)]
            assert [(one.name, one.slurm) for one in found] == [
                ("controller", "answers"),
                *workers,
                ("worker0", "drained"),
            ]
            yield load_site(ROOT, "local")
        finally:
            local_cluster.down()
    assert local_cluster.status() == ()


def changed(site: LoadedSite, **keys: object) -> LoadedSite:
    return site.model_copy(update={"site": site.site.model_copy(update=keys)})


def until(reached: Callable[[], object], *, pause: float = 0.2) -> float:
    """Wait until `reached()` and return the seconds that took."""
    start = time.monotonic()
    while not reached():
        assert time.monotonic() - start < SECONDS
        time.sleep(pause)
    return time.monotonic() - start


def docker(*words: str) -> None:
    subprocess.run(["docker", *words], check=True, capture_output=True)


def container(node: str) -> str:
    return f"{local_cluster.NAME}-{node}"


def processes(node: str, pattern: str) -> list[str]:
    """Return the processes of a node whose command line fits; none of a node that is dead."""
    command = ["docker", "exec", container(node), "pgrep", "--full", pattern]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
