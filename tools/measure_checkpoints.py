"""How fast weights and moments of a model are saved and loaded, beside what PyTorch and the disk do.

`python tools/measure_checkpoints.py FOLDER [--parameters 1315950592] [--device cuda]` saves and loads
the fp32 weights of that many parameters and their two moments, in turns: `torch.save` with fsync, and a
checkpoint of ours with digests, fsync and rename; then reads of the file's bytes into nothing, and loads into
the device that look at no digest and that look at all, from the page cache and from the disk. A line each,
median of the trials. FOLDER needs twice the bytes; what is written is removed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from twinrun.checkpoints.folder import FolderStore
from twinrun.checkpoints.manifest import FORMAT, CheckpointManifest, StoredPart, StoredTensor
from twinrun.checkpoints.safetensors import Entry
from twinrun.checkpoints.store import ReadableFile, Store
from twinrun.checkpoints.verification import read_chunk, read_manifest, threads
from twinrun.train.checkpoint import storage
from twinrun.train.checkpoint.state import Staging
from twinrun.train.checkpoint.storage import Reader, Writer

WIDTH = 2048
COPIES = ("weight", "exp_avg", "exp_avg_sq")
READ_BYTES = 64 << 20
Tensors = dict[str, Tensor]


def main() -> int:
    """Read the command line, and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parameters", type=int, default=1_315_950_592)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--trials", type=int, default=3)
    given = parser.parse_args()
    if not given.folder.is_dir():
        parser.error(f"FOLDER: found {given.folder}, allowed a folder that is there; hint: mkdir")
    if given.parameters < 1 or given.trials < 1:
        parser.error(
            f"found {given.parameters} parameters and {given.trials} trials, allowed 1 or more of each"
        )
    try:
        torch.empty(1, device=given.device)
    except (RuntimeError, AssertionError) as error:
        parser.error(f"--device: found {given.device}, allowed a device of this machine; {error}")
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    try:
        measure(given.folder, state(given.parameters, given.device), device=given.device, trials=given.trials)
    except OSError as error:
        hint = "free some space, or choose a folder that this user can write to"
        parser.exit(
            3, f"error: {given.folder}: {error.strerror}; what was written is removed\nhint: {hint}\n"
        )
    except KeyboardInterrupt:
        parser.exit(130, "stopped; what was written is removed\n")
    return 0


def measure(folder: Path, tensors: Tensors, *, device: str, trials: int) -> None:
    """Save and load in turns, and print what was found."""
    total = sum(tensor.nbytes for tensor in tensors.values())
    print(f"{total / 2**30:.2f} GiB in {len(tensors)} tensors on {device}, torch {torch.__version__}")
    saved: dict[str, list[float]] = {}
    staging = Staging()
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        for trial in range(trials):
            theirs, store = Path(scratch, "theirs.pt"), FolderStore(Path(scratch, f"ours-{trial}"))
            _add(saved, "torch.save and fsync", partial(save_theirs, tensors, theirs))
            theirs.unlink()
            _add(saved, "checkpoint, whole", partial(save, tensors, store, staging=staging, times=saved))
            _add(saved, "read of its bytes", partial(read, store))
            for where in ("page cache", "disk"):
                for how in ("unverified", "verified"):
                    if where == "disk":
                        forget(store)
                    check = read_chunk if how == "verified" else read_unverified
                    with patch.object(storage, "read_chunk", check):
                        _add(saved, f"{how} load from the {where}", partial(load, tensors, store))
            shutil.rmtree(store.place)
    medians = {name: statistics.median(times) for name, times in saved.items()}
    for name, took in medians.items():
        spread = ", ".join(f"{one:.2f}" for one in saved[name])
        print(f"{name}: {took:.2f} s, {total / took / 2**30:.2f} GiB/s ({spread} s)")
    print(f"save over torch.save: {medians['torch.save and fsync'] / medians['checkpoint, whole']:.3f}")
    for where in ("page cache", "disk"):
        share = medians[f"unverified load from the {where}"] / medians[f"verified load from the {where}"]
        print(f"verified load over unverified, from the {where}: {share:.3f}")


def state(parameters: int, device: str) -> Tensors:
    """Return weights and moments in matrices of about the size of a layer's."""
    rows = 4 * WIDTH
    sizes = [(rows, WIDTH)] * (parameters // (rows * WIDTH))
    if rest := parameters % (rows * WIDTH):
        sizes.append((rest, 1))
    return {
        f"{copy}.{number}": torch.randn(size, device=device)
        for copy in COPIES
        for number, size in enumerate(sizes)
    }


def save_theirs(tensors: Tensors, path: Path) -> None:
    """Save as torch.save does, durably."""
    with path.open("wb") as out:
        torch.save(tensors, out)
        os.fsync(out.fileno())


class MeasuredIndex:
    """The index of what is measured."""

    def __init__(self, store: Store, token: int) -> None:
        self._store, self._token = store, token

    def of(self, parts: tuple[StoredPart, ...], tensors: dict[str, StoredTensor]) -> CheckpointManifest:
        names = {"model": "measured"}
        about: dict[str, Any] = {"identity": names, "layout": names, "samples": 0, "previous": None}
        return CheckpointManifest(
            format=FORMAT, step=1, token=self._token, parts=parts, tensors=tensors, **about
        )

    def publish(self, manifest: CheckpointManifest) -> None:
        self._store.commit(1, self._token, manifest.text())


def save(tensors: Tensors, store: Store, *, staging: Staging, times: dict[str, list[float]]) -> None:
    """Save as a run does, and wait until it is durable; what training waits for has a time of its own.

    The first save gets the memory that the others use again.
    """
    token = store.claim("measure")

    writer = Writer(store, step=1, token=token, staging=staging, index=MeasuredIndex(store, token))
    began = time.perf_counter()
    saving = dcp.async_save(dict(tensors), storage_writer=writer)
    times.setdefault("of which training waits", []).append(time.perf_counter() - began)
    saving.result()


def read(store: Store) -> None:
    """Read the bytes of a checkpoint with as many threads as a load has, and look at none."""
    for part in read_manifest(store, 1).parts:
        with (
            Path(store.file(1, part.file)).open("rb", buffering=0) as source,
            ThreadPoolExecutor(threads()) as pool,
        ):
            list(
                pool.map(
                    lambda at, source=source: len(os.pread(source.fileno(), READ_BYTES, at)),
                    range(0, part.bytes, READ_BYTES),
                )
            )


def forget(store: Store) -> None:
    """Take the files of a checkpoint out of the page cache."""
    for part in read_manifest(store, 1).parts:
        with Path(store.file(1, part.file)).open("rb") as source:
            os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_unverified(
    source: ReadableFile, entry: Entry, _chunk: object, room: memoryview, *, place: str
) -> None:
    """Read a part of a tensor and hold it against nothing."""
    assert source.read_into(room, entry.begin) == len(room), place


def load(tensors: Tensors, store: Store) -> None:
    """Load and verify into the tensors."""
    reader = Reader(store, read_manifest(store, 1), tensors)
    dcp.load(dict(tensors), storage_reader=reader)


def _add(saved: dict[str, list[float]], name: str, work: Callable[[], None]) -> None:
    began = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    took = time.perf_counter() - began
    print(f"{name}: {took:.2f} s", file=sys.stderr, flush=True)
    saved.setdefault(name, []).append(took)


if __name__ == "__main__":
    sys.exit(main())
