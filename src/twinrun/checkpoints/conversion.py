"""Weights of a checkpoint as a folder of transformers, and back; a run can begin from weights alone."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from twinrun.checkpoints import safetensors
from twinrun.checkpoints.folder import MANIFEST, FolderStore, Sink, demand_written
from twinrun.checkpoints.manifest import FORMAT, CheckpointManifest, StoredTensor
from twinrun.checkpoints.model_folder import CONFIG, WEIGHTS, read_object, weight_files
from twinrun.checkpoints.parts import Box, Piece, file_of, read_part, write_part
from twinrun.checkpoints.tokenizer import tokenizer_files
from twinrun.checkpoints.verification import demand_same_run, entry_of, read_chunk, read_entries, verify
from twinrun.foundation.errors import InputError, require_equal, require_known
from twinrun.foundation.files import cannot_write, demand_absent, sha256_of_bytes
from twinrun.protocol.hugging_face import SHAPE, Config, Form, TensorPair
from twinrun.protocol.models import FORMS

MODEL, PART, RUN = "model.", "rank-00000", "a conversion"
# Names of the types in transformers.
TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
SWITCHES = {"True": True, "False": False}


class TensorReader:
    """Reads whole tensors of a checkpoint, put together from parts that are described once."""

    def __init__(self, store: FolderStore, manifest: CheckpointManifest) -> None:
        """Read what the parts say of themselves; raises DamagedError."""
        self._store, self._manifest = store, manifest
        self._parts = [read_part(store, manifest, number) for number in range(len(manifest.parts))]

    def read(self, name: str) -> Any:
        """Return a tensor as an array of whole numbers as wide as its elements; raises DamagedError."""
        import numpy as np  # noqa: PLC0415

        step, tensor = self._manifest.step, self._manifest.tensors[name]
        whole: np.ndarray[Any, Any] = np.empty(tensor.shape, f"u{safetensors.ITEM_BYTES[tensor.dtype]}")
        for number in tensor.numbers():
            stored, part = self._manifest.parts[number], self._parts[number]
            place = self._store.file(step, stored.file)
            with self._store.open(step, stored.file) as source:
                entries = read_entries(stored, part.header_sha256, source, place=place)
                for chunk in part.tensors.get(name, ()):
                    data = np.empty(chunk.sizes, whole.dtype)
                    room = memoryview(data.reshape(-1).view("u1"))
                    read_chunk(source, entry_of(chunk, entries, place=place), chunk, room, place=place)
                    box = Box.at(chunk.offsets, chunk.sizes)
                    whole[tuple(map(slice, box.begins, box.ends))] = data
        return whole


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
    form, sizes = _form_of(manifest.identity, place=place)
    pairs = list(form.pairs(sizes))
    stored = {name: one for name, one in manifest.tensors.items() if name.startswith(MODEL)}
    theirs = {name: one.shape for name, one in stored.items()}
    ours = {MODEL + pair.ours: pair.shape for pair in pairs}
    message = f"{form.architecture} of transformers cannot hold it"
    demand_same_run(theirs, ours, message, place=place, whose="that class")
    types = sorted({one.dtype for one in stored.values()})
    if len(types) != 1 or types[0] not in TYPES:
        message = "config.json has one type for all weights"
        raise InputError(message, place=place, found=types, allowed=tuple(TYPES))
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
        "torch_dtype": TYPES[types[0]],
        **form.config(sizes),
        **form.unset,
        **{key: value for key, (value, _) in form.fixed.items()},
        **({"eos_token_id": text.end} if text else {}),
    }
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as folder:
            made = Path(folder) / out.name
            made.mkdir()
            _write(made / CONFIG, [json.dumps(described, indent=2, sort_keys=True).encode() + b"\n"])
            _write(made / WEIGHTS, _weights(TensorReader(store, manifest), pairs, types[0]))
            for name, content in (text.content if text else {}).items():
                _write(made / name, [content])
            made.rename(out)
    except OSError as error:
        raise cannot_write(error, out, kept="nothing was left behind") from None
    return out


def _weights(reader: TensorReader, pairs: list[TensorPair], dtype: str) -> Iterable[bytes]:
    """Yield the content of model.safetensors."""
    entries = [safetensors.Entry(name=pair.theirs, dtype=dtype, shape=pair.their_shape) for pair in pairs]
    # transformers refuses a file that does not say which library has made it.
    yield safetensors.header_of(entries, {"format": "pt"})
    for pair in pairs:
        tensor = reader.read(MODEL + pair.ours)
        yield (tensor.T if pair.transposed else tensor).tobytes()


def _write(path: Path, parts: Iterable[bytes]) -> None:
    with path.open("xb") as stream:
        stream.writelines(parts)
        stream.flush()
        os.fsync(stream.fileno())


def read_folder(folder: Path, store: FolderStore) -> int:
    """Write the weights in `folder` to `store` as a checkpoint after step 0; return the step.

    Raises:
        DamagedError: a file is cut short.
        InputError: no family of ours holds the model, or `store` has checkpoints already.
    """
    if steps := store.steps():
        hint = "choose another place"
        raise InputError("checkpoints are here already", place=store.place, found=steps, hint=hint)
    form, sizes = _form_of_config(read_object(folder / CONFIG), place=str(folder / CONFIG))
    pairs, found = list(form.pairs(sizes)), _tensors(folder)
    theirs = {name: entry.shape for name, (_, entry) in found.items()}
    ours = {pair.theirs: pair.their_shape for pair in pairs}
    message = f"our {form.family} of this config.json has other tensors"
    demand_same_run(theirs, ours, message, place=str(folder), whose="our model")
    pieces = [_piece(pair, found[pair.theirs][1].dtype) for pair in pairs]
    token = store.claim(RUN)
    store.begin(0, token, needed=file_of(pieces)[1])

    def write(sink: Sink) -> Iterable[str]:
        for pair in pairs:
            data = _data(*found[pair.theirs], pair)
            sink.write(data)
            yield sha256_of_bytes(data)

    try:
        part = write_part(store, pieces, lambda sink: list(write(sink)), step=0, token=token, name=PART)
        stored = {
            one.tensor: StoredTensor(dtype=one.entry.dtype, shape=one.entry.shape, holders=((0, 0),))
            for one in sorted(pieces)
        }
        about = {"format": FORMAT, "step": 0, "samples": 0, "token": token, "layout": {}}
        about |= {"identity": form.identity(sizes), "parts": (part,), "tensors": stored}
        manifest = CheckpointManifest.model_validate(about)
        store.commit(0, token, manifest.text())
    except BaseException:
        store.abandon(0, token)
        raise
    return 0


def _piece(pair: TensorPair, dtype: str) -> Piece:
    """Return a tensor as our file has it: one part, which begins at the first element."""
    offsets, name = (0,) * len(pair.shape), f"{MODEL}{pair.ours}"
    key = f"{name}@{','.join(map(str, offsets))}"
    return Piece(name, offsets, safetensors.Entry(name=key, dtype=dtype, shape=pair.shape))


def _data(file: Path, entry: safetensors.Entry, pair: TensorPair) -> bytes:
    """Return a tensor as we have it."""
    with file.open("rb") as stream:
        stream.seek(entry.begin)
        data = stream.read(entry.bytes)
    if not pair.transposed:
        return data
    import numpy as np  # noqa: PLC0415

    matrix = np.frombuffer(data, f"u{safetensors.ITEM_BYTES[entry.dtype]}").reshape(pair.their_shape)
    return bytes(matrix.T.tobytes())


def _tensors(folder: Path) -> dict[str, tuple[Path, safetensors.Entry]]:
    """Return every tensor of the folder by its name, and its file."""
    found: dict[str, tuple[Path, safetensors.Entry]] = {}
    for path in weight_files(folder):
        with path.open("rb") as stream:
            length = safetensors.header_bytes(stream.read(safetensors.LENGTH_BYTES), place=str(path))
            stream.seek(0)
            entries = safetensors.parse_header(stream.read(length), place=str(path))
        needed = length + sum(entry.bytes for entry in entries.values())
        demand_written(path.stat().st_size, needed, "another size", place=str(path))
        found |= {name: (path, entry) for name, entry in entries.items()}
    return found


def _form_of(identity: Mapping[str, str], *, place: str) -> tuple[Form, dict[str, int]]:
    """Return the form and sizes of a checkpoint's model; raises InputError where transformers has none."""
    shape = {name.removeprefix(SHAPE): one for name, one in identity.items() if name.startswith(SHAPE)}
    family, forms = shape.get("family", "unknown"), {one.family: one for one in FORMS}
    message = "this family has no Hugging Face format"
    require_known(family, forms, message, place=f"{place}:{SHAPE}family")
    form = forms[family]
    message = f"{form.architecture} of transformers cannot hold it"
    for name in form.absent:
        require_equal(shape.get(name, "None"), "None", message, place=f"{place}:{SHAPE}{name}")
    sizes = {name: int(one) for name, one in shape.items() if one.isdecimal()}
    return form, sizes | {name: SWITCHES[one] for name, one in shape.items() if one in SWITCHES}


def _form_of_config(config: Config, *, place: str) -> tuple[Form, dict[str, int]]:
    """Return the form and the sizes of the model of a config.json; raises InputError for none of ours."""
    kind, forms = str(config.get("model_type")), {one.model_type: one for one in FORMS}
    require_known(kind, forms, "no family of ours is such a model", place=f"{place}:model_type")
    form = forms[kind]
    for key, (allowed, default) in form.fixed.items():
        message = f"our {form.family} is another model"
        require_equal(config.get(key, default), allowed, message, place=f"{place}:{key}")
    try:
        return form, form.sizes(config)
    except (KeyError, ValueError, TypeError) as error:
        raise InputError(f"not the sizes of a {form.model_type}: {error}", place=place) from None
