"""Storage of PyTorch's distributed checkpoint: a safetensors file a rank, one manifest, digests for all.

Only tensors are stored: PyTorch would unpickle anything else.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future as Running
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from twinrun.checkpoints.manifest import CheckpointManifest, Chunk, StoredFile, StoredTensor
from twinrun.checkpoints.safetensors import Entry, header_of
from twinrun.checkpoints.store import Sink, Store
from twinrun.checkpoints.verification import entry_of, read_chunk, read_entries, threads
from twinrun.foundation.errors import TwinrunError
from twinrun.train import ranks
from twinrun.train.checkpoint.state import DTYPES, NAMES, Staging

Publish = Callable[[tuple[StoredFile, ...], dict[str, StoredTensor]], None]


@dataclass(frozen=True, kw_only=True)
class TensorPart:
    """What a rank tells the coordinator of one part of a tensor."""

    tensor: str
    shape: tuple[int, ...]
    dtype: str
    chunk: Chunk
    file: StoredFile


class Writer(StorageWriter, AsyncStager):
    """Writes the files of one checkpoint; `publish` is called once, when all are durable."""

    def __init__(self, store: Store, *, step: int, token: int, staging: Staging, publish: Publish) -> None:
        self._store, self._step, self._token, self._publish = store, step, token, publish
        self._staging = staging

    def stage(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        return self._staging.copy(state_dict)

    def synchronize_staging(self) -> None:
        """Nothing to wait for: `stage` returns when all is copied."""

    def close(self) -> None:
        """Nothing to close: the memory is the run's."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name = f"rank-{ranks.rank():05d}.safetensors"
        entries = [_entry(item) for item in plan.items]
        header = header_of(entries)
        needed = len(header) + sum(entry.bytes for entry in entries)
        self._store.begin(self._step, self._token, needed=needed)
        with self._store.create(self._step, self._token, name) as sink:
            sink.write(header)
            digests = _write(sink, plan.items, planner)
        file = StoredFile(name=name, bytes=needed, header_sha256=hashlib.sha256(header).hexdigest())
        done: Future[list[WriteResult]] = Future()
        done.set_result(
            [
                _result(item, entry, digest=digest, file=file)
                for item, entry, digest in zip(plan.items, entries, digests, strict=True)
            ]
        )
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:  # noqa: ARG002
        written: list[TensorPart] = [one.storage_data for of_rank in results for one in of_rank]
        parts: defaultdict[str, list[TensorPart]] = defaultdict(list)
        for one in written:
            parts[one.tensor].append(one)
        tensors = {
            name: StoredTensor(
                dtype=found[0].dtype, shape=found[0].shape, chunks=tuple(one.chunk for one in found)
            )
            for name, found in sorted(parts.items())
        }
        files = {one.file.name: one.file for one in written}
        self._publish(tuple(files[name] for name in sorted(files)), tensors)

    def reset(self, checkpoint_id: object = None) -> None:
        """Nothing to forget: a writer writes one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *_args: Any, **_options: Any) -> None:
        """Nothing to set up before the size is known."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, _checkpoint_id: object) -> bool:
        return False


