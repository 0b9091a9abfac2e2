"""From a folder of transformers to a checkpoint: the weights alone, from which a run can begin."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinrun.checkpoints.folder import FolderStore
from twinrun.checkpoints.hugging_face.families import form_of_config
from twinrun.checkpoints.hugging_face.writing import CONFIG, MODEL, SEAL, WEIGHTS, turned
from twinrun.checkpoints.manifest import FORMAT, CheckpointManifest, StoredTensor
from twinrun.checkpoints.parts import Piece, demand_describable, file_of, write_part
from twinrun.checkpoints.safetensors import (
    ITEM_BYTES,
    LENGTH_BYTES,
    Entry,
    header_bytes,
    metadata_of,
    parse_header,
)
from twinrun.checkpoints.store import DamagedError, Sink
from twinrun.checkpoints.verification import demand_same_run
from twinrun.foundation.errors import InputError, MachineError
from twinrun.foundation.files import parse_json, read_regular, sha256_of_bytes
from twinrun.foundation.manifest import MAX_JSON_BYTES
from twinrun.protocol.hugging_face import Form, TensorPair

INDEX = f"{WEIGHTS}.index.json"
PART = "rank-00000"
RUN = "a conversion"
_FILE_OF_WEIGHTS = re.compile(r"\w[\w.-]*[.]safetensors", re.ASCII)


@dataclass(frozen=True)
class TensorLocation:
    """A tensor, and the file that has it."""

    file: Path
    entry: Entry


@dataclass(frozen=True)
class Seal:
    """What our own conversion says of the tensors: the model's shape, and their digests."""

    identity: dict[str, str]
    sha256: dict[str, str]


def is_folder_of_weights(place: Path) -> bool:
    """Say whether transformers would look for a model here."""
    return (place / CONFIG).is_file()


def read_folder(folder: Path, store: FolderStore) -> int:
    """Write the weights in `folder` to `store` as a checkpoint after step 0; return the step.

    Raises:
        DamagedError: a file is cut short, or is not what our conversion wrote.
        InputError: no family of ours holds the model, or `store` has checkpoints already.
    """
    if store.steps():
        raise InputError(
            "checkpoints are here already",
            place=store.place,
            found=store.steps(),
            hint="choose another place",
        )
    form, sizes = form_of_config(read_json(folder / CONFIG), place=str(folder / CONFIG))
    tensors, seal = _tensors(folder)
    pairs = list(form.pairs(sizes))
    _demand_held(tensors, pairs, form, folder)
    identity = form.identity(sizes)
    if seal:
        known = {name: seal.identity.get(name, "nothing") for name in identity}
        demand_same_run(known, identity, "the weights were of another model", place=str(folder / CONFIG))
        identity = seal.identity
    _write(store, pairs, tensors, seal, identity)
    return 0


def _write(
    store: FolderStore,
    pairs: list[TensorPair],
    tensors: dict[str, TensorLocation],
    seal: Seal | None,
    identity: dict[str, str],
) -> None:
    pieces = [_piece(pair, tensors[pair.theirs].entry.dtype) for pair in pairs]
    place = store.file(0, PART)
    demand_describable(pieces, place=place)
    token = store.claim(RUN)
    store.begin(0, token, needed=file_of(pieces)[1])

    def write(sink: Sink) -> list[str]:
        digests = []
        for pair in pairs:
            data, digest = _data(pair, tensors[pair.theirs], seal)
            sink.write(data)
            digests.append(digest)
        return digests

    try:
        part = write_part(store, pieces, write, step=0, token=token, name=PART)
        stored = {
            one.tensor: StoredTensor(dtype=one.entry.dtype, shape=one.entry.shape, holders=((0, 0),))
            for one in pieces
        }
        manifest = CheckpointManifest(
            format=FORMAT,
            step=0,
            samples=0,
            token=token,
            previous=None,
            identity=identity,
            layout={},
            parts=(part,),
            tensors=dict(sorted(stored.items())),
        )
        store.commit(0, token, manifest.text())
    except BaseException:
        store.abandon(0, token)
        raise


def _piece(pair: TensorPair, dtype: str) -> Piece:
    """Return a tensor as our file has it: one part, which begins at the first element."""
    offsets = (0,) * len(pair.shape)
    name = f"{MODEL}{pair.ours}"
    key = f"{name}@{','.join(map(str, offsets))}"
    return Piece(name, offsets, Entry(name=key, dtype=dtype, shape=pair.shape))


