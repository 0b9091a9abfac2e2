"""Builder of a stack's image, stage by stage, unless the image is known: built here, committed or pulled."""

from __future__ import annotations

import contextlib
import errno
import itertools
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

from twinrun.foundation.cache import cache_root
from twinrun.foundation.errors import MachineError, require_equal
from twinrun.foundation.locks import locked
from twinrun.foundation.manifest import Frozen
from twinrun.images.archive import Image, ImageLayer, image_archive, load, pull, remove_image, save
from twinrun.images.buildkit import BuildProgress
from twinrun.images.context import Space, fetch_artifacts, write_context, write_wheelhouse
from twinrun.images.plan import BuildPlan
from twinrun.images.root_filesystem import root_file_system
from twinrun.images.stages import StageBuilder
from twinrun.machine import daemon
from twinrun.manifests.image_identity import record_built

if TYPE_CHECKING:
    from docker import DockerClient

# Machine names of engines to Debian's architectures.
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def find_known(client: DockerClient, plan: BuildPlan) -> str | None:
    """Return what the engine calls the image that was built or is committed, if its labels are the plan's."""
    known = plan.stack.known_ids()
    for found in daemon.labelled_images(client, plan.stack.inputs_label()) if known else ():
        labels = client.images.get(found).attrs["Config"]["Labels"]
        if labels == plan.labels and daemon.image_id(client, found) in known:
            return found
    return None


def pull_known(client: DockerClient, plan: BuildPlan, reference: str) -> str:
    """Pull `repository@sha256:...` and return what the engine calls it; who names a digest vouches for it.

    Raises:
        MachineError: it cannot be pulled, or is not of these inputs; nothing was tagged.
    """
    found = pull(client, reference)
    attributes = client.images.get(found).attrs
    labels = attributes["Config"]["Labels"] or {}
    if labels != plan.labels:
        raise MachineError(
            "the image is of other inputs than this checkout's",
            place=reference,
            found=[f"{name}={value}" for name, value in sorted(labels.items() - plan.labels.items())],
            allowed=[f"{name}={value}" for name, value in sorted(plan.labels.items() - labels.items())],
            hint="check the commit out that it was built of",
        )
    own, hint = daemon.image_id(client, found), "somebody else's build; nothing was tagged"
    check_committed(plan, own, attributes["RootFS"]["Layers"], hint=hint)
    record_built(plan.image, own)
    return found


def check_committed(plan: BuildPlan, found: str, layers: list[str], *, hint: str) -> None:
    """Refuse an image that differs from the committed one of the same inputs; raises MachineError."""
    committed = plan.stack.committed
    if committed and not plan.unverified and found != committed.digest:
        pairs = zip(("base", *plan.stages), layers, committed.layers, strict=False)
        differ = [name for name, own, other in pairs if own != other]
        raise MachineError(
            "this is not the committed image of the same inputs",
            place=f"{plan.stack.folder}/contents.json: digest",
            found=found,
            allowed=committed.digest,
            hint=f"{hint}; layers that differ: {', '.join(differ) or 'none'}",
        )


class BuiltLayer(Frozen):
    """One layer of the image."""

    name: str
    diff_id: str
    bytes: int | None = None
    """Size of the uncompressed tar; None when an earlier build has made it."""


class BuiltImage(Frozen):
    """An image in the engine."""

    image: str
    id: str
    fresh: bool
    """A layer was built; False when the image existed already."""
    layers: tuple[BuiltLayer, ...]


