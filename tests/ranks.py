"""Ranks of one node, forked where the modules they need are imported already."""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.commands import PATIENCE_SECONDS, ROOT
from tests.registries import free_port
from twinrun.foundation.cache import bytecode_folder


def environment() -> dict[str, str]:
    """Return the environment ranks are started in: one thread each, no network but this machine."""
    return os.environ | {
        "PYTHONPATH": str(ROOT / "src"),
        # As under an engine: compiling what ranks import takes longer than importing it.
        "PYTHONPYCACHEPREFIX": str(bytecode_folder()),
        "PYTHONDONTWRITEBYTECODE": "",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def write_job(folder: Path, recipe: str, **own: Any) -> Path:
    """Write what ranks of a recipe without accelerators are given, and return its file."""
    file, metrics = folder / "job.json", str(folder / "metrics.jsonl")
    job = {"recipe": recipe, "point": "small", "accelerator": False, "out": str(folder), "metrics": metrics}
    file.write_text(json.dumps(job | {"attempt": "1"} | own))
    return file


def run_ranks(
    script: Path | str,
    *arguments: str,
    world_size: int,
    variables: Mapping[str, str],
    modules: tuple[str, ...] = (),
    beside: tuple[str, ...] = (),
) -> subprocess.CompletedProcess[str]:
    """Run a script or a module on ranks that find each other as under torchrun; return what all have printed.

    Args:
        variables: environment of the ranks, with PYTHONPATH.
        modules: what is imported before the ranks are forked, beside PyTorch.
        beside: arguments of other ranks, as many, that run at the same time without knowing of these.
    """
    with tempfile.TemporaryDirectory() as name:
        ranks: list[dict[str, Any]] = []
        for given in filter(None, (arguments, beside)):
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GROUP_RANK": "0"}
            place |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world_size))
            for rank in range(world_size):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                streams = {one: f"{name}/{len(ranks)}.{one}" for one in ("stdout", "stderr")}
                called = {"arguments": [str(script), *given], "variables": {**variables, **place, **own}}
                ranks.append(called | streams)
        server = _server(modules)
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(f"{json.dumps(ranks)}\n")
        server.stdin.flush()
        # Unlike `select`, this takes descriptors above 1,023.
        waiting = select.poll()
        waiting.register(server.stdout, select.POLLIN)
        if not waiting.poll(PATIENCE_SECONDS * 1000):
            os.killpg(server.pid, signal.SIGKILL)
            raise TimeoutError(arguments)
        status = int(server.stdout.readline())
        printed = [
            "".join(Path(one[stream]).read_text("utf-8") for one in ranks) for stream in ("stdout", "stderr")
        ]
        return subprocess.CompletedProcess(arguments, status, *printed)


@functools.cache
def _server(modules: tuple[str, ...]) -> subprocess.Popen[str]:
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.rank_server", "torch.distributed", *modules],
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    atexit.register(server.communicate)
    return server
