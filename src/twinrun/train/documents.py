"""Documents of published data, whatever form their files have: texts of one column, or tokens."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from twinrun.foundation.errors import InputError
from twinrun.train.corpus import INDEX, Tokens

# Tokens of a file that are read at once.
PIECE = 1 << 22


def texts_of(path: Path, form: str, column: str) -> Iterator[str]:
    """Yield the texts of one file.

    Args:
        form: `json`, `parquet`, `text` or `mds`.
        column: key of a JSON object, or column of a table; a file of text is one document.

    Raises:
        InputError: the file is not of that form, has no such column, or no text.
    """
    empty = True
    for text in _READERS[form](path, column):
        if not isinstance(text, str):
            raise InputError("not text", place=f"{path}:{column}", found=type(text).__name__)
        empty = False
        yield text
    if empty:
        raise InputError("the file has no document", place=str(path))


def tokens_of(path: Path, *, header_bytes: int, width: int) -> Iterator[Tokens]:
    """Yield the tokens of a file of little-endian numbers of `width` bits after its header.

    Raises:
        InputError: nothing follows the header, or no whole numbers.
    """
    kind = np.dtype(f"<u{width // 8}")
    size = path.stat().st_size - header_bytes
    if size <= 0 or size % kind.itemsize:
        raise InputError(
            f"not tokens of {width} bits after a header of {header_bytes} bytes",
            place=str(path),
            found=f"{max(size, 0)} bytes",
            hint="`header_bytes` and `width` under [data] say what the file holds",
        )
    found: Tokens = np.memmap(path, kind, "r", header_bytes)
    for begin in range(0, len(found), PIECE):
        yield np.array(found[begin : begin + PIECE])


def _json_texts(path: Path, column: str) -> Iterator[Any]:
    number = 0
    try:
        with _opened(path) as stream:
            for line in stream:
                number += 1
                yield json.loads(line)[column]
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        message = f"not lines of JSON with `{column}`: {error}"
        raise InputError(message, place=f"{path}:{number}") from None


def _parquet_texts(path: Path, column: str) -> Iterator[Any]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        file = ParquetFile(path)
        names = file.schema_arrow.names
        if column not in names:
            raise InputError("no such column", place=f"{path}:{column}", found=column, allowed=names)
        for batch in file.iter_batches(columns=[column]):
            yield from batch.column(0).to_pylist()
    except (OSError, ArrowException) as error:
        raise InputError(f"not a file of Parquet: {error}", place=str(path)) from None


def _whole_text(path: Path, _column: str) -> Iterator[Any]:
    try:
        with _opened(path) as stream:
            if text := stream.read():
                yield text
    except (OSError, EOFError, ValueError) as error:
        raise InputError(f"not text in UTF-8: {error}", place=str(path)) from None


def _mds_texts(path: Path, column: str) -> Iterator[Any]:
    """Yield a column of the shards that an index of mosaicml-streaming names; none may have pickles."""
    from streaming.base.format import reader_from_json

    try:
        shards = json.loads(path.read_text(encoding="utf-8"))["shards"]
        for shard in shards:
            kinds = dict(zip(shard["column_names"], shard["column_encodings"], strict=True))
            if "pkl" in kinds.values():
                raise InputError("a column would run code when it is read", place=str(path), found="pkl")
            if kinds.get(column) != "str":
                raise InputError(
                    "no such column of text", place=f"{path}:{column}", found=column, allowed=list(kinds)
                )
            reader = reader_from_json(str(path.parent), None, shard)
            yield from (reader[place][column] for place in range(len(reader)))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"not an {INDEX} of MDS shards: {error}", place=str(path)) from None


def _opened(path: Path) -> io.TextIOBase:
    opened: Any = gzip.open if path.suffix == ".gz" else open
    stream: io.TextIOBase = opened(path, "rt", encoding="utf-8")
    return stream


_READERS: dict[str, Callable[[Path, str], Iterator[Any]]] = {
    "json": _json_texts,
    "parquet": _parquet_texts,
    "text": _whole_text,
    "mds": _mds_texts,
}
