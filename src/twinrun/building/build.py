"""A stack's image from its locks: gathered, verified, built stage by stage, loaded layer by layer."""

from __future__ import annotations

import contextlib
import errno
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from filelock import FileLock

from twinrun.building.base import provide_base
from twinrun.building.context import gather, lay_out, unpacked_bytes
from twinrun.building.dockerfile import Settings
from twinrun.building.image import Image, ImageLayer, archive_of
from twinrun.building.making import StageMaker, made_by
from twinrun.building.plan import SOURCE_STAGE, BuildPlan
from twinrun.building.progress import BuildDisplay, megabytes
from twinrun.building.transfer import load
from twinrun.cache import cache_root
from twinrun.errors import MachineError
from twinrun.manifest import Frozen

if TYPE_CHECKING:
    from docker import DockerClient

# What a stage unpacks, the finished layers while they are read in, and those unpacked.
_COPIES_IN_ENGINE = 3
# Processors by the names that engines have for them.
_PROCESSORS = {"x86_64": "amd64", "aarch64": "arm64"}


class BuiltLayer(Frozen):
    """One layer of the image."""

    name: str
    diff_id: str
    bytes: int | None = None
    """Size of the uncompressed tar; None where the engine had the layer."""


class Built(Frozen):
    """An image in the engine."""

    image: str
    id: str
    fresh: bool
    """Something was built; False when the image was there already."""
    layers: tuple[BuiltLayer, ...]


