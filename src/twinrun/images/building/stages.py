"""Stages of the Dockerfile, each built by the engine and written as one layer."""

from __future__ import annotations

import tarfile
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeVar

from twinrun.images.building.buildkit import StageBuild, build_stage, find_client
from twinrun.images.building.image_archive import ImageLayer
from twinrun.images.building.layers import Layer, Snapshot, read_snapshot, write_layer
from twinrun.images.building.plan import CONTEXT, BuildPlan
from twinrun.images.building.progress import BuildProgress
from twinrun.images.building.transfer import export_root

if TYPE_CHECKING:
    from docker import DockerClient

T = TypeVar("T")


class StageBuilder:
    """Builds stages of one plan from one build context."""

    def __init__(
        self,
        client: DockerClient,
        plan: BuildPlan,
        *,
        base: str,
        context: Path,
        log: IO[str],
        progress: BuildProgress,
    ) -> None:
        self._client = client
        self._plan = plan
        self._base = base
        self._program = find_client()
        self._context = context
        self._log = log
        self._progress = progress
        self._shown_steps: set[str] = set()
        self._home = ""

    def build_layers(self, stages: tuple[str, ...]) -> list[ImageLayer]:
        """Build the stages, each on the one before, and write their layers into the context.

        Raises:
            RunError: a step failed; names it and its last lines.
            OSError: a disk is full, this machine's or the engine's.
        """
        snapshot: Snapshot = {}
        layers = []
        # The client's own files, none of them the user's. By one of them the engine recognises the context of
        # the stage before, and is sent only what it does not have.
        with tempfile.TemporaryDirectory(prefix="twinrun-client-") as self._home:
            if not all(map(self._plan.from_scratch, stages)):
                with export_root(self._client, self._base) as stream:
                    snapshot = read_snapshot(stream)
            for stage in stages:
                self._progress.start_layer(stage)
                file = self._context / f"{stage}.tar"
                from_scratch = self._plan.from_scratch(stage)
                layer = self._build_layer(stage, file, {} if from_scratch else snapshot)
                snapshot = snapshot if from_scratch else layer.snapshot
                self._progress.finish_layer(stage, size=layer.size, digest=layer.diff_id)
                layers.append(ImageLayer(diff_id=layer.diff_id, created_by=created_by(stage), file=file))
        return layers

    def _build_layer(self, stage: str, file: Path, parent: Snapshot) -> Layer:
        """Build one stage and write its layer; again where a new hard link leads to an unchanged file."""
        export = self._export_stage if self._plan.from_scratch(stage) else self._export_image
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
        self._export_stage(stage, lambda stream: stream.read())
        image = (self._context / f"{stage}.id").read_text(encoding="utf-8")
        try:
            with export_root(self._client, image) as stream:
                return read(stream)
        finally:
            # The build cache keeps the steps for the next stage.
            self._client.api.remove_image(image, noprune=True)

    def _export_stage(self, stage: str, read: Callable[[IO[bytes]], T]) -> T:
        """Build a stage and return what `read` makes of the tar that it exports."""
        _, *rest = self._plan.command(stage, self._base)
        arguments = [self._program, *(part.replace(CONTEXT, str(self._context)) for part in rest)]
        show = partial(self._show_step, stage)
        with build_stage(arguments, home=self._home, log=self._log, say=show) as running:
            return _read(running, read, stage)

    def _show_step(self, stage: str, step: str) -> None:
        # FROM counts as a step, and steps of earlier stages are printed again.
        if "  FROM " not in step and step not in self._shown_steps:
            self._shown_steps.add(step)
            self._progress.step(stage, step)


def created_by(stage: str) -> str:
    """Return the line of the image's history for the layer of a stage."""
    return f"images/Dockerfile [{stage}]"


def _read(running: StageBuild, read: Callable[[IO[bytes]], T], stage: str) -> T:
    try:
        result = read(running.tar)
    except tarfile.TarError:
        # A failed build ends its tar early: the build's error is the one to raise.
        running.finish(stage)
        raise
    running.finish(stage)
    return result
