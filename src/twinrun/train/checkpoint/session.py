"""The checkpoints of one run: saved beside the training, resumed from the newest good one."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist

from twinrun.checkpoints import verification
from twinrun.checkpoints.folder import MANIFEST, DamagedError, FolderStore
from twinrun.checkpoints.manifest import FORMAT, CheckpointManifest
from twinrun.foundation.errors import InputError, RunError
from twinrun.protocol.training import TrainingJob, identity
from twinrun.train import rank, ranks
from twinrun.train.checkpoint import state
from twinrun.train.corpus import Corpus
from twinrun.train.metrics import Meter

# Settings of a training that change how a step is computed, and at most its rounding.
LAYOUT = ("reduction", "attention", "activation_checkpointing", "trainer", "compile")


class NoCheckpoints:
    """The checkpoints of a run that keeps none."""

    def resume(self) -> int:
        """Return the steps that are done already, their state restored."""
        return 0

    def after_step(self, step: int) -> None:
        """Save after `step` steps, if it is time."""

    def wait(self) -> None:
        """Return when what was saved is durable."""


class Checkpoints(NoCheckpoints):
    """Saves and resumes one run; every rank calls each method."""

    def __init__(self, job: TrainingJob, *, corpus: Corpus, parts: state.Parts, meter: Meter) -> None:
        """Take the parts of the run as they are after sharding."""
        assert job.checkpointing is not None
        self._job, self._settings = job, job.checkpointing
        self._parts, self._meter = parts, meter
        self._identity, self._layout = identity_of(job, corpus), layout_of(job)
        # Saves run beside the training: their collectives need a group of their own, on CPUs.
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._store = FolderStore(Path(self._settings.place))
        self._staging = state.Staging()
        self._saver = ThreadPoolExecutor(1)
        self._saving: Future[None] | None = None
        self._saved = -1
        self._token: int = self._together(self._claim)
        rank.listen_for_stop()

    def resume(self) -> int:
        """Go on from the newest good checkpoint, if there is one; return the steps that are done.

        A damaged checkpoint is named on stderr and put aside, and the one before it is used.

        Raises:
            InputError: the newest good checkpoint is of another run, or of another layout in mode `exact`.
            RunError: there are checkpoints, and none is good.
        """
        for place in (self._settings.place, self._settings.source):
            store = self._store if place == self._settings.place else place and FolderStore(Path(place))
            steps = self._together(store.steps) if store else []
            if store and (steps or self._together(store.latest) is not None):
                return self._resume_from(store, self._suitable(store, steps))
        if self._settings.begin:
            raise self._nothing_after(self._settings.source or self._settings.place, [])
        return 0

    def _suitable(self, store: FolderStore, steps: list[int]) -> list[int]:
        """Return the steps to choose from: of what a leg goes on from the one after which it begins."""
        begin = self._settings.begin
        if begin is None:
            return steps
        found = [step for step in steps if (step >= begin if store is self._store else step == begin)]
        if not found:
            raise self._nothing_after(store.place, steps)
        return found

    def _nothing_after(self, place: str, steps: list[int]) -> InputError:
        return InputError(
            f"this leg goes on after step {self._settings.begin}",
            place=place,
            found=f"checkpoints after step {', '.join(map(str, steps))}" if steps else "no checkpoint",
            allowed=f"one after step {self._settings.begin}, where the leg before it ends",
        )

    def after_step(self, step: int) -> None:
        """Save when it is time; the state is copied here, and written beside the training.

        Raises:
            StoppedError: a rank was told to end, and what all have done is saved.
            TwinrunError: the save before this one failed, or another run writes here.
        """
        last, stopping = step == self._job.training.steps, self._meter.stopping
        if stopping or last or step % self._settings.steps == 0:
            self._save(step)
        if stopping and not last:
            self.wait()
            raise rank.StoppedError(step)

    def _save(self, step: int) -> None:
        began = time.perf_counter()
        self.wait()
        rank.beat("copies what it saves")
        tensors = self._parts.tensors() | state.history(self._meter)
        save = state.Save(tensors, self._staging.copied)
        self._saved, self._saving = step, self._saver.submit(self._write, step, save)
        # From here on it is written beside the training.
        self._meter.blocked.append(time.perf_counter() - began)

    def wait(self) -> None:
        """Wait until the last save is durable and published; raises TwinrunError where it failed."""
        if self._saving is None:
            return
        rank.beat("waits until it is saved")
        saving, self._saving = self._saving, None
        try:
            saving.result()
        except Exception:
            self._store.abandon(self._saved, self._token)
            raise

    def _write(self, step: int, save: state.Save) -> None:
        """Write a checkpoint beside the training; the first rank publishes it, and retires old ones."""
        parts = save.write(self._store, step=step, token=self._token, group=self._group)
        index = CheckpointManifest(
            format=FORMAT,
            step=step,
            samples=step * self._job.training.global_batch,
            token=self._token,
            identity=self._identity,
            layout=self._layout,
            parts=parts,
            tensors=save.tensors(),
        )

        def publish() -> None:
            self._store.commit(step, self._token, index.text())
            verification.retire(self._store)

        self._together(publish)

    def _resume_from(self, store: FolderStore, steps: list[int]) -> int:
        newest = self._together(store.latest)
        if newest is not None and newest.step not in steps:
            missing = store.file(newest.step, MANIFEST)
            self._say(f"{missing}: missing, though it is the latest; using an older one")
        for name in self._together(store.strays):
            self._say(f"{store.place}/{name}: no name of a checkpoint; left where it is, and not used")
        for step in reversed(steps):
            fault = self._try(store, step)
            if fault is None:
                self._say(f"going on after step {step} of {store.place}")
                return step
            # Checkpoints of another run are left where they are.
            ours = store is self._store
            kept = self._together(functools.partial(store.quarantine, step)) if ours else "left in place"
            before = "there is none before it" if step == steps[0] else "using the checkpoint before it"
            self._say(f"{fault}\n  put aside: {kept}; {before}")
        anew = "choose an empty place to start from step 0"
        hint = anew if store is self._store else "bring it again from where it was saved"
        raise RunError("no checkpoint is good", place=store.place, hint=hint)

    def _try(self, store: FolderStore, step: int) -> str | None:
        """Load a checkpoint; return what is damaged, the same on every rank."""

        def read() -> CheckpointManifest:
            manifest = verification.read_manifest(store, step)
            verification.demand_published_checkpoint(store, manifest)
            return manifest

        try:
            manifest: CheckpointManifest = self._together(read)
            place = store.file(step, MANIFEST)
            self._check_allowed(manifest, place)
            tensors = self._parts.prepare(manifest) | state.history_room(manifest)
            state.check_same(tensors, manifest, place=place)
            ranks.each(lambda: state.load(store, manifest, tensors), self._group)
        except DamagedError as error:
            return str(error)
        self._parts.take(tensors)
        if not weights_alone(manifest):
            self._meter.go_on(state.history_of(tensors))
        return None

    def _claim(self) -> int:
        """Become the writer of the place; a run that may not go on there leaves it to whoever writes."""
        for step in reversed(self._store.steps()):
            with contextlib.suppress(DamagedError):
                manifest = verification.read_manifest(self._store, step)
                self._check_allowed(manifest, self._store.file(step, MANIFEST))
                break
        return self._store.claim(self._job.attempt)

    def _check_allowed(self, manifest: CheckpointManifest, place: str) -> None:
        """Refuse the checkpoint of another run, or of another layout where that must be the same.

        Weights alone, which a conversion has made, only must be of the same model.

        Raises:
            InputError: names the first field that differs, and both sides.
        """
        own = self._identity
        if weights_alone(manifest):
            ours = {name: own.get(name, "nothing") for name in manifest.identity}
            message = "the weights are of another model"
            verification.demand_same_run(manifest.identity, ours, message, place=place)
            return
        # Fields added since the checkpoint was saved take their "absent" value.
        theirs = {name: "None" for name in own if name.startswith("shape.")} | manifest.identity
        verification.demand_same_run(theirs, own, "the checkpoint is of another run", place=place)
        if self._settings.mode == "exact":
            hint = "`--checkpoint mode=bounded` goes on with another layout, inside an envelope of the loss"
            message = "the checkpoint was saved with another layout"
            verification.demand_same_run(manifest.layout, self._layout, message, place=place, hint=hint)

    def _together(self, work: Callable[[], Any]) -> Any:
        return ranks.together(work, self._group)

    def _say(self, text: str) -> None:
        if rank.number() == 0:
            sys.stderr.write(f"checkpoints: {text}\n")


def checkpoints_of(
    job: TrainingJob, *, corpus: Corpus, parts: Callable[[], state.Parts], meter: Meter
) -> NoCheckpoints:
    """Return the checkpoints of `job`, or what saves nothing where it keeps none; every rank calls it.

    Args:
        parts: returns the parts of the run as they are after sharding; may raise InputError.
    """
    meter.keeps_checkpoints = True
    if job.checkpointing is None:
        return NoCheckpoints()
    return Checkpoints(job, corpus=corpus, parts=parts(), meter=meter)


def identity_of(job: TrainingJob, corpus: Corpus) -> dict[str, str]:
    """Return what decides the loss: model, data, its order and the optimizer."""
    tokenizer = corpus.origin.tokenizer_sha256 or corpus.origin.source
    return {**identity(job.shape, job.training), "data": corpus.sha256, "tokenizer": tokenizer}


def weights_alone(manifest: CheckpointManifest) -> bool:
    """Say whether a checkpoint has no state of an optimizer and no steps that are done."""
    return manifest.step == 0


def layout_of(job: TrainingJob) -> dict[str, str]:
    """Return how the work is split over ranks and passes."""
    found = {name: str(getattr(job, name)) for name in ("world_size", "sharding", "microbatch")}
    found |= {name: str(getattr(job.training, name)) for name in LAYOUT}
    return found | ({"layout": job.layout.model_dump_json(exclude_defaults=True)} if job.layout else {})
