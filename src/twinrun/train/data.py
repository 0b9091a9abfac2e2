"""Prepared token sequences as the ranks read them: verified, and in one order at any world size."""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from streaming.base.dataset import StreamingDataset
from streaming.base.shared import prefix
from torch.nn.functional import pad
from torch.utils.data import DataLoader

from twinrun.foundation.errors import InputError, RunError
from twinrun.foundation.files import sha256_of_bytes, sha256_of_file
from twinrun.protocol.training import TrainingJob
from twinrun.train import ranks
from twinrun.train.corpus import (
    COLUMN,
    CORPUS,
    HASH,
    HASHES,
    INDEX,
    Corpus,
    damaged,
    encoding_of,
    read_corpus,
    sample_hash,
)
from twinrun.train.job_files import rank_variable
from twinrun.train.models import IGNORED

Batch = dict[str, torch.Tensor]

# One canonical node divides any number of nodes, so the order of samples never depends on them.
CANONICAL_NODES = 1
# Changes of this module to Streaming, as the record names them.
STREAMING_CHANGES = {
    "streaming": "its search for free names of shared memory begins at a number drawn by the run, not at 0"
}
# Two runs of a machine draw the same number once in 10^14 times.
_NAME_BITS = 48


def load_corpus(job: TrainingJob, *, least: int | None = None) -> Corpus:
    """Return what is known of the prepared data; the ranks of a node hash its shards together.

    Args:
        least: samples that it must have; a global batch where not given.

    Raises:
        InputError: a file is missing or changed, or the data does not suit the job.
    """
    folder = Path(job.data)
    corpus = read_corpus(folder)
    _check_suitable(corpus, job, least=least or job.training.global_batch)
    index = folder / INDEX
    if not index.is_file() or sha256_of_file(index) != corpus.index_sha256:
        raise damaged(index)
    rank, ranks = rank_variable("LOCAL_RANK", 0), rank_variable("LOCAL_WORLD_SIZE", 1)
    shards = json.loads(index.read_text())["shards"]
    if any(shard["column_encodings"] != [encoding_of(corpus.origin)] for shard in shards):
        raise damaged(index)
    for shard in shards[rank::ranks]:
        _verify(folder, shard)
    return corpus


class Samples(StreamingDataset):
    """Prepared samples, each held against its hash at the moment when it is read."""

    def __init__(self, folder: str, corpus: Corpus, **options: Any) -> None:
        """Read the hashes; raises InputError where they are not those of `corpus`."""
        path = Path(folder) / HASHES
        content = path.read_bytes() if path.is_file() else b""
        if sha256_of_bytes(content) != corpus.hashes_sha256:
            raise damaged(path)
        self._folder = folder
        self._hashes: Any = np.frombuffer(content, HASH)
        with _names_of_this_run():
            super().__init__(local=folder, remote=None, **options)
        for path in (self._shared_barrier.filelock_path, self._cache_filelock_path):
            # Locks stay on disk when they are released, and nobody will draw their names again.
            atexit.register(Path(path).unlink, missing_ok=True)

    def get_item(self, sample_id: int, retry: int = 7) -> dict[str, Any]:
        """Return the tokens of a sample and their hash; raises RunError where they are not as prepared."""
        place = f"{self._folder}:sample {sample_id}"
        try:
            tokens_S = super().get_item(sample_id, retry)[COLUMN].astype(np.int64)
        except (IndexError, MemoryError, OSError, OverflowError, RuntimeError, ValueError) as error:
            raise RunError("cannot be read", place=place, found=repr(error)) from None
        found, allowed = sample_hash(tokens_S), int(self._hashes[sample_id])
        if found != allowed:
            message = "this sample was changed since the run began"
            raise RunError(message, place=place, found=found, allowed=allowed)
        return {"tokens": tokens_S, "hash": found}


@contextlib.contextmanager
def _names_of_this_run() -> Iterator[None]:
    """Let Streaming look for free names from a number on that all ranks of this run have, and no other run.

    From 0 on, two runs that begin together find the same name free, and a name that a third run gives back
    meanwhile is free for some ranks only: either ends the run.
    """
    first = ranks.from_first(secrets.randbits(_NAME_BITS))
    found, prefix._each_prefix_int = prefix._each_prefix_int, functools.partial(itertools.count, first)
    try:
        yield
    finally:
        prefix._each_prefix_int = found


