"""The stages of the Dockerfile, each built by the engine and written as one layer."""

from __future__ import annotations

import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeVar

from twinrun.building.engine import StageBuild, build_stage, client_program
from twinrun.building.image import ImageLayer
from twinrun.building.layers import Layer, Listing, read_listing, write_layer
from twinrun.building.plan import CONTEXT, BuildPlan
from twinrun.building.progress import BuildDisplay
from twinrun.building.transfer import exported

if TYPE_CHECKING:
    from docker import DockerClient

T = TypeVar("T")


class StageMaker:
    """Builds stages of one plan from one context."""

    def __init__(
        self,
        client: DockerClient,
        plan: BuildPlan,
        *,
        base: str,
        context: Path,
        log: IO[str],
        display: BuildDisplay,
    ) -> None:
        self._client = client
        self._plan = plan
        self._base = base
        self._program = client_program()
        self._context = context
        self._log = log
        self._display = display
        self._told: set[str] = set()
        self._home = ""

    def layers(self, stages: tuple[str, ...]) -> list[ImageLayer]:
        """Build the stages, of which each stands on the one before, and write their layers into the context.

        Raises:
            RunError: a step failed; names it and its last lines.
            OSError: a disk is full, this machine's or the engine's.
        """
        # The client keeps files of its own, none of them the user's. By one of them the engine knows the
        # context again, and is sent of it only what it does not have.
        with tempfile.TemporaryDirectory(prefix="twinrun-client-") as self._home:
            return self._made(stages)

    def _made(self, stages: tuple[str, ...]) -> list[ImageLayer]:
        made = []
        listing: Listing = {}
        if not all(map(self._plan.alone, stages)):
            with exported(self._client, self._base) as stream:
                listing = read_listing(stream)
        for stage in stages:
            self._display.begin(stage)
            file = self._context / f"{stage}.tar"
            alone = self._plan.alone(stage)
            layer = self._layer(stage, file, {} if alone else listing)
            listing = listing if alone else layer.listing
            self._display.end(stage, size=layer.size, digest=layer.diff_id)
            made.append(ImageLayer(diff_id=layer.diff_id, made_by=made_by(stage), file=file))
        return made

    def _layer(self, stage: str, file: Path, below: Listing) -> Layer:
        also: frozenset[str] = frozenset()
        while True:

            def write(stream: IO[bytes], also: frozenset[str] = also) -> Layer:
                with file.open("wb") as out:
                    return write_layer(
                        stream, out, below=below, epoch=self._plan.epoch, also=also, told=self._grown(stage)
                    )

            layer = self._run(stage, write) if self._plan.alone(stage) else self._kept(stage, write)
            if not layer.unlinked:
                return layer
            also |= layer.unlinked

    def _grown(self, stage: str) -> Callable[[int], None]:
        return lambda size: self._display.grown(stage, size)

    def _kept(self, stage: str, read: Callable[[IO[bytes]], T]) -> T:
        """Build a stage in the engine and return what `read` makes of its root file system."""
        self._run(stage, lambda stream: stream.read())
        image = (self._context / f"{stage}.id").read_text(encoding="utf-8")
        try:
            with exported(self._client, image) as stream:
                return read(stream)
        finally:
            # The engine keeps its steps for the next stage.
            self._client.api.remove_image(image, noprune=True)

    def _run(self, stage: str, read: Callable[[IO[bytes]], T]) -> T:
        """Build a stage and return what `read` makes of what it exports."""
        _, *rest = self._plan.command(stage, self._base)
        arguments = [self._program, *(part.replace(CONTEXT, str(self._context)) for part in rest)]
        with build_stage(arguments, home=self._home, log=self._log, say=self._step_of(stage)) as running:
            return _read(running, read, stage)

    def _step_of(self, stage: str) -> Callable[[str], None]:
        def told(text: str) -> None:
            # How a stage starts is a step for the engine, and steps of the stages before come again.
            if "  FROM " not in text and text not in self._told:
                self._told.add(text)
                self._display.step(stage, text)

        return told


def made_by(stage: str) -> str:
    """Return what the history of the image says of a layer."""
    return f"images/Dockerfile [{stage}]"


def _read(running: StageBuild, read: Callable[[IO[bytes]], T], stage: str) -> T:
    try:
        result = read(running.tar)
    except tarfile.TarError:
        # A build that failed ends its tar early; then that is the error.
        running.finish(stage)
        raise
    running.finish(stage)
    return result
