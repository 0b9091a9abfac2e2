"""Token streams written as hashed MDS shards, whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from twinrun.foundation.errors import InputError, MachineError, require_equal
from twinrun.foundation.files import canonical_json, sha256_of_bytes, sha256_of_file, write_atomically
from twinrun.foundation.manifest import Frozen, validate
from twinrun.protocol.models.shape import Positive

CORPUS = "corpus.json"
INDEX = "index.json"
# A hash of each sample, little-endian.
HASHES = "hashes.bin"
HASH = np.dtype("<i8")
COLUMN = "tokens"
SHARD_BYTES = 1 << 26
# Two bytes hold most vocabularies; a data set with a larger one says `width = 32`.
TOKEN = np.dtype("<u2")
Tokens = np.ndarray[Any, np.dtype[Any]]
"""Numbers of one document, of the type of its data set's `width`."""


class Origin(Frozen):
    """Where a token stream comes from; two equal origins give equal bytes."""

    source: str
    sequence: Positive
    python: str | None = None
    """Version of the interpreter whose standard library was read."""
    files: tuple[str, ...] = ()
    """`name sha256` of each file that was read, in order."""
    tokenizer_sha256: str | None = None
    form: str = "json"
    """Form of the files, with the column or the header that was read."""
    width: Literal[16, 32] = 16
    """Bits of a token."""

    @property
    def token(self) -> np.dtype[Any]:
        """Return the type of a token, little-endian."""
        return np.dtype(f"<u{self.width // 8}")


class Corpus(Frozen):
    """What a folder of prepared shards holds."""

    origin: Origin
    sequence: Positive
    """Tokens in a sample."""
    samples: Positive
    tokens: Positive
    """Tokens in all samples; the rest, shorter than a sample, is dropped."""
    bytes: Positive
    """Size of the text in UTF-8, or of the source files."""
    largest_token: int
    sha256: str
    """SHA-256 of all tokens as little-endian numbers of the origin's width."""
    index_sha256: str
    """SHA-256 of `index.json`, which in turn holds one of every shard."""
    hashes_sha256: str
    """SHA-256 of `hashes.bin`, against which each sample is held when it is read."""
    server: str | None = None
    """Address that its files were fetched from; None for other data, and where it was not kept."""

    def text(self) -> str:
        """Return the content of corpus.json: its own digest and one canonical form."""
        content = self.model_dump(mode="json")
        return canonical_json({"content": content, "sha256": _digest(content)}) + "\n"


def read_corpus(folder: Path) -> Corpus:
    """Return what `folder` holds; raises InputError where its corpus.json is not what was written."""
    path = folder / CORPUS
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text)["content"]
        sealed = canonical_json({"content": content, "sha256": _digest(content)}) + "\n" == text
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        sealed = False
    if not sealed:
        raise damaged(path)
    return validate(content, Corpus, place=str(path))


def encoding_of(origin: Origin) -> str:
    """Return how shards encode a sample; the format has an encoding that is executed when it is read."""
    return f"ndarray:{origin.token.name}:{origin.sequence}"


def damaged(path: Path) -> InputError:
    """Return what to say of a file that is not what was prepared."""
    message = "this file of the prepared data is missing or damaged"
    return InputError(message, place=str(path), hint="delete the folder and prepare the data again")


def sample_hash(tokens_S: np.ndarray[Any, np.dtype[np.int64]]) -> int:
    """Return 64 bits of BLAKE2b over little-endian int64 tokens, as a signed number."""
    content = tokens_S.astype("<i8").tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little", signed=True)


def _digest(content: object) -> str:
    return sha256_of_bytes(canonical_json(content).encode())


def write_corpus(
    folder: Path,
    origin: Origin,
    documents: Iterable[tuple[Tokens, int]],
    *,
    beside: Mapping[str, bytes] | None = None,
    server: str | None = None,
) -> Corpus:
    """Write `documents`, joined, as samples of `origin.sequence` tokens into `folder`.

    Args:
        documents: tokens of each document, its separator included, and the bytes it was made of.
        beside: files by name that belong to the tokens, such as their tokenizer.
        server: address that the documents were fetched from.

    Raises:
        InputError: `folder` holds other data, or the documents do not fill one sample.
        MachineError: the folder cannot be written.
    """
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    if not (folder / CORPUS).is_file():
        try:
            partial.parent.mkdir(parents=True, exist_ok=True)
            made = _write(partial, origin, documents).model_copy(update={"server": server})
            for name, content in (beside or {}).items():
                (partial / name).write_bytes(content)
            write_atomically(partial / CORPUS, made.text())
            partial.replace(folder)
        except OSError as error:
            # Another process may have been first.
            if not (folder / CORPUS).is_file():
                message, hint = f"cannot write: {error.strerror}", "nothing was left behind"
                raise MachineError(message, place=str(folder), hint=hint) from None
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    corpus = read_corpus(folder)
    found, allowed = corpus.origin.model_dump_json(), origin.model_dump_json()
    message, hint = "this folder holds data prepared otherwise", "choose another folder or delete this one"
    require_equal(found, allowed, message, place=str(folder), hint=hint)
    return corpus


def _write(folder: Path, origin: Origin, documents: Iterable[tuple[Tokens, int]]) -> Corpus:
    # Takes a while to import, which finding existing data should not.
    from streaming.base.format.mds.writer import MDSWriter

    digest, hashes, largest, size = hashlib.sha256(), list[int](), 0, 0
    columns, rest = {COLUMN: encoding_of(origin)}, np.empty(0, origin.token)
    with MDSWriter(out=str(folder), columns=columns, hashes=["sha256"], size_limit=SHARD_BYTES) as writer:
        for tokens, count in documents:
            size += count
            rest = np.concatenate([rest, tokens])
            whole = len(rest) // origin.sequence * origin.sequence
            for sample in rest[:whole].reshape(-1, origin.sequence):
                writer.write({COLUMN: sample})
                digest.update(sample.tobytes())
                largest = max(largest, int(sample.max()))
                hashes.append(sample_hash(sample.astype(np.int64)))
            rest = rest[whole:]
    if not hashes:
        raise InputError("the documents do not fill one sample", found=f"{size} bytes")
    (folder / HASHES).write_bytes(np.array(hashes, HASH).tobytes())
    return Corpus(
        origin=origin,
        sequence=origin.sequence,
        samples=len(hashes),
        tokens=len(hashes) * origin.sequence,
        bytes=size,
        largest_token=largest,
        sha256=digest.hexdigest(),
        index_sha256=sha256_of_file(folder / INDEX),
        hashes_sha256=sha256_of_file(folder / HASHES),
    )