class Builder:
    """Builds one plan in one engine."""

    def __init__(
        self, client: DockerClient, plan: BuildPlan, *, root: Path, log: Path, progress: BuildProgress
    ) -> None:
        self._client = client
        self._plan = plan
        self._root = root
        self._log = log
        self._progress = progress
        self._space = Space(client)

    def build(
        self,
        *,
        wheelhouse: Path | None = None,
        base_file: Path | None = None,
        index: str | None = None,
        save_to: Path | None = None,
        no_cache: bool = False,
    ) -> BuiltImage:
        """Build the image, unless the engine has the one that was built of these inputs.

        Args:
            wheelhouse: folder with all packages; nothing is downloaded then.
            base_file: the base as a tar.
            index: a further package index, as `fetch_artifacts` takes it.
            save_to: archive of the image to write; a name without `.tar` is a folder, which gets all that a
                build needs too.
            no_cache: build it also when the engine has it.

        Raises:
            InputError: a file is missing or not the locked one; nothing was started.
            MachineError: the engine is for another processor, a disk is too small, or what was built is not
                the image that is committed; nothing was tagged.
            RunError: a step of the Dockerfile failed.
        """
        self._check_architecture()
        cache_root().mkdir(parents=True, exist_ok=True)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with locked(cache_root() / f"build-{self._plan.stack.stack.name}.lock"):
            existing = None if no_cache else find_known(self._client, self._plan)
            if existing and not save_to:
                return self._tag(existing)
            try:
                with self._log.open("w", encoding="utf-8", buffering=1) as log:
                    files = self._fetch(wheelhouse=wheelhouse, base_file=base_file, index=index)
                    image = self._build_image(log, files)
                    if save_to:
                        self._save(image, files, save_to)
                    return self._tag(existing) if existing else self._load(image)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                raise self._space.exhausted() from None

    def adopt(self, reference: str) -> BuiltImage:
        """Take the image from a registry instead of building it; raises as `pull_known`."""
        return self._tag(pull_known(self._client, self._plan, reference))

    def _fetch(
        self, *, wheelhouse: Path | None, base_file: Path | None, index: str | None
    ) -> dict[str, list[Path]]:
        """Return the verified files of the image by folder of the context, with the base."""
        say, plan = self._progress.say, self._plan
        files = fetch_artifacts(plan, root=self._root, wheelhouse=wheelhouse, index=index, say=say)
        self._space.require(files)
        return files | {"base": [base_file or root_file_system(plan, root=self._root, say=say)]}

    def _build_image(self, log: IO[str], files: dict[str, list[Path]]) -> Image:
        """Build what the cache lacks; raises MachineError for an image that is not the committed one."""
        plan, (base,) = self._plan, files["base"]
        assert plan.stack.stack.base is not None
        bottom = ImageLayer(
            diff_id=f"sha256:{plan.base}", created_by=f"base debian {plan.stack.stack.base.suite}", file=base
        )
        with self._context() as context:
            write_context(plan, context, root=self._root, files=files)
            stages = StageBuilder(self._client, plan, context=context, log=log, progress=self._progress)
            layers = stages.build_layers(bottom)
        image = Image(
            platform=plan.stack.stack.platform,
            epoch=plan.epoch,
            container_config=plan.dockerfile.container_config(),
            labels=plan.labels,
            layers=tuple(layers),
        )
        hint = "another engine or file system has built other bytes; nothing was tagged"
        check_committed(plan, image.id(), [layer.diff_id for layer in layers], hint=hint)
        return image

    def _save(self, image: Image, files: dict[str, list[Path]], target: Path) -> None:
        if target.suffix != ".tar":
            write_wheelhouse(files, target)
            target = target / "image.tar"
        save(image_archive(image, self._plan.image), target)

    @contextlib.contextmanager
    def _context(self) -> Iterator[Path]:
        """Create a folder for the build context; those of killed builds of this stack are removed."""
        prefix = f"building-{self._plan.stack.stack.name}-"
        for stale in cache_root().glob(f"{prefix}*"):
            shutil.rmtree(stale, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=cache_root(), prefix=prefix) as name:
            yield Path(name)

    def _load(self, image: Image) -> BuiltImage:
        """Load the image into the engine; the one that had its tag is removed unless it is used."""
        plan = self._plan
        previous = daemon.find_image(self._client, self._plan.image)
        loaded = load(self._client, image_archive(image, plan.image), what="the image", name=plan.image)
        found = daemon.image_id(self._client, loaded)
        assert found == image.id(), "the engine has read another image than was written"
        record_built(plan.image, found)
        if previous is not None and previous != loaded:
            self._progress.say(f"{plan.image} was {previous}, is now {loaded}")
            remove_image(self._client, previous, say=self._progress.say, tagged=False)
        sizes = (None if layer.reused else layer.file.stat().st_size for layer in image.layers)
        return self._built_image(found, [layer.diff_id for layer in image.layers], sizes, fresh=True)

    def _built_image(
        self, image_id: str, diff_ids: list[str], sizes: Iterable[int | None], *, fresh: bool
    ) -> BuiltImage:
        rows = zip(("base", *self._plan.stages), diff_ids, sizes, strict=False)
        layers = tuple(BuiltLayer(name=name, diff_id=one, bytes=size) for name, one, size in rows)
        return BuiltImage(image=self._plan.image, id=image_id, fresh=fresh, layers=layers)

    def _tag(self, found: str) -> BuiltImage:
        """Give an image of the engine the plan's tag, and say which other one had it."""
        previous = daemon.find_image(self._client, self._plan.image)
        if previous not in (None, found):
            self._progress.say(f"{self._plan.image} was {previous}, is now {found}")
        image = self._client.images.get(found)
        image.tag(*self._plan.image.rsplit(":", 1))
        diff_ids: list[str] = image.attrs["RootFS"]["Layers"]
        own = daemon.image_id(self._client, found)
        return self._built_image(own, diff_ids, itertools.repeat(None), fresh=False)

    def _check_architecture(self) -> None:
        found = self._client.version()["Arch"]
        require_equal(
            _ARCHITECTURES.get(found, found),
            self._plan.stack.stack.architecture(),
            "the engine's processor is not the stack's",
            place=f"{self._plan.stack.folder}/stack.toml:platform",
            hint="build on a machine of that kind and carry the image over with --save",
            error=MachineError,
        )
