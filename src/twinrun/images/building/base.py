"""Base image of a build: made by mmdebstrap, pulled by digest, or loaded from a tar."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from twinrun.foundation.cache import cache_root
from twinrun.foundation.errors import InputError, MachineError
from twinrun.foundation.files import sha256_of_file
from twinrun.images.building.dockerfile import ContainerConfig
from twinrun.images.building.image_archive import Image, ImageLayer, image_archive
from twinrun.images.building.plan import BuildPlan
from twinrun.images.building.transfer import load, pull
from twinrun.images.root_filesystem import make_root

if TYPE_CHECKING:
    from docker import DockerClient

# Folders of every distribution's root file system.
_ROOT_FOLDERS = {"bin", "etc", "usr"}


def prepare_base(
    client: DockerClient, plan: BuildPlan, *, root: Path, file: Path | None, say: Callable[[str], None]
) -> str:
    """Load or pull the base into the engine and return its reference there.

    Raises:
        InputError: the file is no image, or for another platform.
        MachineError: the base cannot be made or pulled, or is not the locked one.
    """
    name, stack = plan.base_reference(), plan.stack.stack
    assert stack.base is not None
    if file is not None and is_image_archive(file):
        load(client, file.open("rb"), what="the base", name=name)
    elif file is not None or stack.base.kind == "debian":
        tar = file or _root_file_system(plan, root=root, say=say)
        layer = ImageLayer(
            diff_id=f"sha256:{plan.base_file_sha256 or plan.base.sha256}", created_by=plan.base.name, file=tar
        )
        image = Image(
            platform=stack.platform,
            epoch=plan.epoch,
            container_config=ContainerConfig(env={}, user="", working_dir=""),
            labels={},
            layers=(layer,),
        )
        load(client, image_archive(image, [name]), what="the base", name=name)
    else:
        pull(
            client,
            stack.base.repository or "",
            tag=stack.base.tag,
            sha256=plan.base.sha256,
            name=name,
            say=say,
        )
    _check_platform(client, name, stack.platform)
    return name


def check_base_file(file: Path, plan: BuildPlan, *, allow_unverified: bool) -> None:
    """Compare the base given as a file with the lock.

    Raises:
        InputError: the file is not the locked base, or neither a root file system nor an image.
    """
    is_image_archive(file)
    if plan.base_file_sha256 != plan.base.sha256 and not allow_unverified:
        raise InputError(
            f"{plan.base.name} is not the locked base",
            place=str(file),
            found=f"sha256 {plan.base_file_sha256}",
            allowed=plan.base.sha256 or "no digest is known",
            hint=f"{plan.stack.folder}/image.lock names it; --allow-unverified builds on another one",
        )


def is_image_archive(file: Path) -> bool:
    """Say whether a tar is an image and not a root file system; raises InputError for neither."""
    folders: set[str] = set()
    try:
        with tarfile.open(file, mode="r:") as tar:
            for member in tar:
                if member.name == "manifest.json":
                    content = tar.extractfile(member)
                    return bool(content and json.load(content)[0]["Layers"])
                folders.add(member.name.removeprefix("./").partition("/")[0])
                if folders >= _ROOT_FOLDERS:
                    return False
    except (OSError, tarfile.TarError, ValueError, LookupError, TypeError) as error:
        reason = str(error)
    else:
        reason = "neither a manifest.json nor the folders bin, etc and usr"
    raise InputError(
        "not an image",
        place=str(file),
        found=reason,
        allowed="an uncompressed tar: a root file system, or what `docker save` writes",
    )


def _root_file_system(plan: BuildPlan, *, root: Path, say: Callable[[str], None]) -> Path:
    """Return the tar of the locked base packages, made here or cached."""
    stack, system = plan.stack.stack, plan.stack.system_packages(root)
    assert stack.base is not None
    assert system is not None
    tar = cache_root() / "bases" / f"{plan.base.sha256}.tar"
    if not tar.is_file() or sha256_of_file(tar) != plan.base.sha256:
        say(f"making the base {plan.base.name} of {len(system.base)} packages")
        tar.parent.mkdir(parents=True, exist_ok=True)
        fresh = tar.with_suffix(".new")
        make_root(
            fresh,
            lock=system,
            suite=stack.base.suite,
            architecture=stack.architecture(),
            epoch=plan.epoch,
        )
        found = sha256_of_file(fresh)
        if found != plan.base.sha256:
            fresh.unlink()
            raise MachineError(
                "the base made here is not the locked one",
                place=f"{plan.stack.folder}/image.lock: {plan.base.name}",
                found=found,
                allowed=plan.base.sha256,
                hint="another mmdebstrap makes other bytes; carry the base in with --base",
            )
        fresh.replace(tar)
    return tar


def _check_platform(client: DockerClient, name: str, platform: str) -> None:
    facts = client.images.get(name).attrs
    found = f"{facts['Os']}/{facts['Architecture']}"
    if found != platform:
        raise InputError("the base is for another processor", place="--base", found=found, allowed=platform)
