"""Stages of images/Dockerfile: what each depends on, and the container configuration of the last one."""

from __future__ import annotations

import re
import shlex
import string
from collections.abc import Mapping
from pathlib import Path

from twinrun.foundation.errors import InputError
from twinrun.foundation.files import canonical_json, sha256_of_bytes, sha256_of_file
from twinrun.foundation.manifest import Frozen, read_text

_CONTINUED = re.compile(r"\\\n(?:\s*#.*\n)*")
_STAGE = re.compile(r"FROM\s+(?P<parent>\S+)\s+AS\s+(?P<name>\S+)", re.IGNORECASE)
_MOUNT = re.compile(r"--mount=(\S+)")
_FROM = re.compile(r"\bfrom=(\w+)")
# PATH that engines set for an image without one.
_DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class ContainerConfig(Frozen):
    """Environment, user and working directory of a container of the image."""

    env: dict[str, str]
    user: str
    working_dir: str


class DockerfileStage(Frozen):
    """One stage: the stage or image after its FROM, and its instructions without comments."""

    parent: str
    instructions: tuple[str, ...] = ()

    def stages(self) -> set[str]:
        """Return the stages that it takes files from."""
        return {name for line in self.instructions for name in _FROM.findall(line)}

    def sources(self) -> set[str]:
        """Return the files and folders of the context that it copies or mounts."""
        found: set[str] = set()
        for line in self.instructions:
            word, *rest = line.split()
            if word in ("ADD", "COPY") and not _FROM.search(line):
                found.update(rest[:-1])
            mounts = (
                dict(part.partition("=")[::2] for part in one.split(",")) for one in _MOUNT.findall(line)
            )
            found.update(mount["source"] for mount in mounts if "from" not in mount)
        return found

    def arguments(self) -> set[str]:
        """Return the build arguments that it declares."""
        return {line.split()[1] for line in self.instructions if line.startswith("ARG ")}


class Dockerfile(Frozen):
    """Stages of a Dockerfile, in order, and the configuration that the last one gives."""

    stages: dict[str, DockerfileStage]
    env: tuple[tuple[str, str], ...]
    """Values are as written, with references to variables that were set before."""
    user: str
    working_dir: str

    def container_config(self) -> ContainerConfig:
        """Return the configuration of a container."""
        env = {"PATH": _DEFAULT_PATH}
        for name, value in self.env:
            env[name] = string.Template(value).safe_substitute(env)
        return ContainerConfig(env=env, user=self.user, working_dir=self.working_dir)

    def from_scratch(self, stage: str) -> bool:
        """Say whether a stage starts from nothing."""
        return self.stages[stage].parent == "scratch"

    def file_trees(self, context: Path) -> dict[str, dict[str, str]]:
        """Return the digests of the files by each file or folder of the context that a stage takes."""
        return {
            source: _tree(context / source) for stage in self.stages.values() for source in stage.sources()
        }

    def stage_keys(
        self, *, trees: Mapping[str, Mapping[str, str]], variables: Mapping[str, str]
    ) -> dict[str, str]:
        """Return for each stage the digest of all that it is made of: the same key means the same files.

        Args:
            trees: as `file_trees` returns them.
        """
        keys: dict[str, str] = {}
        for name, stage in self.stages.items():
            content = {
                "instructions": stage.instructions,
                "arguments": {argument: variables[argument] for argument in stage.arguments()},
                "stages": {one: keys[one] for one in (*stage.stages(), stage.parent) if one != "scratch"},
                "files": {source: trees[source] for source in stage.sources()},
            }
            keys[name] = sha256_of_bytes(canonical_json(content).encode())
        return keys


def _tree(path: Path) -> dict[str, str]:
    files = [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file())
    return {f"{one.relative_to(path)} {one.stat().st_mode & 0o111:o}": sha256_of_file(one) for one in files}


def read_dockerfile(path: Path) -> Dockerfile:
    """Read the Dockerfile at `path`.

    Raises:
        InputError: it cannot be read, or its last stage has no USER or WORKDIR.
    """
    text = read_text(path)
    stages: dict[str, DockerfileStage] = {}
    parent, name = "", ""
    instructions: list[str] = []
    for line in map(str.strip, _CONTINUED.sub(" ", text).splitlines()):
        if stage := _STAGE.fullmatch(line):
            parent, name, instructions = stage["parent"], stage["name"], []
        elif line and not line.startswith("#"):
            instructions.append(line)
        if name:
            stages[name] = DockerfileStage(parent=parent, instructions=tuple(instructions))
    words = [line.partition(" ")[::2] for line in instructions]
    env = [part for word, rest in words if word == "ENV" for part in shlex.split(rest)]
    last = dict(words)
    for word in ("USER", "WORKDIR"):
        if word not in last:
            raise InputError(f"the last stage has no {word}", place=str(path))
    return Dockerfile(
        stages=stages,
        env=tuple((name, value) for name, _, value in (part.partition("=") for part in env)),
        user=last["USER"],
        working_dir=last["WORKDIR"],
    )
