"""Build plan: the stack, and everything that decides what its image is, before anything is fetched or run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from twinrun.foundation.errors import InputError
from twinrun.foundation.manifest import Frozen
from twinrun.foundation.tracked import tracked_files
from twinrun.images.artifacts import Artifact, build_tool_artifacts, deb_artifact, wheel_artifacts
from twinrun.images.buildkit import build_arguments
from twinrun.images.dockerfile import Dockerfile, read_dockerfile
from twinrun.manifests.attestation import Attestation
from twinrun.manifests.image_identity import rfc3339
from twinrun.manifests.packages import AlternativePin
from twinrun.manifests.stack import DOCKERFILE, INPUTS_LABEL, LoadedStack, find_stacks, load_stack
from twinrun.manifests.vendor import load_vendors, require_vendor

CONTEXT = "{context}"


class BuildPlan(Frozen):
    """One image and the build that makes it."""

    stack: LoadedStack
    image: str
    """Reference, name and tag; the tag is the checksum of all inputs."""
    epoch: int
    """SOURCE_DATE_EPOCH: modification time of every file and creation time of the image."""
    base: str
    """Checksum of the root file system's tar."""
    alternatives: tuple[AlternativePin, ...]
    """Wheels of stack.toml that replace locked ones."""
    stages: tuple[str, ...]
    """Dockerfile stages that become layers above the base, in order."""
    dockerfile: Dockerfile
    artifacts: tuple[Artifact, ...]
    kernels: tuple[str, ...]
    """Kernel folders of this checkout that are compiled into the image."""
    attested: tuple[str, ...]
    """Pins whose hashes public lock files have, and that were not verified at the framework's index."""
    unverified: tuple[str, ...]
    labels: dict[str, str]

    def variables(self) -> dict[str, str]:
        """Return the build arguments of the Dockerfile."""
        return {
            "PYTHON": self.stack.stack.interpreter(),
            "ARCHS": " ".join(self.stack.stack.archs),
            "SOURCE_DATE_EPOCH": str(self.epoch),
        }

    def command(self, stage: str, *, export_tar: bool = True) -> list[str]:
        """Return the options of the engine's client that build a stage."""
        return build_arguments(
            stage=stage,
            context=CONTEXT,
            variables=self.variables(),
            export_tar=export_tar and self.dockerfile.from_scratch(stage),
        )

    @property
    def attested_wheels(self) -> tuple[Attestation, ...]:
        """Wheels of `attested`, each with its hash and where that was found."""
        return tuple(one for one in self.stack.stack.attested if one.requirement() in self.attested)

    def summary(self) -> dict[str, object]:
        """Return what `--dry` prints."""
        counts = Counter(artifact.folder for artifact in self.artifacts)
        return {
            "image": self.image,
            "platform": self.stack.stack.platform,
            "archs": list(self.stack.stack.archs),
            "base": self.base,
            "layers": ["base", *self.stages],
            "files": dict(counts),
            "kernels": list(self.kernels),
            "alternatives": [pin.requirement for pin in self.alternatives],
            "attested": [wheel.model_dump(mode="json") for wheel in self.attested_wheels],
            "unverified": list(self.unverified),
            "labels": self.labels,
            "commands": {stage: ["docker", *self.command(stage)] for stage in self.stages},
        }


def plan_build(
    root: Path, loaded: LoadedStack, *, alternatives: tuple[AlternativePin, ...] = ()
) -> BuildPlan:
    """Resolve the build of a stack; reads files of the checkout and nothing else.

    Args:
        alternatives: wheels of stack.toml that replace locked ones.

    Raises:
        InputError: kernels that git does not track, or that are links.
    """
    lock = loaded.image_lock(root)
    assert lock is not None
    kernels = loaded.stack.kernel_folders()
    for folder in kernels:
        tracked_files(root, folder)
    attested = loaded.attested(root)
    unverified = (*loaded.unhashed(root), *(pin.requirement for pin in alternatives))
    return BuildPlan(
        stack=loaded,
        image=loaded.image(),
        epoch=lock.epoch,
        base=lock.base,
        alternatives=alternatives,
        stages=("system", "python", *(("kernels",) if kernels else ())),
        dockerfile=read_dockerfile(root / DOCKERFILE),
        artifacts=_artifacts(root, loaded, alternatives=alternatives),
        kernels=kernels,
        attested=attested,
        unverified=unverified,
        labels=_labels(loaded, epoch=lock.epoch, attested=attested, unverified=unverified),
    )


