"""Engines, a row each: how a stack becomes processes."""

from __future__ import annotations

from twinrun.execution.container import DOCKER, PODMAN
from twinrun.execution.container_engine import ContainerKind
from twinrun.execution.engine import EngineModule
from twinrun.execution.image_file import ImageFileKind
from twinrun.execution.interpreter import Environment, Host
from twinrun.foundation.errors import require_known

ENGINES: dict[str, EngineModule] = {
    "apptainer": ImageFileKind("apptainer", "sif"),
    "docker": ContainerKind(DOCKER),
    "host": Host(),
    "podman": ContainerKind(PODMAN),
    "pyxis": ImageFileKind("pyxis", "sqsh"),
    # SingularityCE, which some sites have in place of Apptainer; no machine of ours has run it.
    "singularity": ImageFileKind("singularity", "sif"),
    "venv": Environment(),
}


def load_engine(name: str) -> EngineModule:
    """Return the engine called `name`; raises InputError when there is none."""
    require_known(name, list(ENGINES), "unknown engine", place="--engine")
    return ENGINES[name]
