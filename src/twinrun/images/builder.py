"""Builder of a stack's image, unless the image is known: built here, committed or pulled."""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from twinrun.foundation.cache import cache_root, locked
from twinrun.foundation.errors import MachineError, require_equal
from twinrun.foundation.files import sha256_of_bytes
from twinrun.foundation.manifest import Frozen
from twinrun.images.context import Context, collect, exhausted, write_wheelhouse
from twinrun.images.engine import find_client, load, pull, run_build
from twinrun.images.plan import BuildPlan, BuildRequest, build_arguments
from twinrun.machine import daemon
from twinrun.manifests.image_identity import record_built

if TYPE_CHECKING:
    from docker import DockerClient

# Machine names of engines to Debian's architectures.
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


class BuiltImage(Frozen):
    """An image in the engine."""

    image: str
    id: str
    fresh: bool
    """It was built; False when the image existed already."""
    layers: dict[str, str]
    """Digest of each layer's tar, the lowest first."""
    wheels: tuple[str, ...] = ()
    """SHA-256 of the wheels that it was made of, where that is known."""


class Builder:
    """Builds one plan in one engine."""

    def __init__(
        self, client: DockerClient, plan: BuildPlan, *, root: Path, log: Path, say: Callable[[str], None]
    ) -> None:
        self._client = client
        self._plan = plan
        self._root = root
        self._log = log
        self._say = say

    def build(self, request: BuildRequest) -> BuiltImage:
        """Build the image, unless the engine has the one that was built of these inputs.

        Raises:
            InputError: a file is missing or not the locked one; nothing was started.
            MachineError: the engine is for another processor, a disk is too small, or what was built is not
                the image that is committed; nothing was tagged.
            RunError: a step of the Dockerfile failed.
        """
        plan, stack = self._plan, self._plan.stack.stack
        found = self._client.version()["Arch"]
        require_equal(
            _ARCHITECTURES.get(found, found),
            stack.architecture(),
            "the engine's processor is not the stack's",
            place=f"{plan.stack.folder}/stack.toml:platform",
            hint="build on a machine of that kind and carry the image over with --save",
            error=MachineError,
        )
        for folder in (cache_root(), self._log.parent):
            folder.mkdir(parents=True, exist_ok=True)
        # Space is needed at the engine's folder, where this machine can see it, and at the cache.
        engine = Path(self._client.info()["DockerRootDir"])
        places = [*([engine] if engine.is_dir() else []), cache_root()]
        needed = 0
        with locked(cache_root() / f"build-{stack.name}.lock"):
            existing = self._known()
            if existing and not request.save:
                return self._tagged(existing)
            try:
                context = collect(plan, self._root, request, say=self._say)
                needed = context.bytes_needed()
                if min(shutil.disk_usage(place).free for place in places) < needed:
                    raise exhausted(places, needed)
                with self._work() as work:
                    archive, identity = self._archive(context, work)
                    built = self._tagged(existing) if existing else self._load(archive, identity)
                    if request.save:
                        _save(archive, context, plan, request.save)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                raise exhausted(places, needed) from None
        return built.model_copy(update={"wheels": context.wheels})

    def adopt(self, reference: str) -> BuiltImage:
        """Pull `repository@sha256:...` in place of building; who names a digest vouches for it.

        Raises:
            MachineError: it cannot be pulled, or is not of these inputs; nothing was tagged.
        """
        found, plan = pull(self._client, reference), self._plan
        attributes = self._client.images.get(found).attrs
        labels = attributes["Config"]["Labels"] or {}
        if labels != plan.labels:
            message, hint = "the image is of other inputs than this checkout's", "check its commit out"
            found_, wanted = (
                [f"{name}={value}" for name, value in sorted(one)]
                for one in (labels.items() - plan.labels.items(), plan.labels.items() - labels.items())
            )
            raise MachineError(message, place=reference, found=found_, allowed=wanted, hint=hint)
        own = daemon.image_id(self._client, found)
        self._check_committed(own, attributes["RootFS"]["Layers"], whose="somebody else's build")
        record_built(plan.image, own)
        return self._tagged(found)

    def _known(self) -> str | None:
        """Return what the engine calls the image built here or committed, if its labels are the plan's."""
        known = self._plan.stack.known_ids()
        for found in daemon.labelled_images(self._client, self._plan.stack.inputs_label()) if known else ():
            labels = self._client.images.get(found).attrs["Config"]["Labels"]
            if labels == self._plan.labels and daemon.image_id(self._client, found) in known:
                return found
        return None

    def _archive(self, context: Context, work: Path) -> tuple[Path, str]:
        """Build the archive of the image and return it with its ID."""
        folder, home, file = work / "context", work / "home", work / "image.tar"
        home.mkdir()
        context.write(folder, self._root)
        command = [find_client(self._client), *build_arguments(str(folder), archive=str(file))]
        with self._log.open("w", encoding="utf-8", buffering=1) as log:
            run_build(command, home=home, log=log, say=self._say)
        identity, layers = _contents(file)
        self._check_committed(identity, layers, whose="another engine or file system has built other bytes")
        return file, identity

    def _check_committed(self, found: str, layers: list[str], *, whose: str) -> None:
        """Refuse an image that differs from the committed one of the same inputs; raises MachineError."""
        plan, committed = self._plan, self._plan.stack.committed
        if committed and found != committed.digest:
            pairs = zip(plan.layers, layers, committed.layers, strict=False)
            differ = ", ".join(name for name, own, other in pairs if own != other) or "none"
            raise MachineError(
                "this is not the committed image of the same inputs",
                place=f"{plan.stack.folder}/contents.json: digest",
                found=found,
                allowed=committed.digest,
                hint=f"{whose}; nothing was tagged; layers that differ: {differ}",
            )

    @contextlib.contextmanager
    def _work(self) -> Iterator[Path]:
        """Create a folder for the build; those of killed builds of this stack are removed."""
        prefix = f"building-{self._plan.stack.stack.name}-"
        for stale in cache_root().glob(f"{prefix}*"):
            shutil.rmtree(stale, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=cache_root(), prefix=prefix) as name:
            yield Path(name)

    def _load(self, archive: Path, expected: str) -> BuiltImage:
        """Load the image into the engine."""
        name = self._plan.image
        self._say(f"loading {name}")
        loaded = load(self._client, archive, name=name)
        assert daemon.image_id(self._client, loaded) == expected, "the engine has read another image"
        record_built(name, expected)
        return self._tagged(loaded, fresh=True)

    def _tagged(self, found: str, *, fresh: bool = False) -> BuiltImage:
        """Give an image of the engine the plan's tag."""
        name, image = self._plan.image, self._client.images.get(found)
        image.tag(*name.rsplit(":", 1))
        layers = dict(zip(self._plan.layers, image.attrs["RootFS"]["Layers"], strict=False))
        return BuiltImage(image=name, id=daemon.image_id(self._client, found), fresh=fresh, layers=layers)


def _contents(archive: Path) -> tuple[str, list[str]]:
    """Return ID and layers' digests of an archive; raises MachineError for one that is half written."""

    content = b""
    try:
        with tarfile.open(archive) as tar:
            for name in ("manifest.json", ""):
                stream = tar.extractfile(name or str(json.loads(content)[0]["Config"]))
                content = stream.read() if stream else b""
    except (tarfile.TarError, KeyError, ValueError) as error:
        message, hint = "the engine has written no whole image", "nothing was tagged"
        raise MachineError(message, place=str(archive), found=str(error), hint=hint) from None
    return f"sha256:{sha256_of_bytes(content)}", json.loads(content)["rootfs"]["diff_ids"]


def _save(archive: Path, context: Context, plan: BuildPlan, target: Path) -> None:
    """Give an archive its place, whole or not at all."""
    if target.suffix != ".tar":
        write_wheelhouse(context, plan, target)
        target = target / "image.tar"
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.part")
    try:
        shutil.copyfile(archive, partial)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
