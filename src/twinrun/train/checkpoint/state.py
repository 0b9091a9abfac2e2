"""The tensors of a run, by names that are the same however it is sharded and whatever trains it."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from twinrun.checkpoints.folder import FolderStore, Sink
from twinrun.checkpoints.manifest import CheckpointManifest, Chunk, StoredPart, StoredTensor
from twinrun.checkpoints.parts import Box, Piece, file_of, parts_for, write_part
from twinrun.checkpoints.safetensors import Entry
from twinrun.checkpoints.verification import entry_of, read_chunk, read_entries, threads
from twinrun.foundation.errors import InputError, RunError
from twinrun.train import rank, ranks
from twinrun.train.metrics import Meter

try:
    from torch.distributed.tensor import DTensor
except ImportError:
    # Where PyTorch before 2.5 has it.
    from torch.distributed._tensor import DTensor

MODEL, OPTIMIZER, HISTORY = "model.", "optimizer.", "history."
# A wrapper adds these to the name of a parameter.
WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


class Parts(Protocol):
    """Weights and optimizer state of a run, whoever trains it; every rank calls each method."""

    def tensors(self) -> dict[str, Tensor]:
        """Return what a run goes on from."""

    def prepare(self, manifest: CheckpointManifest) -> dict[str, Tensor]:
        """Return room for what `manifest` has of it."""

    def take(self, tensors: dict[str, Tensor]) -> None:
        """Go on from what was loaded into that room."""


class InPlaceState:
    """A model and its optimizer, whose own tensors are saved and loaded into."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, taken: Callable[[], None] = lambda: None
    ) -> None:
        """Take what is saved, and what is called once it has been loaded."""
        self._model, self._optimizer, self._taken = model, optimizer, taken

    def tensors(self) -> dict[str, Tensor]:
        """Return all that a run goes on from, in the memory where it is; settings are no part of it."""
        state = {MODEL + _plain(name): tensor for name, tensor in self._model.state_dict().items()}
        for name, parameter in self._model.named_parameters():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                state[f"{OPTIMIZER}{_plain(name)}.{key}"] = value
        return state

    def prepare(self, manifest: CheckpointManifest) -> dict[str, Tensor]:
        """Make the optimizer state that `manifest` has, and return all tensors to load into."""
        groups = {one: group for group in self._optimizer.param_groups for one in group["params"]}
        for name, parameter in self._model.named_parameters():
            prefix = f"{OPTIMIZER}{_plain(name)}."
            self._optimizer.state[parameter] = {
                key.removeprefix(prefix): _empty(one, parameter, groups[parameter])
                for key, one in manifest.tensors.items()
                if key.startswith(prefix)
            }
        return self.tensors()

    def take(self, tensors: dict[str, Tensor]) -> None:  # noqa: ARG002 - they are in place
        """Go on: the tensors are the run's own."""
        self._taken()


def history(meter: Meter) -> dict[str, Tensor]:
    """Return the steps so far, by the names that they are saved under."""
    return {HISTORY + name: values for name, values in meter.history().items()}


def history_room(manifest: CheckpointManifest) -> dict[str, Tensor]:
    """Return room for the steps that `manifest` has."""
    return {
        name: torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
        for name, stored in manifest.tensors.items()
        if name.startswith(HISTORY)
    }


