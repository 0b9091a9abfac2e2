"""Prepared token sequences as the ranks read them: verified, and in one order at any world size."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad
from torch.utils.data import DataLoader, Dataset

from twinrun.foundation.errors import InputError, RunError
from twinrun.foundation.files import sha256_of_file
from twinrun.protocol.training import TrainingJob
from twinrun.train import corpus as corpora
from twinrun.train import rank
from twinrun.train.models import IGNORED

Batch = dict[str, torch.Tensor]

# One canonical node divides any number of nodes, so the order of samples never depends on them.
CANONICAL_NODES = 1
# Samples that are shuffled among each other, as Streaming has it for one canonical node.
SHUFFLE_BLOCK = 4_000_000
Array = np.ndarray[Any, np.dtype[np.int64]]


def load_corpus(job: TrainingJob, *, least: int | None = None) -> corpora.Corpus:
    """Return what is known of the prepared data; the ranks of a node hash its shards together.

    Args:
        least: samples that it must have; a global batch where not given.

    Raises:
        InputError: a file is missing or changed, or the data does not suit the job.
    """
    folder = Path(job.data)
    corpus = corpora.read_corpus(folder)
    _check_suitable(corpus, job, least=least or job.training.global_batch)
    _demand(folder / corpora.INDEX, corpus.index_sha256)
    shards = json.loads((folder / corpora.INDEX).read_text())["shards"]
    if any(shard["column_encodings"] != [corpora.encoding_of(corpus.origin)] for shard in shards):
        raise corpora.damaged(folder / corpora.INDEX)
    # Streaming itself only hashes a shard after a download.
    for shard in shards[rank.variable("LOCAL_RANK", 0) :: rank.variable("LOCAL_WORLD_SIZE", 1)]:
        raw = shard["raw_data"]
        _demand(folder / raw["basename"], raw["hashes"].get("sha256"))
    return corpus


def _demand(file: Path, sha256: str) -> None:
    """Raise InputError where a file of the data is not the one with that digest."""
    if not file.is_file() or sha256_of_file(file) != sha256:
        raise corpora.damaged(file)


class Samples(Dataset[dict[str, Any]]):
    """Prepared samples, each held against its hash at the moment when it is read."""

    def __init__(self, folder: str, corpus: corpora.Corpus) -> None:
        """Read the hashes; raises InputError where they are not those of `corpus`."""
        # Seconds of a processor: only a rank that reads data imports it.
        from streaming.base.format import reader_from_json

        _demand(Path(folder) / corpora.HASHES, corpus.hashes_sha256)
        self._folder, self._hashes = folder, np.fromfile(Path(folder) / corpora.HASHES, corpora.HASH)
        shards = json.loads((Path(folder) / corpora.INDEX).read_text(encoding="utf-8"))["shards"]
        self._readers: list[Any] = [reader_from_json(folder, None, shard) for shard in shards]
        self.shards = [int(one.samples) for one in self._readers]
        self._ends = np.cumsum(self.shards)

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Return the tokens of a sample and their hash; raises RunError where they are not as prepared."""
        place = f"{self._folder}:sample {number}"
        try:
            shard = int(np.searchsorted(self._ends, number, side="right"))
            place_in_shard = number - int(self._ends[shard]) + self.shards[shard]
            tokens_S = self._readers[shard][place_in_shard][corpora.COLUMN].astype(np.int64)
        except (IndexError, MemoryError, OSError, OverflowError, RuntimeError, ValueError) as error:
            raise RunError("cannot be read", place=place, found=repr(error)) from None
        found, allowed = corpora.sample_hash(tokens_S), int(self._hashes[number])
        if found != allowed:
            message = "this sample was changed since the run began"
            raise RunError(message, place=place, found=found, allowed=allowed)
        return {"tokens": tokens_S, "hash": found}


