"""Stages of images/Dockerfile, and the container configuration of the last one."""

from __future__ import annotations

import re
import shlex
import string
from pathlib import Path

from twinrun.foundation.errors import InputError
from twinrun.foundation.manifest import Frozen

_CONTINUED = re.compile(r"\\\n(?:\s*#.*\n)*")
_STAGE = re.compile(r"FROM\s+(?P<parent>\S+)\s+AS\s+(?P<name>\S+)", re.IGNORECASE)
# PATH that engines set for an image without one.
_DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class ContainerConfig(Frozen):
    """Environment, user and working directory of a container of the image."""

    env: dict[str, str]
    user: str
    working_dir: str


class Dockerfile(Frozen):
    """Stages of a Dockerfile and the instructions ENV, USER and WORKDIR of the last one."""

    parents: dict[str, str]
    """Stage to the stage or image after its FROM, in order."""
    env: tuple[tuple[str, str], ...]
    """As written, with references to variables of the base."""
    user: str
    working_dir: str

    def container_config(self, base_env: dict[str, str]) -> ContainerConfig:
        """Return the configuration on top of the variables of the base image."""
        env = {"PATH": _DEFAULT_PATH} | base_env
        for name, value in self.env:
            env[name] = string.Template(value).safe_substitute(env)
        return ContainerConfig(env=env, user=self.user, working_dir=self.working_dir)


def read_dockerfile(path: Path) -> Dockerfile:
    """Read the Dockerfile at `path`.

    Raises:
        InputError: it cannot be read, or its last stage has no USER or WORKDIR.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read: {error}", place=str(path)) from None
    parents: dict[str, str] = {}
    instructions: list[tuple[str, str]] = []
    for line in _CONTINUED.sub(" ", text).splitlines():
        stage = _STAGE.fullmatch(line.strip())
        if stage:
            parents[stage["name"]], instructions = stage["parent"], []
        else:
            word, _, rest = line.strip().partition(" ")
            instructions.append((word.upper(), rest.strip()))
    env = [part for word, rest in instructions if word == "ENV" for part in shlex.split(rest)]
    last = dict(instructions)
    for word in ("USER", "WORKDIR"):
        if word not in last:
            raise InputError(f"the last stage has no {word}", place=str(path))
    return Dockerfile(
        parents=parents,
        env=tuple((name, value) for name, _, value in (part.partition("=") for part in env)),
        user=last["USER"],
        working_dir=last["WORKDIR"],
    )