class Reader(StorageReader):
    """Reads the tensors of one manifest; the bytes that are used are those that were hashed."""

    def __init__(self, store: Store, manifest: CheckpointManifest) -> None:
        self._store, self._manifest = store, manifest
        self._chunks = {
            (name, chunk.offsets): chunk
            for name, tensor in manifest.tensors.items()
            for chunk in tensor.chunks
        }

    def read_metadata(self, *_args: Any, **_options: Any) -> Metadata:
        described = {
            name: TensorStorageMetadata(
                properties=TensorProperties(dtype=DTYPES[tensor.dtype]),
                size=torch.Size(tensor.shape),
                chunks=[
                    ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
                    for chunk in tensor.chunks
                ],
            )
            for name, tensor in self._manifest.tensors.items()
        }
        return Metadata(state_dict_metadata=described)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        wanted: defaultdict[Chunk, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                raise TwinrunError("only tensors are loaded", found=item.storage_index.fqn)
            wanted[self._chunks[item.storage_index.fqn, tuple(item.storage_index.offset)]].append(item)
        for file in self._manifest.files:
            self._read_file(
                file, {chunk: wanted[chunk] for chunk in wanted if chunk.file == file.name}, planner
            )
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_file(self, file: StoredFile, wanted: dict[Chunk, list[ReadItem]], planner: LoadPlanner) -> None:
        step, place = self._manifest.step, self._store.file(self._manifest.step, file.name)
        with self._store.open(step, file.name) as source, ThreadPoolExecutor(threads()) as pool:
            entries = read_entries(self._store, step, file, source)

            def read(chunk: Chunk) -> None:
                entry = entry_of(chunk, entries, source, place=place)
                targets = [planner.resolve_tensor(item).detach() for item in wanted[chunk]]
                # From pinned memory a device reads itself; PyTorch keeps it for the next chunk.
                pinned = any(target.device.type != "cpu" for target in targets)
                data = torch.empty(entry.bytes, dtype=torch.uint8, pin_memory=pinned)
                read_chunk(source, entry, chunk, memoryview(data.numpy()), place=place)
                for item, target in zip(wanted[chunk], targets, strict=True):
                    _copy(data, entry, item, target)
                    planner.commit_tensor(item, target)

            list(pool.map(read, wanted))

    def reset(self, checkpoint_id: object = None) -> None:
        """Nothing to forget: a reader reads one checkpoint."""

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_args: Any, **_o: Any) -> None:
        """Nothing to set up: the manifest is known."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, _checkpoint_id: object) -> bool:
        return False


def _entry(item: WriteItem) -> Entry:
    data = item.tensor_data
    if item.type is WriteItemType.BYTE_IO or data is None:
        raise TwinrunError("only tensors are saved", found=item.index.fqn)
    offsets = ",".join(map(str, data.chunk.offsets))
    return Entry(
        name=f"{item.index.fqn}@{offsets}",
        dtype=NAMES[data.properties.dtype],
        shape=tuple(data.chunk.sizes),
    )


def _write(sink: Sink, items: Sequence[WriteItem], planner: SavePlanner) -> list[str]:
    """Write the tensors one after the other; a thread hashes what is being written."""
    digests: list[Running[str]] = []
    ahead = threads()
    with ThreadPoolExecutor(ahead) as pool:
        for number, item in enumerate(items):
            data = _bytes_of(planner.resolve_data(item))
            digests.append(pool.submit(_sha256, data))
            sink.write(data)
            if number >= ahead:
                # Copies from a device stay in memory until they are hashed.
                digests[number - ahead].result()
    return [one.result() for one in digests]


def _bytes_of(tensor: Any) -> memoryview:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")


def _sha256(data: memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def _result(item: WriteItem, entry: Entry, *, digest: str, file: StoredFile) -> WriteResult:
    assert item.tensor_data is not None
    chunk = Chunk(
        file=file.name,
        key=entry.name,
        offsets=tuple(item.tensor_data.chunk.offsets),
        sizes=entry.shape,
        sha256=digest,
    )
    written = TensorPart(
        tensor=item.index.fqn,
        shape=tuple(item.tensor_data.size),
        dtype=entry.dtype,
        chunk=chunk,
        file=file,
    )
    index = MetadataIndex(item.index.fqn, item.index.offset, item.index.index)
    return WriteResult(index=index, size_in_bytes=entry.bytes, storage_data=written)


def _copy(data: Tensor, entry: Entry, item: ReadItem, target: Tensor) -> None:
    """Copy what `item` wants of a chunk into `target`, in the order of the device's work."""
    part = data.view(DTYPES[entry.dtype]).view(entry.shape)
    for dimension, (begin, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        part = part.narrow(dimension, begin, length)
    target.copy_(part, non_blocking=True)
