"""Storage of PyTorch's distributed checkpoint: a safetensors file a rank, described beside it, and an index.

Only tensors are stored: PyTorch would unpickle anything else.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future as Running
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
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
from torch.distributed.tensor import DTensor
from torch.futures import Future

from twinrun.checkpoints.folder import FolderStore, Sink
from twinrun.checkpoints.manifest import CheckpointManifest, Chunk, PartManifest, StoredPart, StoredTensor
from twinrun.checkpoints.parts import (
    Box,
    Piece,
    file_of,
    holders_of,
    parts_for,
    write_part,
)
from twinrun.checkpoints.safetensors import ITEM_BYTES, Entry
from twinrun.checkpoints.verification import entry_of, read_chunk, read_entries, threads
from twinrun.foundation.errors import RunError, TwinrunError
from twinrun.train import rank
from twinrun.train.checkpoint.state import DTYPES, NAMES, Staging

# Tensors up to this size that every rank has are saved by the first one: spread over all ranks, they would
# make each rank read every description.
SMALL_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class WrittenPart:
    """What a rank tells the coordinator."""

    stored: StoredPart
    tensor_bytes: int


class Planner(DefaultSavePlanner):
    """Plans as PyTorch does, and has small tensors that many ranks hold saved by the first of them."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Take small tensors from all ranks but the first, and let PyTorch spread the others."""
        seen: set[MetadataIndex] = set()
        plans = []
        for plan in all_plans:
            kept = [item for item in plan.items if item.index not in seen]
            seen.update(item.index for item in kept if (item.tensor_storage_size() or 0) <= SMALL_BYTES)
            plans.append(replace(plan, items=kept))
        planned: tuple[list[SavePlan], Metadata] = super().create_global_plan(plans)
        return planned


class Writer(StorageWriter, AsyncStager):
    """Writes the files of one checkpoint; `publish` is called once, with its index, when all are durable."""

    def __init__(
        self,
        store: FolderStore,
        *,
        step: int,
        token: int,
        staging: Staging,
        index: Callable[[tuple[StoredPart, ...], dict[str, StoredTensor]], CheckpointManifest],
        publish: Callable[[CheckpointManifest], None],
    ) -> None:
        """Take what makes the index of the parts that were written, and what publishes it."""
        self._store, self._step, self._token = store, step, token
        self._index, self._publish = index, publish
        self._staging = staging
        self._holders: dict[str, tuple[tuple[int, int], ...]] = {}

    def stage(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        return self._staging.copy(state_dict)

    def synchronize_staging(self) -> None:
        """Nothing to wait for: `stage` returns when all is copied."""

    def close(self) -> None:
        """Nothing to close: the memory is the run's."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name, pieces = _name_of(rank.number()), [_piece(item) for item in plan.items]
        _, needed = file_of(pieces)
        self._store.begin(self._step, self._token, needed=needed)
        stored = write_part(
            self._store,
            pieces,
            lambda sink: _write(sink, plan.items, planner),
            step=self._step,
            token=self._token,
            name=name,
        )
        written = WrittenPart(stored=stored, tensor_bytes=sum(piece.entry.bytes for piece in pieces))
        done: Future[list[WriteResult]] = Future()
        # One for all: the coordinator would hold every tensor of every rank.
        done.set_result([WriteResult(index=MetadataIndex(name), size_in_bytes=needed, storage_data=written)])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        written: list[WrittenPart] = [one.storage_data for of_rank in results for one in of_rank]
        tensors = self._tensors(metadata)
        wanted = sum(math.prod(one.shape) * ITEM_BYTES[one.dtype] for one in tensors.values())
        if (found := sum(one.tensor_bytes for one in written)) != wanted:
            raise RunError("not every tensor was saved", found=f"{found} bytes", allowed=f"{wanted} bytes")
        parts = sorted((one.stored for one in written), key=lambda part: part.name)
        self._publish(self._index(tuple(parts), tensors))

    def _tensors(self, metadata: Metadata) -> dict[str, StoredTensor]:
        found = {}
        for name, one in sorted(metadata.state_dict_metadata.items()):
            if not isinstance(one, TensorStorageMetadata):
                raise TwinrunError("only tensors are saved", found=name)
            found[name] = StoredTensor(
                dtype=NAMES[one.properties.dtype], shape=tuple(one.size), holders=self._holders.get(name, ())
            )
        return found

    def reset(self, checkpoint_id: object = None) -> None:
        """Nothing to forget: a writer writes one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *_args: Any, **_options: Any) -> None:
        """Nothing to set up before the size is known."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Note which rank holds what."""
        self._holders = holders_of({item.index.fqn for item in plan.items} for plan in plans)
        return plans

    @classmethod
    def validate_checkpoint_id(cls, _checkpoint_id: object) -> bool:
        return False


