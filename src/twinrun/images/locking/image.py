"""Resolution of image.lock: base images to digests, sources to commits and checksums."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from twinrun.foundation.errors import InputError, MachineError, RunError
from twinrun.foundation.files import sha256_of_file
from twinrun.foundation.processes import last_lines
from twinrun.images.git import git
from twinrun.images.locking.python import compile_requirements
from twinrun.images.registry import Registry
from twinrun.images.root_filesystem import make_root
from twinrun.manifests.apt_lock import AptLock
from twinrun.manifests.image_lock import BasePin, SourcePin
from twinrun.manifests.stack import GitSource, PackageSource, Stack

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SECONDS = 300


def resolve_base(stack: Stack, *, system: AptLock, epoch: int) -> BasePin:
    """Return the pin of the base: its digest in the registry, or the checksum of the tar made here.

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
    """Return the pin of a source; raises InputError or MachineError."""
    if isinstance(source, PackageSource):
        return _resolve_sdist(source)
    commit = _verify_commit(source) if _COMMIT.fullmatch(source.ref) else _resolve_ref(source)
    return SourcePin(name=source.name, commit=commit, verified=True, source="its repository")


def _resolve_sdist(source: PackageSource) -> SourcePin:
    """Return the pin of the one source distribution that the index has of this version."""
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


def _resolve_ref(source: GitSource) -> str:
    """Return the commit of a tag or, without one of that name, of a branch; annotated tags are peeled."""
    lines = _git("ls-remote", "--", source.repository).splitlines()
    commits = {name: commit for commit, _, name in (line.partition("\t") for line in lines)}
    refs = (f"refs/tags/{source.ref}^{{}}", f"refs/tags/{source.ref}", f"refs/heads/{source.ref}")
    for ref in refs:
        if ref in commits:
            return commits[ref]
    raise InputError(
        "the repository has no such branch or tag",
        place=f"stack.toml:sources {source.name}",
        found=source.ref,
        hint=source.repository,
    )


def _verify_commit(source: GitSource) -> str:
    """Return the commit after a fetch of it: git verifies what it receives."""
    with tempfile.TemporaryDirectory(prefix="twinrun-git-") as folder:
        _git("init", "--quiet", "--bare", folder)
        place = ("-C", folder, "fetch", "--quiet", "--depth=1", "--filter=tree:0")
        _git(*place, "--", source.repository, source.ref)
    return source.ref


def _git(*arguments: str) -> str:
    try:
        return git(Path(), *arguments, seconds=_SECONDS)
    except RunError as error:
        raise MachineError(
            "the repository is out of reach",
            place=arguments[-2] if arguments[-1].isalnum() else arguments[-1],
            found=last_lines(str(error.found or error.message), 4),
            hint="the old lock stays; run `invoke lock` on a machine that reaches the repository",
        ) from None
