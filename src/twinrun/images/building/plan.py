"""Build plan: everything that decides what an image is, before anything is fetched or run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from twinrun import __version__
from twinrun.foundation.files import canonical_json, sha256_of_bytes, sha256_of_file
from twinrun.foundation.manifest import Frozen
from twinrun.images.building.artifacts import (
    Artifact,
    build_tool_artifacts,
    deb_artifacts,
    source_artifacts,
    wheel_artifacts,
)
from twinrun.images.building.buildkit import build_arguments
from twinrun.images.building.dockerfile import Dockerfile, read_dockerfile
from twinrun.images.building.image_archive import rfc3339
from twinrun.images.building.source import SOURCE, last_commit, tree_sha256
from twinrun.manifests.image_lock import BasePin
from twinrun.manifests.stack import Alternative, LoadedStack

# Counts up when the same inputs give other layers than before.
_FORMAT = 1
DOCKERFILE = "images/Dockerfile"
CONTEXT = "{context}"
SOURCE_STAGE = "source"


class BuildPlan(Frozen):
    """One image and the build that makes it."""

    stack: LoadedStack
    image: str
    """Reference, name and tag; the tag is the lock's checksum."""
    epoch: int
    """SOURCE_DATE_EPOCH: modification time of every file and creation time of the image."""
    base: BasePin
    base_file_sha256: str | None
    """Checksum of the file given with `--base`."""
    alternatives: tuple[Alternative, ...]
    """Wheels of stack.toml that replace locked ones."""
    stages: tuple[str, ...]
    """Dockerfile stages that become layers above the base, in order."""
    dockerfile: Dockerfile
    artifacts: tuple[Artifact, ...]
    kernels: tuple[str, ...]
    """Kernel folders of this checkout that are compiled into the image."""
    unverified: tuple[str, ...]
    labels: dict[str, str]
    environment_sha256: str
    """Checksum of all inputs of the layers below the source."""
    source_sha256: str

    def command(self, stage: str, base: str) -> list[str]:
        """Return the command that builds a stage on the base image called `base`."""
        variables = {
            "BASE": base,
            "PYTHON": self.stack.stack.interpreter(),
            "ARCHS": " ".join(self.stack.stack.archs),
            "SOURCE_DATE_EPOCH": str(self.epoch),
        }
        return build_arguments(
            stage=stage, context=CONTEXT, variables=variables, export_tar=self.from_scratch(stage)
        )

    def from_scratch(self, stage: str) -> bool:
        """Say whether a stage starts from scratch, so that its export holds the layer alone."""
        return self.dockerfile.parents[stage] == "scratch"

    def base_reference(self) -> str:
        """Return the reference that the base has in the engine during the build."""
        return f"twinrun/base:{(self.base_file_sha256 or self.base.sha256 or 'unknown')[:12]}"

    def summary(self) -> dict[str, object]:
        """Return what `--dry` prints."""
        folders = (artifact.folder for artifact in self.artifacts)
        counts = Counter("sources" if folder.startswith("sources/") else folder for folder in folders)
        return {
            "image": self.image,
            "platform": self.stack.stack.platform,
            "archs": list(self.stack.stack.archs),
            "base": self.base.model_dump() | {"carried_in": self.base_file_sha256},
            "layers": ["base", *self.stages],
            "files": dict(counts),
            "kernels": list(self.kernels),
            "alternatives": [pin.requirement for pin in self.alternatives],
            "unverified": list(self.unverified),
            "labels": self.labels,
            "commands": {stage: self.command(stage, self.base_reference()) for stage in self.stages},
        }


