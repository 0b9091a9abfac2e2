"""What a checkpoint says of itself: its files and tensors with their digests, and where training stood."""

from __future__ import annotations

import json
import math
from typing import Annotated, Self

from pydantic import Field, ValidationError, model_validator

from twinrun.checkpoints.safetensors import ITEM_BYTES
from twinrun.checkpoints.store import DamagedError
from twinrun.foundation.errors import InputError
from twinrun.foundation.files import canonical_json, parse_json, sha256_of_bytes
from twinrun.foundation.manifest import Frozen

FORMAT = 1
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0)]


class Chunk(Frozen):
    """A part of a tensor, as one rank held it."""

    file: str
    key: str
    """Name of the part in its file."""
    offsets: tuple[Count, ...]
    """Where in the whole tensor the part begins."""
    sizes: tuple[Count, ...]
    sha256: Digest


class StoredTensor(Frozen):
    """A tensor, whole or in parts that cover it."""

    dtype: str
    """Name of the type in safetensors."""
    shape: tuple[Count, ...]
    chunks: tuple[Chunk, ...]

    @model_validator(mode="after")
    def _is_made_of_its_parts(self) -> Self:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"no such type: {self.dtype}")
        for chunk in self.chunks:
            if not len(self.shape) == len(chunk.offsets) == len(chunk.sizes):
                raise ValueError(f"{chunk.key} has other dimensions")
            ends = (begin + size for begin, size in zip(chunk.offsets, chunk.sizes, strict=True))
            if any(end > size for end, size in zip(ends, self.shape, strict=True)):
                raise ValueError(f"{chunk.key} lies outside")
        if sum(math.prod(chunk.sizes) for chunk in self.chunks) != math.prod(self.shape):
            raise ValueError("parts do not make up the tensor")
        return self


class StoredFile(Frozen):
    """A safetensors file; digests of its tensors are those of the chunks."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9-]+\.safetensors$")]
    bytes: Count
    header_sha256: Digest


class CheckpointManifest(Frozen):
    """Everything a checkpoint holds, written last."""

    format: int
    step: Count
    """Optimizer steps that are done."""
    samples: Count
    """Sequences that were read, over all epochs: the position in the data."""
    token: Count
    """Which of the runs that wrote to this place wrote it, see `Store.claim`."""
    previous: Digest | None
    """Digest of the manifest before this one."""
    identity: dict[str, str]
    """What decides the loss: model, data, its order, optimizer. A run with another one cannot go on."""
    layout: dict[str, str]
    """How the work was split. A run with another one goes on inside an envelope, not bit for bit."""
    files: tuple[StoredFile, ...]
    tensors: dict[str, StoredTensor]

    def text(self) -> bytes:
        """Return the content of manifest.json: its own digest and one canonical form."""
        content = self.model_dump(mode="json")
        digest = sha256_of_bytes(canonical_json(content).encode())
        return canonical_json({"content": content, "sha256": digest}).encode()

    def digest(self) -> str:
        """Return the digest that the next manifest names."""
        return sha256_of_bytes(self.text())


def parse_manifest(text: bytes, *, place: str) -> CheckpointManifest:
    """Return the manifest that `text` is, byte for byte.

    Raises:
        DamagedError: it is not what was written.
        InputError: it is of a newer format.
    """
    try:
        sealed = parse_json(text)
        content, stated = sealed["content"], sealed["sha256"]
        found = sha256_of_bytes(canonical_json(content).encode())
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedError("no manifest of a checkpoint", place=place, found=repr(error)) from None
    if found != stated:
        raise DamagedError("the manifest was changed", place=place, found=found, allowed=stated)
    if isinstance(content, dict) and content.get("format") != FORMAT:
        raise InputError(
            "a checkpoint of another format", place=place, found=content.get("format"), allowed=FORMAT
        )
    try:
        manifest = CheckpointManifest.model_validate_json(json.dumps(content))
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = f"{place}:{'.'.join(map(str, fault['loc']))}"
        raise DamagedError("no manifest of a checkpoint", place=where, found=fault["msg"]) from None
    if manifest.text() != text:
        raise DamagedError("the manifest was changed", place=place, found="another form", allowed="canonical")
    return manifest
