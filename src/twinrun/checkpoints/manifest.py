"""What a checkpoint says of itself: a small index, and beside it what each rank says of what it wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Self, TypeVar

from pydantic import Field, ValidationError, model_validator

from twinrun.checkpoints.folder import DamagedError, demand_written
from twinrun.checkpoints.safetensors import ITEM_BYTES
from twinrun.foundation.errors import InputError
from twinrun.foundation.files import canonical_json, parse_json, sha256_of_bytes
from twinrun.foundation.manifest import Frozen

FORMAT = 3
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
# Products and sums of sizes are kept as eight bytes.
Count = Annotated[int, Field(ge=0, lt=1 << 62)]
Described = TypeVar("Described", bound=Frozen)


class Chunk(Frozen):
    """A part of a tensor, as one rank held it."""

    key: str
    """Name of the part in its file."""
    offsets: tuple[Count, ...]
    """Where in the whole tensor the part begins."""
    sizes: tuple[Count, ...]
    sha256: Digest


class PartManifest(Frozen):
    """What one rank says of the file it wrote; the index has its digest."""

    header_sha256: Digest
    tensors: dict[str, tuple[Chunk, ...]]

    def text(self) -> bytes:
        """Return the content of the file beside the tensors."""
        return canonical_json(self.model_dump(mode="json")).encode()


class StoredPart(Frozen):
    """What one rank wrote: a safetensors file, and the description of what it holds."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9-]+$")]
    """Name of both files, without their endings."""
    bytes: Count
    """Size of the safetensors file."""
    description_bytes: Count
    sha256: Digest
    """Digest of the description."""

    @property
    def file(self) -> str:
        """Name of the safetensors file."""
        return f"{self.name}.safetensors"

    @property
    def description(self) -> str:
        """Name of the file with a `PartManifest`."""
        return f"{self.name}.json"


class StoredTensor(Frozen):
    """A tensor, and which parts hold some of it."""

    dtype: Annotated[str, Field(pattern=f"^({'|'.join(ITEM_BYTES)})$")]
    """Name of the type in safetensors."""
    shape: tuple[Count, ...]
    holders: tuple[tuple[Count, Count], ...]
    """Numbers of the parts, ascending, as the first and the last of each unbroken row of them."""

    def numbers(self) -> Iterator[int]:
        """Yield the numbers of the parts that hold some of the tensor."""
        for first, last in self.holders:
            yield from range(first, last + 1)


class CheckpointManifest(Frozen):
    """The index of a checkpoint, written last: it grows with ranks and with tensors, not with both."""

    format: int
    step: Count
    """Optimizer steps that are done."""
    samples: Count
    """Sequences that were read, over all epochs: the position in the data."""
    token: Count
    """Which of the runs that wrote to this place wrote it, see `FolderStore.claim`."""
    identity: dict[str, str]
    """What decides the loss: model, data, its order, optimizer. A run with another one cannot go on."""
    layout: dict[str, str]
    """How the work was split. A run with another one goes on inside an envelope, not bit for bit."""
    parts: tuple[StoredPart, ...]
    tensors: dict[str, StoredTensor]

    @model_validator(mode="after")
    def _has_the_parts_it_names(self) -> Self:
        if len({"manifest", *(part.name for part in self.parts)}) != len(self.parts) + 1:
            raise ValueError("two files have one name")
        for name, tensor in self.tensors.items():
            if (last := max((last for _, last in tensor.holders), default=-1)) >= len(self.parts):
                raise ValueError(f"{name} is in part {last} of {len(self.parts)}")
        return self

    def text(self) -> bytes:
        """Return the content of manifest.json: its own digest and one canonical form."""
        content = self.model_dump(mode="json")
        digest = sha256_of_bytes(canonical_json(content).encode())
        return canonical_json({"content": content, "sha256": digest}).encode()

    def digest(self) -> str:
        """Return the digest that says which checkpoint it is."""
        return sha256_of_bytes(self.text())


def parse_manifest(text: bytes, *, place: str) -> CheckpointManifest:
    """Return the manifest that `text` is, byte for byte.

    Raises:
        DamagedError: it is not what was written.
        InputError: it is of another format.
    """
    try:
        sealed = parse_json(text)
        content, stated = sealed["content"], sealed["sha256"]
        found = sha256_of_bytes(canonical_json(content).encode())
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedError("no manifest of a checkpoint", place=place, found=repr(error)) from None
    demand_written(found, stated, "the manifest was changed", place=place)
    if isinstance(content, dict) and (version := content.get("format")) != FORMAT:
        hint = "the version of twinrun that saved it goes on from it; convert its weights with that one"
        message = "a checkpoint of another format"
        raise InputError(message, place=place, found=version, allowed=FORMAT, hint=hint)
    manifest = parse_described(json.dumps(content), CheckpointManifest, place=place)
    if manifest.text() != text:
        raise DamagedError("the manifest was changed", place=place, found="another form", allowed="canonical")
    return manifest


def parse_described(text: str | bytes, kind: type[Described], *, place: str) -> Described:
    """Return what `text` says; raises DamagedError where a key of it is none of that kind."""
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = f"{place}:{'.'.join(map(str, fault['loc']))}"
        raise DamagedError("no manifest of a checkpoint", place=where, found=fault["msg"]) from None