class Order:
    """The samples of each of this rank's batches, as Streaming shares an epoch out to any number of ranks."""

    def __init__(self, job: TrainingJob, shards: Sequence[int]) -> None:
        self._job, self._shards = job, np.array(shards)
        self.epoch = self.skipped = 0
        """The next epoch, and how many of its global batches have been read already."""

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches that are left of the epoch; the next call begins the next one."""
        epoch, skipped = self.epoch, self.skipped
        self.epoch, self.skipped = epoch + 1, 0
        return iter(self._batches(epoch, skipped))

    def _batches(self, epoch: int, skipped: int) -> list[list[int]]:
        from streaming.base.partition import get_partitions
        from streaming.base.shuffle import get_shuffle

        job, batch = self._job, self._job.training.global_batch
        units, samples = self._chosen(epoch)
        ranks = job.world_size // job.replicas
        local = rank.variable("LOCAL_WORLD_SIZE", 1)
        nodes = ranks // local if ranks % local == 0 else 1
        readers = max(1, _workers(job))
        parts = get_partitions(
            "relaxed", len(samples), CANONICAL_NODES, nodes, ranks // nodes, readers, job.device_batch,
            drop_first=skipped * batch, initial_physical_nodes=CANONICAL_NODES,
        )  # fmt: skip
        shuffled = get_shuffle("py1s", units, CANONICAL_NODES, job.training.seed, epoch, SHUFFLE_BLOCK)
        # Of each reader's batches one after another, without those that fill up an epoch.
        mine = parts.reshape(ranks, readers, -1, job.device_batch)[rank.number() // job.replicas]
        read = mine.swapaxes(0, 1).reshape(-1, job.device_batch)
        found: list[list[int]] = samples[shuffled[read[(read >= 0).all(axis=1)]]].tolist()
        return found

    def _chosen(self, epoch: int) -> tuple[Array, Array]:
        """Return how many samples each shard gives to an epoch of whole global batches, and their numbers."""
        from streaming.base.sampling import get_sampling

        seed, batch = self._job.training.seed, self._job.training.global_batch
        draw = np.random.default_rng(seed + epoch)
        whole = int(self._shards.sum()) // batch * batch
        counts = get_sampling(self._shards, whole, 1, seed, epoch, True)
        firsts = np.cumsum(self._shards) - self._shards
        chosen = [
            first + (np.arange(size) if count == size else np.sort(draw.choice(size, count, False)))
            for first, size, count in zip(firsts, self._shards, counts, strict=True)
            if count
        ]
        return counts[counts > 0], np.concatenate(chosen)


def load_batches(job: TrainingJob, corpus: corpora.Corpus) -> DataLoader[Batch]:
    """Return this rank's batches: `tokens` int64 (B, S) and `hashes` int64 (B,).

    Of every global batch a rank gets its share; which samples make up a global batch depends on
    the seed alone.
    """
    samples = Samples(job.data, corpus)
    return DataLoader(
        samples,
        batch_sampler=Order(job, samples.shards),
        collate_fn=functools.partial(collate, control=job.control),
        num_workers=_workers(job),
        pin_memory=job.accelerator,
    )


def _workers(job: TrainingJob) -> int:
    """Return how many processes read ahead."""
    # A worker is a fork: the host would keep the old pages of what the rank writes to afterwards, gradients
    # and masters (50 GiB of MPT-13B's gradients alone).
    offloaded = job.layout is not None and job.layout.offload != "none"
    return 2 if job.accelerator and not offloaded else 0


def set_position(batches: DataLoader[Batch], job: TrainingJob, corpus: corpora.Corpus, *, step: int) -> None:
    """Let `batches` begin where `step` global batches have been read."""
    order: Any = batches.batch_sampler
    order.epoch, order.skipped = divmod(step, corpus.samples // job.training.global_batch)


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
    hashes = torch.tensor([sample["hash"] for sample in samples], dtype=torch.int64)
    return {"tokens": torch.from_numpy(np.stack([sample["tokens"] for sample in samples])), "hashes": hashes}


def _check_suitable(corpus: corpora.Corpus, job: TrainingJob, *, least: int) -> None:
    vocabulary = job.shape.vocabulary
    for what, suits, found, allowed in (
        ("sequence", corpus.sequence == job.shape.sequence, corpus.sequence, job.shape.sequence),
        ("vocabulary", corpus.largest_token < vocabulary, corpus.largest_token, f"below {vocabulary}"),
        ("samples", corpus.samples >= least, corpus.samples, f"at least {least}"),
    ):
        if not suits:
            message, place = "the prepared data does not suit the run", f"{job.data}/{corpora.CORPUS}:{what}"
            raise InputError(message, place=place, found=found, allowed=allowed)