class Builder:
    """Builds one plan in one engine."""

    def __init__(
        self, client: DockerClient, plan: BuildPlan, *, root: Path, log: Path, display: BuildDisplay
    ) -> None:
        self._client = client
        self._plan = plan
        self._root = root
        self._log = log
        self._display = display
        self._needed = 0

    def build(
        self, *, wheelhouse: Path | None = None, base_file: Path | None = None, anew: bool = False
    ) -> Built:
        """Build the image, or as much of it as the engine does not have.

        Args:
            wheelhouse: folder with all packages; nothing is fetched then.
            base_file: the base as a tar.
            anew: build every layer, also those that the engine has.

        Raises:
            InputError: a file is missing or not the locked one; nothing was started.
            MachineError: the engine is for another processor, or a disk is too small; nothing was tagged.
            RunError: a step of the Dockerfile failed.
        """
        self._check_processor()
        cache_root().mkdir(parents=True, exist_ok=True)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(cache_root() / f"build-{self._plan.stack.stack.name}.lock"):
            there = None if anew else self._earlier()
            if there is not None and there["Config"]["Labels"] == self._plan.labels:
                self._client.images.get(there["Id"]).tag(*self._plan.image.rsplit(":", 1))
                return self._built(there["Id"], [_had(diff_id) for diff_id in _diff_ids(there)], fresh=False)
            try:
                with self._log.open("w", encoding="utf-8", buffering=1) as log:
                    if there is not None:
                        return self._source_anew(there, log)
                    return self._everything(log, wheelhouse=wheelhouse, base_file=base_file)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                raise self._full() from None

    def _everything(self, log: IO[str], *, wheelhouse: Path | None, base_file: Path | None) -> Built:
        say = self._display.say
        files = gather(self._plan, root=self._root, wheelhouse=wheelhouse, say=say)
        self._check_space(files)
        base = provide_base(self._client, self._plan, root=self._root, file=base_file, say=say)
        facts = self._client.images.get(base).attrs
        variables = dict(part.split("=", 1) for part in facts["Config"]["Env"] or ())
        settings = self._plan.dockerfile.settings(variables)
        with self._context() as context:
            lay_out(self._plan, context, root=self._root, files=files, wheelhouse=wheelhouse)
            layers = self._maker(context, base, log).layers(self._plan.stages)
            return self._load(settings, [*map(self._base_layer, _diff_ids(facts)), *layers], context)

    def _source_anew(self, there: dict[str, Any], log: IO[str]) -> Built:
        """Put the source of this checkout on the layers of an earlier image of the same environment."""
        stages, diff_ids = self._plan.stages, _diff_ids(there)
        kept = list(map(self._base_layer, diff_ids[: -len(stages)]))
        for stage, diff_id in zip(stages[:-1], diff_ids[-len(stages) : -1], strict=True):
            kept.append(ImageLayer(diff_id=diff_id, made_by=made_by(stage)))
        settings = Settings(
            variables=dict(part.split("=", 1) for part in there["Config"]["Env"]),
            user=there["Config"]["User"],
            folder=there["Config"]["WorkingDir"],
        )
        with self._context() as context:
            lay_out(self._plan, context, root=self._root, files=None)
            layers = self._maker(context, "scratch", log).layers((SOURCE_STAGE,))
            return self._load(settings, [*kept, *layers], context)

    @contextlib.contextmanager
    def _context(self) -> Iterator[Path]:
        """Give a folder to build from, and remove what a killed build of this stack has left."""
        prefix = f"building-{self._plan.stack.stack.name}-"
        for left in cache_root().glob(f"{prefix}*"):
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=cache_root(), prefix=prefix) as name:
            yield Path(name)

    def _maker(self, context: Path, base: str, log: IO[str]) -> StageMaker:
        return StageMaker(
            self._client, self._plan, base=base, context=context, log=log, display=self._display
        )

    def _base_layer(self, diff_id: str) -> ImageLayer:
        return ImageLayer(diff_id=diff_id, made_by=f"base {self._plan.base.name}")

    def _load(self, settings: Settings, layers: list[ImageLayer], context: Path) -> Built:
        """Bring the image into the engine; what had its name before goes, unless it is used."""
        plan = self._plan
        image = Image(
            platform=plan.stack.stack.platform,
            epoch=plan.epoch,
            settings=settings,
            labels=plan.labels,
            layers=tuple(layers),
        )
        before = self._tagged()
        made = [_made(layer) for layer in layers]
        archive = archive_of(image, [plan.image], spent=context)
        found = load(self._client, archive, what="the image", name=plan.image)
        assert found == image.id(), "the engine has read another image than was written"
        if before is not None and before != found:
            self._forget(before)
        return self._built(found, made, fresh=True)

    def _built(self, found: str, layers: list[BuiltLayer], *, fresh: bool) -> Built:
        names = [*["base"] * (len(layers) - len(self._plan.stages)), *self._plan.stages]
        named = [layer.model_copy(update={"name": name}) for name, layer in zip(names, layers, strict=True)]
        return Built(image=self._plan.image, id=found, fresh=fresh, layers=tuple(named))

    def _earlier(self) -> dict[str, Any] | None:
        """Return the facts of an image of the same environment, this source's first."""
        environment = f"dev.twinrun.environment-sha256={self._plan.environment_sha256}"
        images = self._client.images.list(filters={"label": environment})
        tagged = [image for image in images if self._plan.image in image.tags] or images
        return dict(tagged[0].attrs) if tagged else None

    def _tagged(self) -> str | None:
        found = [image.id for image in self._client.images.list(name=self._plan.image)]
        return str(found[0]) if found else None

    def _forget(self, image: str) -> None:
        from docker.errors import APIError

        try:
            if not self._client.images.get(image).tags:
                self._client.images.remove(image)
        except APIError as error:
            # A container of it still runs; its layers are shared anyway.
            self._display.say(f"kept {image[:19]}: {error.explanation}")

    def _check_processor(self) -> None:
        found = self._client.version()["Arch"]
        wanted = self._plan.stack.stack.architecture()
        if _PROCESSORS.get(found, found) != wanted:
            raise MachineError(
                "the engine's processor is not the stack's",
                place=f"{self._plan.stack.folder}/stack.toml:platform",
                found=found,
                allowed=wanted,
                hint="build on a machine of that kind and carry the image over with --save",
            )

    def _check_space(self, files: dict[str, list[Path]]) -> None:
        unpacked = unpacked_bytes(files)
        packed = sum(path.stat().st_size for paths in files.values() for path in paths)
        self._needed = packed + (_COPIES_IN_ENGINE + 1) * unpacked
        if min(shutil.disk_usage(place).free for place in self._places()) < self._needed:
            raise self._full()

    def _places(self) -> list[Path]:
        """Return the engine's folder, where this machine can see it, and ours."""
        engine = Path(self._client.info()["DockerRootDir"])
        return [*([engine] if engine.is_dir() else []), cache_root()]

    def _full(self) -> MachineError:
        free = {place: shutil.disk_usage(place).free for place in self._places()}
        return MachineError(
            "not enough space on the disk",
            place=str(min(free, key=lambda place: free[place])),
            found=", ".join(f"{megabytes(size)} free in {place}" for place, size in free.items()),
            allowed=f"about {megabytes(self._needed)} needed",
            hint="nothing was tagged; `docker builder prune` and `docker image prune` free space",
        )


def _diff_ids(facts: dict[str, Any]) -> list[str]:
    return list(facts["RootFS"]["Layers"])


def _had(diff_id: str) -> BuiltLayer:
    return BuiltLayer(name="", diff_id=diff_id)


def _made(layer: ImageLayer) -> BuiltLayer:
    return BuiltLayer(name="", diff_id=layer.diff_id, bytes=layer.file.stat().st_size if layer.file else None)
