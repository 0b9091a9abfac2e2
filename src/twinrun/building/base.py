"""The image that a build starts from: made here, pulled by digest, or carried in as a tar."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from twinrun.building.dockerfile import Settings
from twinrun.building.image import Image, ImageLayer, archive_of
from twinrun.building.plan import BuildPlan, base_name
from twinrun.building.transfer import load, pull
from twinrun.cache import cache_root
from twinrun.errors import InputError, MachineError
from twinrun.files import sha256_of_file
from twinrun.rootfs import make_root

if TYPE_CHECKING:
    from docker import DockerClient

# What a root file system has, whatever distribution it is.
_ROOT_FOLDERS = {"bin", "etc", "usr"}


def provide_base(
    client: DockerClient, plan: BuildPlan, *, root: Path, file: Path | None, say: Callable[[str], None]
) -> str:
    """Bring the base into the engine and return its name there.

    Raises:
        InputError: the file is no image, or not for the stack's processor.
        MachineError: the base cannot be made or pulled, or is not the locked one.
    """
    name, stack = base_name(plan), plan.stack.stack
    assert stack.base is not None
    if file is not None and is_archive(file):
        # An archive of an image may be compressed in its own way: its digest is of the file as it is.
        load(client, file.open("rb"), what="the base", name=name)
    elif file is not None or stack.base.kind == "debian":
        tar = file or _made(plan, root=root, say=say)
        layer = ImageLayer(
            diff_id=f"sha256:{plan.carried_base or plan.base.sha256}", made_by=plan.base.name, file=tar
        )
        image = Image(
            platform=stack.platform,
            epoch=plan.epoch,
            settings=Settings(variables={}, user="", folder=""),
            labels={},
            layers=(layer,),
        )
        load(client, archive_of(image, [name]), what="the base", name=name)
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
    """Hold a carried-in base against the lock.

    Raises:
        InputError: it is not the locked one, or no root file system and no image.
    """
    is_archive(file)
    if plan.carried_base != plan.base.sha256 and not allow_unverified:
        raise InputError(
            f"{plan.base.name} is not the locked base",
            place=str(file),
            found=f"sha256 {plan.carried_base}",
            allowed=plan.base.sha256 or "no digest is known",
            hint=f"{plan.stack.folder}/image.lock names it; --allow-unverified builds on another one",
        )


def is_archive(file: Path) -> bool:
    """Say whether a tar is an archive of an image, not a root file system; raises InputError for neither."""
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


def _made(plan: BuildPlan, *, root: Path, say: Callable[[str], None]) -> Path:
    """Return the root file system of the locked packages, from the cache if it has been made before."""
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
