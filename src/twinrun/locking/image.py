"""Base and sources of an image resolved to digests and commits."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path

from twinrun.apt import AptLock
from twinrun.errors import InputError, MachineError
from twinrun.files import sha256_of_file
from twinrun.image_lock import BasePin, SourcePin
from twinrun.locking.python import compile_requirements
from twinrun.process import last_lines
from twinrun.registry import Registry
from twinrun.rootfs import make_root
from twinrun.stack import GitSource, PackageSource, Stack

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SECONDS = 300


def resolve_base(stack: Stack, *, system: AptLock, epoch: int) -> BasePin:
    """Return the pin of the base: asked from its registry, or made here.

    Raises:
        InputError: no such tag, or not for the stack's platform.
        MachineError: the registry is out of reach, or mmdebstrap failed.
    """
    base = stack.base
    assert base is not None
    if base.kind == "registry":
        assert base.repository is not None
        assert base.tag is not None
        digest = Registry(base.repository).digest(base.tag, stack.platform)
        return BasePin(name=base.reference(), sha256=digest, verified=True, source="its registry")
    with tempfile.TemporaryDirectory(prefix="twinrun-base-") as folder:
        tar = Path(folder) / "root.tar"
        make_root(tar, lock=system, suite=base.suite, architecture=stack.architecture(), epoch=epoch)
        source = "made here by mmdebstrap from apt.lock"
        return BasePin(name=base.reference(), sha256=sha256_of_file(tar), verified=True, source=source)


def resolve_source(source: GitSource | PackageSource) -> SourcePin:
    """Return the pin of what is built from source; raises InputError or MachineError."""
    if isinstance(source, PackageSource):
        return _package(source)
    commit = _fetched(source) if _COMMIT.fullmatch(source.ref) else _commit(source)
    return SourcePin(name=source.name, commit=commit, verified=True, source="its repository")


def _package(source: PackageSource) -> SourcePin:
    """Return the digest of the one source archive that the index has of this version."""
    requirement = f"{source.package}=={source.version}"
    text = compile_requirements(f"{requirement}\n", ["--no-deps", "--no-binary", ":all:"])
    digests = re.findall(r"--hash=sha256:([0-9a-f]{64})", text)
    if len(digests) != 1:
        raise InputError(
            "the index must have one source archive",
            place=f"stack.toml:sources {source.name}",
            found=len(digests),
        )
    pin = SourcePin(name=source.name, verified=True, source="the package index")
    return pin.model_copy(update={"requirement": requirement, "sha256": digests[0]})


def _commit(source: GitSource) -> str:
    """Return the commit that a tag or a branch means; a tag wins, and its commit stands for it."""
    lines = _git("ls-remote", "--", source.repository).splitlines()
    commits = {name: commit for commit, _, name in (line.partition("\t") for line in lines)}
    wanted = (f"refs/tags/{source.ref}^{{}}", f"refs/tags/{source.ref}", f"refs/heads/{source.ref}")
    for name in wanted:
        if name in commits:
            return commits[name]
    raise InputError(
        "the repository has no such branch or tag",
        place=f"stack.toml:sources {source.name}",
        found=source.ref,
        hint=source.repository,
    )


def _fetched(source: GitSource) -> str:
    """Return the commit itself, once the repository has handed it out: git checks what it receives."""
    with tempfile.TemporaryDirectory(prefix="twinrun-git-") as folder:
        _git("init", "--quiet", "--bare", folder)
        place = ("-C", folder, "fetch", "--quiet", "--depth=1", "--filter=tree:0")
        _git(*place, "--", source.repository, source.ref)
    return source.ref


def _git(*arguments: str) -> str:
    # No question may wait for an answer that nobody gives.
    silent = {"GIT_TERMINAL_PROMPT": "0", "GIT_SSH_COMMAND": "ssh -oBatchMode=yes"}
    variables = os.environ | silent | {"LC_ALL": "C"}
    try:
        done = subprocess.run(
            ["git", *arguments], env=variables, capture_output=True, text=True, check=False, timeout=_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MachineError(f"git cannot be run: {error}", place="git") from None
    if done.returncode:
        raise MachineError(
            "the repository is out of reach",
            place=arguments[-2] if arguments[-1].isalnum() else arguments[-1],
            found=last_lines(done.stderr, 4),
            hint="the old lock stays; run `invoke lock` on a machine that reaches the repository",
        )
    return done.stdout
