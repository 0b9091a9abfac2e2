"""Engines, a row each: how a stack becomes processes."""

from __future__ import annotations

from twinrun.execution.containers import Docker, Podman
from twinrun.execution.engine import Engine
from twinrun.execution.image_file import Apptainer, Pyxis, Singularity
from twinrun.execution.interpreter import Environment, Interpreter
from twinrun.foundation.errors import require_known

ENGINES: dict[str, type[Engine]] = {
    "apptainer": Apptainer,
    "docker": Docker,
    "host": Interpreter,
    "podman": Podman,
    "pyxis": Pyxis,
    "singularity": Singularity,
    "venv": Environment,
}


def load_engine(name: str) -> type[Engine]:
    """Return the engine called `name`; raises InputError when there is none."""
    require_known(name, list(ENGINES), "unknown engine", place="--engine")
    return ENGINES[name]
