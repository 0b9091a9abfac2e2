"""Ranks of one node, forked where the modules they need are imported already."""

from __future__ import annotations

import functools
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.forks import ROOT, Forked, ForkServer
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
        groups = [given for given in (arguments, beside) if given]
        ranks = [
            one
            for number, given in enumerate(groups)
            for one in _ranks((str(script), *given), world_size, variables, Path(name) / str(number))
        ]
        status = _server(modules).run(ranks)
        printed = [
            "".join(Path(getattr(one, stream)).read_text("utf-8") for one in ranks)
            for stream in ("stdout", "stderr")
        ]
        return subprocess.CompletedProcess(arguments, status, *printed)


def _ranks(
    arguments: tuple[str, ...], world_size: int, variables: Mapping[str, str], folder: Path
) -> list[Forked]:
    folder.mkdir()
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GROUP_RANK": "0"}
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world_size))
    return [
        Forked(
            arguments=arguments,
            folder=str(Path.cwd()),
            variables={**variables, **place, **sizes, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=str(folder / f"{rank}.stdout"),
            stderr=str(folder / f"{rank}.stderr"),
        )
        for rank in range(world_size)
    ]


@functools.cache
def _server(modules: tuple[str, ...]) -> ForkServer:
    return ForkServer("tests.rank_server", "torch.distributed", *modules, variables=environment())
