"""The stages of the Dockerfile, each built by the engine and written as one layer."""

from __future__ import annotations

import functools
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, TypeVar

from twinrun.building.engine import StageBuild, build_stage, client_program
from twinrun.building.image import ImageLayer
from twinrun.building.layers import Layer, Listing, read_listing, write_layer
from twinrun.building.plan import CONTEXT, SOURCE_STAGE, BuildPlan
from twinrun.building.progress import BuildDisplay

T = TypeVar("T")


class StageMaker:
    """Builds stages of one plan from one context."""

    def __init__(
        self, plan: BuildPlan, *, base: str, context: Path, log: IO[str], display: BuildDisplay
    ) -> None:
        self._epoch = plan.epoch
        self._command = functools.partial(plan.command, base=base)
        self._program = client_program()
        self._context = context
        self._log = log
        self._display = display
        self._told: set[str] = set()

    def layers(self, stages: tuple[str, ...]) -> list[ImageLayer]:
        """Build the stages, of which each stands on the one before, and write their layers into the context.

        Raises:
            RunError: a step failed; names it and its last lines.
            OSError: a disk is full, this machine's or the engine's.
        """
        made = []
        listing: Listing = {}
        if stages != (SOURCE_STAGE,):
            listing = self._run("base", read_listing)
        for stage in stages:
            self._display.begin(stage)
            file = self._context / f"{stage}.tar"
            # The source comes without the root file system that it is put on.
            layer = self._layer(stage, file, {} if stage == SOURCE_STAGE else listing)
            listing = layer.listing
            self._display.end(stage, size=layer.size, digest=layer.diff_id)
            made.append(ImageLayer(diff_id=layer.diff_id, made_by=made_by(stage), file=file))
        return made

    def _layer(self, stage: str, file: Path, below: Listing) -> Layer:
        also: frozenset[str] = frozenset()
        while True:

            def write(stream: IO[bytes], also: frozenset[str] = also) -> Layer:
                with file.open("wb") as out:
                    return write_layer(
                        stream, out, below=below, epoch=self._epoch, also=also, told=self._grown(stage)
                    )

            layer = self._run(stage, write)
            if not layer.unlinked:
                return layer
            also |= layer.unlinked

    def _grown(self, stage: str) -> Callable[[int], None]:
        return lambda size: self._display.grown(stage, size)

    def _run(self, stage: str, read: Callable[[IO[bytes]], T]) -> T:
        """Build a stage and return what `read` makes of its root file system."""
        _, *rest = self._command(stage)
        # The client keeps files of its own, none of them the user's.
        with tempfile.TemporaryDirectory(prefix="twinrun-client-") as home:
            arguments = [self._program, *(part.replace(CONTEXT, str(self._context)) for part in rest)]
            say = self._step_of(stage)
            with build_stage(arguments, home=home, log=self._log, say=say) as running:
                return _read(running, read, stage)

    def _step_of(self, stage: str) -> Callable[[str], None]:
        def told(text: str) -> None:
            # How a stage starts is a step for the engine, and steps of the stages before come again.
            if stage != "base" and "  FROM " not in text and text not in self._told:
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