def _data(pair: TensorPair, found: TensorLocation, seal: Seal | None) -> tuple[bytes, str]:
    """Return a tensor as we have it and its digest; raises DamagedError where it differs from the seal."""
    with found.file.open("rb") as stream:
        stream.seek(found.entry.begin)
        data = stream.read(found.entry.bytes)
    if pair.transposed:
        data = turned(data, pair.their_shape, ITEM_BYTES[found.entry.dtype])
    digest = sha256_of_bytes(data)
    if seal and digest != seal.sha256.get(pair.ours):
        raise DamagedError(
            f"{pair.theirs} was changed since it was converted",
            place=str(found.file),
            found=digest,
            allowed=seal.sha256.get(pair.ours, "no such tensor"),
        )
    return data, digest


def _tensors(folder: Path) -> tuple[dict[str, TensorLocation], Seal | None]:
    """Return every tensor of the folder by its name, and what our own conversion says of them."""
    found: dict[str, TensorLocation] = {}
    seal = None
    for path in weight_files(folder):
        header = _header(path)
        entries = parse_header(header, place=str(path))
        _demand_whole(path, entries, len(header))
        found |= {name: TensorLocation(path, entry) for name, entry in entries.items()}
        seal = _seal(metadata_of(header), path) or seal
    return found, seal


def weight_files(folder: Path) -> list[Path]:
    """Return the files with the weights: one, or those that an index names; raises InputError, DamagedError.

    Files that nothing names are not read.
    """
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        raise InputError(
            "no weights that can be read without executing them",
            place=str(folder),
            found=sorted(path.name for path in folder.iterdir()),
            allowed=(WEIGHTS, INDEX),
        )
    named = read_json(folder / INDEX).get("weight_map")
    names = {str(name) for name in named.values()} if isinstance(named, dict) else set()
    if elsewhere := sorted(name for name in names if not _FILE_OF_WEIGHTS.fullmatch(name)):
        raise InputError(
            "weights of another place, which no digest of this folder covers",
            place=f"{folder / INDEX}:weight_map",
            found=elsewhere,
            allowed="names of *.safetensors in this folder",
        )
    missing = sorted(name for name in names if not (folder / name).is_file())
    if missing or not names:
        raise DamagedError("files are missing", place=str(folder / INDEX), found=missing or "none named")
    return [folder / name for name in sorted(names)]


def _header(path: Path) -> bytes:
    with path.open("rb") as stream:
        length = header_bytes(stream.read(LENGTH_BYTES), place=str(path))
        stream.seek(0)
        return stream.read(length)


def _demand_whole(path: Path, entries: dict[str, Entry], header: int) -> None:
    needed = max((entry.begin + entry.bytes for entry in entries.values()), default=header)
    size = path.stat().st_size
    if size != needed:
        raise DamagedError("another size", place=str(path), found=f"{size} bytes", allowed=f"{needed} bytes")


def _demand_held(
    tensors: dict[str, TensorLocation], pairs: list[TensorPair], form: Form, folder: Path
) -> None:
    """Refuse tensors that our model has no place for."""
    theirs = {name: str(list(one.entry.shape)) for name, one in tensors.items()}
    ours = {pair.theirs: str(list(pair.their_shape)) for pair in pairs}
    message = f"our {form.family} of this config.json has other tensors"
    demand_same_run(theirs, ours, message, place=str(folder))


def _seal(metadata: dict[str, str], path: Path) -> Seal | None:
    if SEAL not in metadata:
        return None
    try:
        content = parse_json(metadata[SEAL])
        return Seal(identity=dict(content["identity"]), sha256=dict(content["sha256"]))
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError("no digests of a conversion", place=str(path), found=repr(error)) from None


def read_json(path: Path) -> dict[str, Any]:
    """Return an object of JSON beside weights; raises InputError, MachineError."""
    try:
        found = parse_json(read_regular(path, limit=MAX_JSON_BYTES, links=True))
    except OSError as error:
        raise MachineError(f"cannot read: {error.strerror}", place=str(path)) from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"not JSON: {error}", place=str(path)) from None
    if not isinstance(found, dict):
        raise InputError("not an object of JSON", place=str(path))
    return found
