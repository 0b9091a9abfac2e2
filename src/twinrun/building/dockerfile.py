"""What images/Dockerfile says of the finished image: the settings of its last stage, and its stages."""

from __future__ import annotations

import re
import shlex
import string
from pathlib import Path

from twinrun.errors import InputError
from twinrun.manifest import Frozen

_CONTINUED = re.compile(r"\\\n(?:\s*#.*\n)*")
_STAGE = re.compile(r"FROM\s+(?P<parent>\S+)\s+AS\s+(?P<name>\S+)", re.IGNORECASE)
# Where engines look for programs of an image that does not say.
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Settings(Frozen):
    """How a container of the image starts."""

    variables: dict[str, str]
    user: str
    folder: str


class Dockerfile(Frozen):
    """The stages of a Dockerfile and how containers of the last one start."""

    parents: dict[str, str]
    """Stage to what it starts from, in order."""
    variables: tuple[tuple[str, str], ...]
    """As written, with references to the variables of the base."""
    user: str
    folder: str

    def settings(self, base: dict[str, str]) -> Settings:
        """Return the settings on top of the variables that the base image sets."""
        found = {"PATH": _PATH} | base
        for name, value in self.variables:
            found[name] = string.Template(value).safe_substitute(found)
        return Settings(variables=found, user=self.user, folder=self.folder)


def read_dockerfile(path: Path) -> Dockerfile:
    """Read the Dockerfile at `path`.

    Raises:
        InputError: it cannot be read, or its last stage names no user or folder.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read: {error}", place=str(path)) from None
    parents: dict[str, str] = {}
    last: list[tuple[str, str]] = []
    for line in _CONTINUED.sub(" ", text).splitlines():
        stage = _STAGE.fullmatch(line.strip())
        if stage:
            parents[stage["name"]], last = stage["parent"], []
        else:
            word, _, rest = line.strip().partition(" ")
            last.append((word.upper(), rest.strip()))
    variables = [part.partition("=") for word, rest in last if word == "ENV" for part in shlex.split(rest)]
    found = dict(last)
    for word in ("USER", "WORKDIR"):
        if word not in found:
            raise InputError(f"the last stage has no {word}", place=str(path))
    return Dockerfile(
        parents=parents,
        variables=tuple((name, value) for name, _, value in variables),
        user=found["USER"],
        folder=found["WORKDIR"],
    )