def _artifacts(
    root: Path, loaded: LoadedStack, *, alternatives: tuple[AlternativePin, ...]
) -> tuple[Artifact, ...]:
    system = loaded.system_packages(root)
    assert system is not None
    return (
        *(
            deb_artifact(loaded.stack.name, package, f"packages/{stage}")
            for stage, packages in system
            for package in packages
        ),
        *wheel_artifacts(root, loaded, alternatives=alternatives),
        *(build_tool_artifacts(root, loaded) if loaded.stack.kernels else ()),
    )


def _labels(
    loaded: LoadedStack, *, epoch: int, attested: tuple[str, ...], unverified: tuple[str, ...]
) -> dict[str, str]:
    """Return the labels that have a value, sorted: of the inputs alone, so that the same give one image."""
    labels = {
        "org.opencontainers.image.title": loaded.stack.title,
        # The clock of a build would make each image another one.
        "org.opencontainers.image.created": rfc3339(epoch),
        "dev.twinrun.stack": loaded.stack.name,
        "dev.twinrun.archs": " ".join(loaded.stack.archs),
        "dev.twinrun.lock-sha256": loaded.lock_sha256,
        INPUTS_LABEL: loaded.inputs_sha256,
        "dev.twinrun.attested": ", ".join(attested),
        "dev.twinrun.unverified": ", ".join(unverified),
    }
    return {name: value for name, value in sorted(labels.items()) if value}


def choose_stack(root: Path, vendor: str | None, stack: str | None) -> LoadedStack:
    """Return the stack called `stack`, or the one that the recipes use on `vendor`.

    Raises:
        InputError: neither is named, one is unknown, the stack is of another vendor or has no image, or the
            recipes use none or several on the vendor.
    """
    if not vendor and not stack:
        hint = f"or --vendor, for the stack that the recipes use: {', '.join(sorted(load_vendors(root)))}"
        raise InputError("which stack?", place="--stack", allowed=_with_image(root), hint=hint)
    if vendor:
        require_vendor(vendor, load_vendors(root))
    loaded = load_stack(root, stack) if stack else _recipes_stack(root, str(vendor))
    if vendor and loaded.stack.vendor != vendor:
        raise InputError(
            "the stack is another vendor's",
            place="--stack",
            found=loaded.stack.name,
            allowed=_with_image(root, vendor),
            hint=f"without --vendor the stack's own is taken, {loaded.stack.vendor}",
        )
    if loaded.stack.base is None:
        raise InputError(
            "the stack has no image", place=f"{loaded.folder}/stack.toml", hint="give it a table [base]"
        )
    return loaded


def _recipes_stack(root: Path, vendor: str) -> LoadedStack:
    # Every workload's models are slow to import, and `--stack` needs none of them.
    from twinrun.planning.project import Project

    names = {recipe.recipe.stacks.current.get(vendor) for recipe in Project(root).recipes().values()} - {None}
    if len(names) != 1:
        raise InputError("which stack?", place="--stack", allowed=_with_image(root, vendor))
    return load_stack(root, str(names.pop()))


def _with_image(root: Path, vendor: str | None = None) -> list[str]:
    """Return the stacks that have an image, of one vendor or of all."""
    stacks = [one.stack for one in find_stacks(root).values()]
    return [stack.name for stack in stacks if stack.base and vendor in (None, stack.vendor)]
