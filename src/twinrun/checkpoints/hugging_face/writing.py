"""From a checkpoint to a folder that transformers loads: weights, their config.json, and the tokenizer."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from twinrun.checkpoints.folder import FolderStore
from twinrun.checkpoints.hugging_face.families import form_of
from twinrun.checkpoints.hugging_face.tokenizer import tokenizer_files
from twinrun.checkpoints.manifest import CheckpointManifest
from twinrun.checkpoints.safetensors import ITEM_BYTES, Entry, header_of
from twinrun.checkpoints.store import MANIFEST
from twinrun.checkpoints.verification import TensorReader, verify
from twinrun.foundation.errors import InputError
from twinrun.foundation.files import cannot_write, canonical_json, demand_absent, sha256_of_bytes
from twinrun.protocol.hugging_face import SHAPE, Form, TensorPair

CONFIG, WEIGHTS = "config.json", "model.safetensors"
MODEL = "model."
# Names of the types in transformers.
TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# Types of Python's arrays with that many bytes an element.
CODES: dict[int, Literal["B", "H", "I", "Q"]] = {1: "B", 2: "H", 4: "I", 8: "Q"}
# Key of the header's metadata with the digest of each tensor, as we have it.
SEAL = "twinrun"


def write_folder(store: FolderStore, step: int, out: Path, *, tokenizer: Path | None = None) -> Path:
    """Write the weights of a checkpoint as transformers has them to the folder `out`.

    The optimizer is left out. The tokenizer is written too where it is known, see `tokenizer_files`.

    Args:
        tokenizer: tokenizer.json that the model was trained with.

    Raises:
        DamagedError: the checkpoint is not what was written.
        InputError: `out` is there already, transformers has no class that holds the model, or `tokenizer`
            is another one.
        MachineError: a file cannot be read or written.
    """
    demand_absent(out)
    manifest = verify(store, step)
    place = store.file(step, MANIFEST)
    form, sizes = form_of(manifest.identity, place=place)
    pairs = list(form.pairs(sizes))
    dtype = _demand_held(manifest, pairs, form, place)
    text = tokenizer_files(
        manifest.identity,
        vocabulary=sizes["vocabulary"],
        sequence=sizes.get("sequence"),
        file=tokenizer,
        place=place,
    )
    described = {
        "architectures": [form.architecture],
        "model_type": form.model_type,
        "torch_dtype": TYPES[dtype],
        **form.config(sizes),
        **form.unset,
        **{key: value for key, (value, _) in form.fixed.items()},
        **({"eos_token_id": text.end} if text else {}),
    }
    draft = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
        _write(draft / CONFIG, [json.dumps(described, indent=2, sort_keys=True).encode() + b"\n"])
        _write_weights(draft / WEIGHTS, store, manifest, pairs)
        for name, content in (text.content if text else {}).items():
            _write(draft / name, [content])
        # mkdtemp makes the folder private; weights are meant to be read by others.
        draft.chmod(0o755)
        draft.rename(out)
    except OSError as error:
        raise cannot_write(error, out, kept="nothing was left behind") from None
    finally:
        if draft:
            shutil.rmtree(draft, ignore_errors=True)
    return out


def _demand_held(manifest: CheckpointManifest, pairs: list[TensorPair], form: Form, place: str) -> str:
    """Refuse a model with tensors that have no place in the target; return the type that all have."""
    stored = {name: one for name, one in manifest.tensors.items() if name.startswith(MODEL)}
    theirs = {name: str(list(one.shape)) for name, one in stored.items()}
    ours = {MODEL + pair.ours: str(list(pair.shape)) for pair in pairs}
    for name in sorted(theirs.keys() | ours.keys()):
        if theirs.get(name) != ours.get(name):
            raise InputError(
                f"{form.architecture} of transformers cannot hold it",
                place=f"{place}:{name}",
                found=theirs.get(name, "no such tensor"),
                allowed=ours.get(name, "no such tensor"),
            )
    found = sorted({one.dtype for one in stored.values()})
    if len(found) != 1 or found[0] not in TYPES:
        raise InputError(
            "config.json has one type for all weights",
            place=place,
            found=found,
            allowed=tuple(TYPES),
        )
    return found[0]


def _write_weights(
    path: Path, store: FolderStore, manifest: CheckpointManifest, pairs: list[TensorPair]
) -> None:
    shape = {name: one for name, one in manifest.identity.items() if name.startswith(SHAPE)}
    stored = [manifest.tensors[MODEL + pair.ours] for pair in pairs]
    entries = [
        Entry(name=pair.theirs, dtype=one.dtype, shape=pair.their_shape)
        for pair, one in zip(pairs, stored, strict=True)
    ]

    def header(digests: Iterable[str]) -> bytes:
        named = dict(zip((pair.ours for pair in pairs), digests, strict=True))
        seal = canonical_json({"identity": shape, "sha256": named})
        # transformers refuses a file that does not say which library has made it.
        return header_of(entries, {"format": "pt", SEAL: seal})

    digests: list[str] = []
    reader = TensorReader(store, manifest, [MODEL + pair.ours for pair in pairs])
    with path.open("xb") as stream:
        # Digests are known when everything is written, and all of one length.
        stream.write(header("0" * 64 for _ in pairs))
        for pair, one in zip(pairs, stored, strict=True):
            data = reader.read(MODEL + pair.ours)
            digests.append(sha256_of_bytes(bytes(data)))
            stream.write(turned(data, pair.shape, ITEM_BYTES[one.dtype]) if pair.transposed else data)
        stream.seek(0)
        stream.write(header(digests))
        stream.flush()
        os.fsync(stream.fileno())


def _write(path: Path, parts: Iterable[bytes]) -> None:
    with path.open("xb") as stream:
        stream.writelines(parts)
        stream.flush()
        os.fsync(stream.fileno())


def turned(data: bytes | bytearray, shape: tuple[int, ...], item: int) -> bytes:
    """Return the bytes of a matrix of that shape, transposed."""
    rows = memoryview(data).cast(CODES[item])
    return b"".join(rows[column :: shape[1]].tobytes() for column in range(shape[1]))
