"""Stages of the Dockerfile, each built by the engine and written as one layer, which the cache keeps."""

from __future__ import annotations

import contextlib
import tarfile
import tempfile
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeVar

from twinrun.foundation.cache import cache_root
from twinrun.foundation.errors import InputError
from twinrun.foundation.files import sha256_of_file, write_atomically
from twinrun.foundation.manifest import Frozen, load_json
from twinrun.images.archive import ImageLayer, export_root, remove_image
from twinrun.images.buildkit import BuildProgress, StageBuild, find_client
from twinrun.images.layers import Layer, Snapshot, read_snapshot, write_layer
from twinrun.images.plan import CONTEXT, BuildPlan
from twinrun.machine.daemon import remove_abandoned

if TYPE_CHECKING:
    from docker import DockerClient

T = TypeVar("T")
# Counts up when the same stage gives another layer than before.
_FORMAT = 1


class KeptLayer(Frozen):
    """The layer of a stage in the cache, and what it was made of."""

    key: str
    diff_id: str
    files: tuple[str, ...] = ()
    """Checksums of the files of the context that the stage takes, sorted."""


class StageBuilder:
    """Builds stages of one plan from one build context."""

    def __init__(
        self, client: DockerClient, plan: BuildPlan, *, context: Path, log: IO[str], progress: BuildProgress
    ) -> None:
        self._client = client
        self._plan = plan
        self._engine = find_client(client)
        self._context = context
        self._log = log
        self._progress = progress
        self._shown_steps: set[str] = set()
        self._home = ""
        self._trees: dict[str, dict[str, str]] = {}

    def build_layers(self, base: ImageLayer) -> list[ImageLayer]:
        """Return the layers of the image, each of the plan's stages built unless the cache has its layer.

        Raises:
            RunError: a step failed; names it and its last lines.
            OSError: a disk is full, this machine's or the engine's.
        """
        for name in remove_abandoned(self._client):
            self._progress.say(f"removed the container {name}, which a killed command had left")
        layers = [base]
        dockerfile = self._plan.dockerfile
        self._trees = dockerfile.file_trees(self._context)
        keys = dockerfile.stage_keys(trees=self._trees, variables=self._plan.variables())
        folder = layer_folder(self._plan)
        folder.mkdir(parents=True, exist_ok=True)
        # The client's own files, none of them the user's. By one of them the engine recognises the context of
        # the stage before, and is sent only what it does not have.
        with tempfile.TemporaryDirectory(prefix="twinrun-client-") as self._home:
            for stage in self._plan.stages:
                key = f"{_FORMAT}-{self._plan.epoch}-{keys[stage]}"
                self._progress.start_layer(stage)
                file, record = folder / f"{stage}.tar", folder / f"{stage}.json"
                kept = _kept_layer(file, record, key)
                diff_id = kept or self._write_layer(stage, file, record, layers, key)
                self._progress.finish_layer(stage, size=file.stat().st_size, digest=diff_id)
                layers.append(
                    ImageLayer(diff_id=diff_id, created_by=created_by(stage), file=file, reused=bool(kept))
                )
        return layers

    def _write_layer(self, stage: str, file: Path, record: Path, below: list[ImageLayer], key: str) -> str:
        """Build a stage and keep its layer; another build of the stack may have left one of other inputs."""
        record.unlink(missing_ok=True)
        from_scratch = self._plan.dockerfile.from_scratch(stage)
        parent = None if from_scratch else read_snapshot([layer.file for layer in below])
        partial_file = file.with_suffix(".new")
        try:
            layer = self._build_layer(stage, partial_file, parent)
            partial_file.replace(file)
        finally:
            partial_file.unlink(missing_ok=True)
        sources = self._plan.dockerfile.stages[stage].sources()
        files = tuple(sorted(digest for source in sources for digest in self._trees[source].values()))
        kept = KeptLayer(key=key, diff_id=layer.diff_id, files=files)
        write_atomically(record, kept.model_dump_json())
        return layer.diff_id

    def _build_layer(self, stage: str, file: Path, parent: Snapshot | None) -> Layer:
        """Build one stage and write its layer; again where a new hard link leads to an unchanged file."""
        as_tar = parent is None and self._engine.exports_tar
        export = self._export_stage if as_tar else self._export_image
        include: frozenset[str] = frozenset()
        while True:

            def write(stream: IO[bytes], include: frozenset[str] = include) -> Layer:
                with file.open("wb") as out:
                    return write_layer(
                        stream,
                        out,
                        parent=parent,
                        epoch=self._plan.epoch,
                        include=include,
                        on_write=partial(self._progress.update_size, stage),
                    )

            layer = export(stage, write)
            if not layer.missing_targets:
                return layer
            include |= layer.missing_targets

    def _export_image(self, stage: str, read: Callable[[IO[bytes]], T]) -> T:
        """Build a stage to an image of the engine and return what `read` makes of its root file system."""
        self._export_stage(stage, lambda stream: stream.read(), as_tar=False)
        image = (self._context / f"{stage}.id").read_text(encoding="utf-8").strip()
        try:
            with export_root(self._client, image) as stream:
                return read(stream)
        finally:
            # The build cache keeps its steps.
            remove_image(self._client, image, say=self._progress.say, noprune=True)

    def _export_stage(self, stage: str, read: Callable[[IO[bytes]], T], *, as_tar: bool = True) -> T:
        """Build a stage and return what `read` makes of what its build writes to stdout."""
        options = self._plan.command(stage, export_tar=as_tar)
        arguments = [*self._engine.command, *(part.replace(CONTEXT, str(self._context)) for part in options)]
        show = partial(self._show_step, stage)
        running = StageBuild(arguments, home=self._home, log=self._log, say=show)
        with contextlib.closing(running):
            return _read(running, read, stage)

    def _show_step(self, stage: str, step: str) -> None:
        # FROM counts as a step, and steps of earlier stages are printed again.
        if "  FROM " not in step and step not in self._shown_steps:
            self._shown_steps.add(step)
            self._progress.step(stage, step)


def layer_folder(plan: BuildPlan) -> Path:
    """Return where the cache keeps the layers that were last built of the plan's stack."""
    return cache_root() / "layers" / plan.stack.stack.name


def created_by(stage: str) -> str:
    """Return the line of the image's history for the layer of a stage."""
    return f"images/Dockerfile [{stage}]"


def files_of(plan: BuildPlan, diff_ids: Collection[str]) -> frozenset[str]:
    """Return the checksums of the files that layers were made of, as far as the cache still knows it."""
    found: set[str] = set()
    for record in layer_folder(plan).glob("*.json"):
        with contextlib.suppress(InputError):
            kept = load_json(record, KeptLayer)
            found.update(kept.files if kept.diff_id in diff_ids else ())
    return frozenset(found)


def _kept_layer(file: Path, record: Path, key: str) -> str | None:
    """Return the digest of the cached layer of a stage, if it was made of the same and is what it was."""
    try:
        kept = load_json(record, KeptLayer)
    except InputError:
        return None
    whole = kept.key == key and file.is_file() and f"sha256:{sha256_of_file(file)}" == kept.diff_id
    return kept.diff_id if whole else None


def _read(running: StageBuild, read: Callable[[IO[bytes]], T], stage: str) -> T:
    try:
        result = read(running.tar)
    except tarfile.TarError:
        # A failed build ends its tar early: the build's error is the one to raise.
        running.finish(stage)
        raise
    running.finish(stage)
    return result