class Reader(StorageReader):
    """Reads the tensors of one checkpoint; the bytes that are used are those that were hashed."""

    def __init__(
        self, store: FolderStore, manifest: CheckpointManifest, tensors: Mapping[str, Tensor]
    ) -> None:
        """Take the tensors that are loaded into: what they need says which parts are read."""
        self._store, self._manifest, self._tensors = store, manifest, tensors
        self._parts: dict[int, PartManifest] = {}

    def read_metadata(self, *_args: Any, **_options: Any) -> Metadata:
        """Read the descriptions of the parts that this rank needs; raises DamagedError."""
        needed = {name: _boxes(tensor) for name, tensor in self._tensors.items()}
        size = dist.get_world_size() if dist.is_initialized() else 1
        self._parts = parts_for(self._store, self._manifest, needed, rank=rank.number(), world_size=size)
        chunks: defaultdict[str, list[ChunkStorageMetadata]] = defaultdict(list)
        for part in self._parts.values():
            for name, held in part.tensors.items():
                chunks[name] += [
                    ChunkStorageMetadata(torch.Size(one.offsets), torch.Size(one.sizes)) for one in held
                ]
        described = {
            name: TensorStorageMetadata(
                properties=TensorProperties(dtype=DTYPES[stored.dtype]),
                size=torch.Size(stored.shape),
                chunks=chunks[name],
            )
            for name, stored in self._manifest.tensors.items()
        }
        return Metadata(state_dict_metadata=described)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        wanted: defaultdict[tuple[str, tuple[int, ...]], list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                raise TwinrunError("only tensors are loaded", found=item.storage_index.fqn)
            wanted[item.storage_index.fqn, tuple(item.storage_index.offset or ())].append(item)
        for number, part in self._parts.items():
            of_part = {
                chunk: items
                for name, chunks in part.tensors.items()
                for chunk in chunks
                if (items := wanted.get((name, chunk.offsets)))
            }
            self._read_file(number, of_part, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_file(self, number: int, wanted: dict[Chunk, list[ReadItem]], planner: LoadPlanner) -> None:
        step, stored = self._manifest.step, self._manifest.parts[number]
        header_sha256, place = self._parts[number].header_sha256, self._store.file(step, stored.file)
        with self._store.open(step, stored.file) as source, ThreadPoolExecutor(threads()) as pool:
            entries = read_entries(stored, header_sha256, source, place=place)

            def read(chunk: Chunk) -> None:
                entry = entry_of(chunk, entries, place=place)
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


def _boxes(tensor: Tensor) -> list[Box]:
    """Return which parts of a tensor this rank holds."""
    if isinstance(tensor, DTensor):
        return [Box.at(one.offsets, one.sizes) for one in tensor.__create_chunk_list__()]
    return [Box.at((0,) * tensor.dim(), tuple(tensor.shape))]


def _name_of(rank: int) -> str:
    return f"rank-{rank:05d}"


def _piece(item: WriteItem) -> Piece:
    data = item.tensor_data
    if item.type is WriteItemType.BYTE_IO or data is None:
        raise TwinrunError("only tensors are saved", found=item.index.fqn)
    offsets = tuple(data.chunk.offsets)
    entry = Entry(
        name=f"{item.index.fqn}@{','.join(map(str, offsets))}",
        dtype=NAMES[data.properties.dtype],
        shape=tuple(data.chunk.sizes),
    )
    return Piece(item.index.fqn, offsets, entry)


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


def _copy(data: Tensor, entry: Entry, item: ReadItem, target: Tensor) -> None:
    """Copy what `item` wants of a chunk into `target`, in the order of the device's work."""
    part = data.view(DTYPES[entry.dtype]).view(entry.shape)
    for dimension, (begin, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        part = part.narrow(dimension, begin, length)
    target.copy_(part, non_blocking=True)