def history_of(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what `Meter.history` returned when the state was saved."""
    return {name.removeprefix(HISTORY): one for name, one in state.items() if name.startswith(HISTORY)}


def check_same(state: dict[str, Tensor], manifest: CheckpointManifest, *, place: str) -> None:
    """Refuse a checkpoint whose tensors are not those of this run; raises InputError naming the first."""
    ours = {name: f"{NAMES[tensor.dtype]} {list(tensor.shape)}" for name, tensor in state.items()}
    theirs = {name: f"{one.dtype} {list(one.shape)}" for name, one in manifest.tensors.items()}
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            found, allowed = (one.get(name, "no such tensor") for one in (theirs, ours))
            message = "the checkpoint is of another model or optimizer"
            raise InputError(message, place=f"{place}:{name}", found=found, allowed=allowed)


def _plain(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _empty(stored: StoredTensor, parameter: Tensor, group: dict[str, Any]) -> Tensor:
    """Return room for a part of the optimizer state: like its parameter, or a count of steps."""
    if stored.shape == tuple(parameter.shape):
        return torch.zeros_like(parameter, dtype=DTYPES[stored.dtype])
    on_device = group.get("fused") or group.get("capturable")
    device = parameter.device if on_device and math.prod(stored.shape) == 1 else torch.device("cpu")
    return torch.zeros(stored.shape, dtype=DTYPES[stored.dtype], device=device)


class Staging:
    """The copies of one run on the host; the save before must be written when the next is copied."""

    def __init__(self) -> None:
        # Pinned memory takes seconds to get, and memory that was written to before is copied into at several
        # times the rate of new pages.
        self._rooms: dict[str, Tensor] = {}

    def copied(self, name: str, tensor: Tensor) -> Tensor:
        """Return a copy of `tensor` on the host; from a device it is whole when that has done its work."""
        room = self._rooms.get(name)
        if room is None or room.shape != tensor.shape or room.dtype != tensor.dtype:
            kind = {"dtype": tensor.dtype, "pin_memory": tensor.is_cuda}
            room = self._rooms[name] = torch.empty(tensor.shape, **kind)
        return room.copy_(tensor, non_blocking=True)


# What a rank writes of a run's tensors and reads again: a safetensors file a rank, described beside it.
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPES |= {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}
DTYPES |= {"BOOL": torch.bool}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
# Tensors up to this size that every rank has are saved by the first one: spread over all ranks, they would
# make each rank read every description.
SMALL_BYTES = 1 << 16


class Local(NamedTuple):
    """What this rank holds of a tensor, and where in the whole that begins."""

    offsets: tuple[int, ...]
    data: Tensor

    @property
    def box(self) -> Box:
        """The part of the tensor that is held."""
        return Box.at(self.offsets, tuple(self.data.shape))


def local_of(tensor: Tensor) -> Local:
    """Return what this rank holds of a tensor, in the memory where it is."""
    if isinstance(tensor, DTensor):
        (chunk,) = tensor.__create_chunk_list__()
        return Local(tuple(chunk.offsets), tensor.to_local().detach())
    return Local((0,) * tensor.dim(), tensor.detach())


class Save:
    """The copy of a run's tensors that is written beside the training."""

    def __init__(self, tensors: Mapping[str, Tensor], copied: Callable[[str, Tensor], Tensor]) -> None:
        """Copy what this rank writes by `copied`, which takes name and tensor."""
        size = dist.get_world_size() if dist.is_initialized() else 1
        self._size, self._writers = size, writers_of(tensors, size)
        self._pieces, self._data = list[Piece](), list[Tensor]()
        for name, tensor in tensors.items():
            if self._writers[name] in (rank.number(), None):
                offsets, data = local_of(tensor)
                key = f"{name}@{','.join(map(str, offsets))}"
                entry = Entry(name=key, dtype=NAMES[data.dtype], shape=tuple(data.shape))
                self._pieces.append(Piece(name, offsets, entry))
                self._data.append(copied(name, data))
        named = sorted(tensors.items())
        self._described = {name: (NAMES[one.dtype], tuple(one.shape)) for name, one in named}
        self._bytes = sum(one.numel() * one.element_size() for one in tensors.values())
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()

    def write(
        self, store: FolderStore, *, step: int, token: int, group: dist.ProcessGroup | None
    ) -> tuple[StoredPart, ...]:
        """Write this rank's part, durable; return the parts of all, or raise the error of one on all."""

        def write() -> tuple[StoredPart, int]:
            store.begin(step, token, needed=file_of(self._pieces)[1])
            name = f"rank-{rank.number():05d}"
            stored = write_part(store, self._pieces, self._put, step=step, token=token, name=name)
            return stored, sum(piece.entry.bytes for piece in self._pieces)

        written = ranks.each(write, group)
        if (found := sum(count for _, count in written)) != self._bytes:
            message = "not every tensor was saved"
            raise RunError(message, found=f"{found} bytes", allowed=f"{self._bytes} bytes")
        return tuple(stored for stored, _ in written)

    def tensors(self) -> dict[str, StoredTensor]:
        """Return what the index says of the tensors."""
        found = {}
        for name, (dtype, shape) in self._described.items():
            one = self._writers[name]
            holders = ((0, self._size - 1) if one is None else (one, one),)
            found[name] = StoredTensor(dtype=dtype, shape=shape, holders=holders)
        return found

    def _put(self, sink: Sink) -> list[str]:
        """Write the tensors one after the other, while threads hash them; return their digests."""
        with ThreadPoolExecutor(threads()) as pool:
            data = [_bytes_of(one) for one in self._data]
            digests = [pool.submit(_sha256, one) for one in data]
            for one in data:
                sink.write(one)
        return [one.result() for one in digests]


def writers_of(tensors: Mapping[str, Tensor], size: int) -> dict[str, int | None]:
    """Return which of `size` ranks writes each tensor, on all the same; None for one that is split."""
    found, loads = dict[str, int | None](), Counter[int]()
    for name, tensor in tensors.items():
        found[name] = None if isinstance(tensor, DTensor) else 0
        amount = tensor.numel() * tensor.element_size()
        if found[name] == 0 and amount > SMALL_BYTES:
            found[name] = least = min(range(size), key=loads.__getitem__)
            loads[least] += amount
    return found


def load(store: FolderStore, manifest: CheckpointManifest, tensors: Mapping[str, Tensor]) -> None:
    """Fill this rank's part of `tensors`; the bytes that are used are those that were hashed.

    Raises:
        DamagedError: a part is not what was written.
    """
    room = {name: local_of(tensor) for name, tensor in tensors.items()}
    size = dist.get_world_size() if dist.is_initialized() else 1
    needed = {name: [one.box] for name, one in room.items()}
    for number, part in parts_for(store, manifest, needed, rank=rank.number(), world_size=size).items():
        stored = manifest.parts[number]
        place = store.file(manifest.step, stored.file)
        with store.open(manifest.step, stored.file) as source, ThreadPoolExecutor(threads()) as pool:
            entries = read_entries(stored, part.header_sha256, source, place=place)
            read = partial(_read, source=source, entries=entries, place=place)
            held = [(room[name], chunk) for name, chunks in part.tensors.items() for chunk in chunks]
            list(pool.map(read, *zip(*held, strict=True)))


def _read(target: Local, chunk: Chunk, *, source: Any, entries: Mapping[str, Entry], place: str) -> None:
    """Read what a rank needs of a chunk into its place."""
    entry = entry_of(chunk, entries, place=place)
    # From pinned memory a device reads itself; PyTorch keeps it for the next chunk.
    data = torch.empty(entry.bytes, dtype=torch.uint8, pin_memory=target.data.is_cuda)
    read_chunk(source, entry, chunk, memoryview(data.numpy()), place=place)
    whole = data.view(DTYPES[entry.dtype]).view(entry.shape)
    if both := Box.at(chunk.offsets, chunk.sizes).shared_with(target.box):
        into = target.data[_inside(both, target.offsets)]
        into.copy_(whole[_inside(both, chunk.offsets)], non_blocking=True)


def _inside(box: Box, offsets: Sequence[int]) -> tuple[slice, ...]:
    places = zip(box.begins, box.ends, offsets, strict=True)
    return tuple(slice(begin - offset, end - offset) for begin, end, offset in places)


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")


def _sha256(data: memoryview) -> str:
    return hashlib.sha256(data).hexdigest()