def plan_build(
    root: Path,
    loaded: LoadedStack,
    *,
    alternatives: tuple[Alternative, ...] = (),
    base_file: Path | None = None,
) -> BuildPlan:
    """Resolve the build of a stack; reads files of the checkout and nothing else.

    Args:
        alternatives: wheels of stack.toml that replace locked ones.
        base_file: base to start from instead of the locked one.
    """
    stack, lock = loaded.stack, loaded.image_lock(root)
    assert lock is not None
    file_sha256 = sha256_of_file(base_file) if base_file else None
    other_base = file_sha256 is not None and file_sha256 != lock.base.sha256
    kernels = tuple(f"recipes/{name}/kernels" for name in stack.kernels)
    compiles = bool(kernels or stack.sources)
    unverified = (*loaded.unverified_pins(root), *(pin.requirement for pin in alternatives))
    if other_base:
        unverified = (*(name for name in unverified if name != lock.base.name), f"base {file_sha256}")
    inputs = {
        "format": _FORMAT,
        "dockerfile": sha256_of_file(root / DOCKERFILE),
        "lock": loaded.lock_sha256,
        "kernels": {folder: tree_sha256(root / folder) for folder in kernels},
        "alternatives": [pin.sha256 for pin in alternatives],
        "base": file_sha256 or lock.base.sha256,
    }
    checksums = {
        "environment": sha256_of_bytes(canonical_json(inputs).encode()),
        "source": tree_sha256(root / SOURCE),
    }
    return BuildPlan(
        stack=loaded,
        # An image of another base than the lock's must not pass for the lock's.
        image=loaded.image() + ("-unverified" if other_base else ""),
        epoch=lock.epoch,
        base=lock.base,
        base_file_sha256=file_sha256,
        alternatives=alternatives,
        stages=("system", "python", *(("kernels",) if compiles else ()), SOURCE_STAGE),
        dockerfile=read_dockerfile(root / DOCKERFILE),
        artifacts=_artifacts(root, loaded, alternatives=alternatives, compiles=compiles),
        kernels=kernels,
        unverified=unverified,
        labels=_labels(root, loaded, epoch=lock.epoch, checksums=checksums, unverified=unverified),
        environment_sha256=checksums["environment"],
        source_sha256=checksums["source"],
    )


def _artifacts(
    root: Path, loaded: LoadedStack, *, alternatives: tuple[Alternative, ...], compiles: bool
) -> tuple[Artifact, ...]:
    system = loaded.system_packages(root)
    assert system is not None
    return (
        *deb_artifacts(loaded, system.base, "packages/base"),
        *deb_artifacts(loaded, system.runtime, "packages/runtime"),
        *deb_artifacts(loaded, system.build, "packages/build"),
        *wheel_artifacts(root, loaded, alternatives=alternatives),
        *(build_tool_artifacts(root, loaded) if compiles else ()),
        *source_artifacts(root, loaded),
    )


def _labels(
    root: Path,
    loaded: LoadedStack,
    *,
    epoch: int,
    checksums: dict[str, str],
    unverified: tuple[str, ...],
) -> dict[str, str]:
    """Return the labels that have a value, sorted."""
    kernels = (f"recipes/{name}/kernels" for name in loaded.stack.kernels)
    labels = {
        "org.opencontainers.image.title": loaded.stack.title,
        "org.opencontainers.image.source": f"pkg:generic/twinrun@{__version__}",
        "org.opencontainers.image.version": __version__,
        # The clock of a build would make each image another one.
        "org.opencontainers.image.created": rfc3339(epoch),
        # A commit that changes nothing in the image must leave it as it is.
        "org.opencontainers.image.revision": last_commit(root, [SOURCE, DOCKERFILE, loaded.folder, *kernels]),
        "dev.twinrun.stack": loaded.stack.name,
        "dev.twinrun.archs": " ".join(loaded.stack.archs),
        "dev.twinrun.lock-sha256": loaded.lock_sha256,
        **{f"dev.twinrun.{name}-sha256": checksum for name, checksum in checksums.items()},
        "dev.twinrun.unverified": ", ".join(unverified),
    }
    return {name: value for name, value in sorted(labels.items()) if value}