def load_batches(job: TrainingJob, corpus: Corpus) -> DataLoader[Batch]:
    """Return this rank's batches: `tokens` int64 (B, S) and `hashes` int64 (B,).

    Of every global batch a rank gets its share; which samples make up a global batch depends on
    the seed alone.
    """
    batch = job.training.global_batch
    dataset = Samples(
        job.data,
        corpus,
        shuffle=True,
        shuffle_algo="py1s",
        shuffle_seed=job.training.seed,
        num_canonical_nodes=CANONICAL_NODES,
        batch_size=job.device_batch,
        replication=job.replicas if job.replicas > 1 else None,
        # Whole global batches: an epoch ends at the same step at every world size.
        epoch_size=corpus.samples // batch * batch,
    )
    return DataLoader(
        dataset,
        batch_size=job.device_batch,
        collate_fn=functools.partial(collate, control=job.control),
        num_workers=_workers(job),
        pin_memory=job.accelerator,
        drop_last=True,
    )


def _workers(job: TrainingJob) -> int:
    """Return how many processes read ahead."""
    # A worker is a fork: the host would keep the old pages of what the rank writes to afterwards, gradients
    # and masters (50 GiB of MPT-13B's gradients alone).
    offloaded = job.layout is not None and job.layout.offload != "none"
    return 2 if job.accelerator and not offloaded else 0


def set_position(batches: DataLoader[Batch], job: TrainingJob, corpus: Corpus, *, step: int) -> None:
    """Let `batches` begin where `step` global batches have been read."""
    batch = job.training.global_batch
    epoch, in_epoch = divmod(step, corpus.samples // batch)
    if step:
        batches.dataset.load_state_dict(
            {
                "epoch": epoch,
                "sample_in_epoch": in_epoch * batch,
                "num_canonical_nodes": CANONICAL_NODES,
                "shuffle_seed": job.training.seed,
                "initial_physical_nodes": CANONICAL_NODES,
            }
        )


def targets_of(tokens_BS: torch.Tensor) -> torch.Tensor:
    """Return the token after each; after the last of a sequence there is none."""
    return pad(tokens_BS[:, 1:], (0, 1), value=IGNORED)


def collate(samples: list[dict[str, Any]], *, control: int = 0) -> Batch:
    """Stack samples and their hashes; this runs in the loader's workers, beside the training.

    Args:
        control: a control run has the samples in another order, which changes in what order they are summed.
    """
    if control:
        # In each step another one: few samples have few orders, of which one is the run's own.
        draw = np.random.default_rng([control, *(sample["hash"] % 2**32 for sample in samples)])
        samples = [samples[place] for place in draw.permutation(len(samples))]
    return {
        "tokens": torch.from_numpy(np.stack([sample["tokens"] for sample in samples])),
        "hashes": torch.tensor([sample["hash"] for sample in samples], dtype=torch.int64),
    }


def _check_suitable(corpus: Corpus, job: TrainingJob, *, least: int) -> None:
    for what, found, allowed, suits in (
        ("sequence", corpus.sequence, job.shape.sequence, corpus.sequence == job.shape.sequence),
        (
            "vocabulary",
            corpus.largest_token,
            f"below {job.shape.vocabulary}",
            corpus.largest_token < job.shape.vocabulary,
        ),
        ("samples", corpus.samples, f"at least {least}", corpus.samples >= least),
    ):
        if not suits:
            raise InputError(
                "the prepared data does not suit the run",
                place=f"{job.data}/{CORPUS}:{what}",
                found=found,
                allowed=allowed,
            )


def _verify(folder: Path, shard: dict[str, Any]) -> None:
    """Hash a shard that is already on disk, which streaming itself only does after a download."""
    raw = shard["raw_data"]
    path = folder / raw["basename"]
    if not path.is_file() or path.stat().st_size != raw["bytes"]:
        raise damaged(path)
    if sha256_of_file(path) != raw["hashes"].get("sha256"):
        raise damaged(path)
