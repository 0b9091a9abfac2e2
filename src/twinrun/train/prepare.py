"""Prepare training data: `python -m twinrun.train.prepare --source standard-library --out DIR`."""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import platform
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from twinrun.checkpoints.tokenizer import BYTES, FILE, SEPARATOR
from twinrun.foundation.errors import InputError, TwinrunError
from twinrun.foundation.files import sha256_of_file
from twinrun.foundation.manifest import validate
from twinrun.protocol.training import DataSource
from twinrun.train.corpus import TOKEN, Corpus, Origin, Tokens, write_corpus

# Test suites and vendored or generated trees: large, repetitive, and not installed everywhere.
LEFT_OUT = frozenset(
    {"__pycache__", "ensurepip", "encodings", "idlelib", "lib2to3", "pydoc_data", "site-packages"}
    | {"dist-packages", "test", "tests", "tkinter", "turtledemo"}
)
BATCH_TEXTS = 1000


def main(arguments: list[str] | None = None) -> int:
    """Prepare what the command line names; print one JSON line; return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        if options.source == BYTES:
            origin = Origin(source=BYTES, sequence=options.sequence, python=platform.python_version())
            corpus = write_corpus(options.out, origin, _read_bytes(standard_library()))
        elif not options.files or not options.keys:
            raise InputError(f"--source {options.source} needs --keys and --files")
        else:
            source = validate(json.loads(options.keys), DataSource, place="--keys")
            given = {name: getattr(options, name) for name in ("files", "tokenizer", "sequence", "server")}
            corpus = prepare_files(options.out, source=source, **given)
    except TwinrunError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.write(corpus.model_dump_json() + "\n")
    return 0


def prepare_files(
    out: Path, *, source: DataSource, files: list[Path], tokenizer: Path | None, sequence: int, **kept: Any
) -> Corpus:
    """Write local files of the form that `source` names as tokens into `out`.

    Args:
        kept: `server`, where they were fetched from, without a password.

    Raises:
        InputError: a file is missing, not of that form, or empty, or the tokenizer does not suit.
    """
    files = sorted(files)
    for path in (*files, *([tokenizer] if tokenizer else [])):
        if not path.is_file():
            raise InputError("no such file", place=str(path))
    origin = Origin(
        source=source.kind,
        sequence=sequence,
        files=tuple(f"{path.name} {sha256_of_file(path)}" for path in files),
        tokenizer_sha256=sha256_of_file(tokenizer) if tokenizer else None,
        form=source.form if source.column == "text" else f"{source.form}, {source.column}",
        width=source.width,
    )
    if source.form == "tokens":
        read = (tokens_of(path, header_bytes=source.header_bytes, width=source.width) for path in files)
        pieces = ((tokens, tokens.nbytes) for one in read for tokens in one)
        return write_corpus(out, origin, pieces, **kept)
    if tokenizer is None:
        raise InputError("texts need a tokenizer", place="--tokenizer", found="none")
    texts = (text for path in files for text in texts_of(path, source.form, source.column))
    # Ranks write it beside the weights that they train.
    beside = {FILE: tokenizer.read_bytes()}
    return write_corpus(out, origin, _tokenize(texts, tokenizer, source), beside=beside, **kept)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="twinrun.train.prepare", description=__doc__)
    parser.add_argument("--source", choices=(BYTES, "hugging-face", "local"), required=True)
    parser.add_argument("--sequence", type=int, required=True, help="tokens in a sample")
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    parser.add_argument("--files", type=Path, nargs="*", help="local files")
    parser.add_argument("--keys", help="the data set's table of recipe.toml, as JSON")
    parser.add_argument("--server", help="address that the files were fetched from")
    parser.add_argument("--tokenizer", type=Path, help="local tokenizer.json")
    return parser


def standard_library() -> list[Path]:
    """Return the source files of the running interpreter that are text to train on, by name."""
    root = Path(sysconfig.get_path("stdlib"))
    found = (path.relative_to(root) for path in root.rglob("*.py"))
    kept = [path for path in found if not LEFT_OUT.intersection(path.parts)]
    return [root / path for path in sorted(kept, key=lambda path: path.as_posix())]


def _read_bytes(files: Iterable[Path]) -> Iterator[tuple[Tokens, int]]:
    separator = np.array([SEPARATOR], TOKEN)
    for path in files:
        content = path.read_bytes()
        tokens: Tokens = np.frombuffer(content, np.uint8).astype(TOKEN)
        yield np.concatenate([tokens, separator]), len(content)


def _tokenize(texts: Iterator[str], tokenizer: Path, source: DataSource) -> Iterator[tuple[Tokens, int]]:
    """Yield the tokens of each text with the token `end` of the source after it."""
    from tokenizers import Tokenizer

    encoder = Tokenizer.from_file(str(tokenizer))
    end = encoder.token_to_id(source.end)
    if end is None:
        hint = "`end` under [data] names the token that follows each document"
        raise InputError(f"the tokenizer has no {source.end}", place=str(tokenizer), hint=hint)
    if (found := encoder.get_vocab_size()) > 1 << source.width:
        message, hint = (
            f"the vocabulary does not fit into {source.width} bits",
            "say `width = 32` under [data]",
        )
        raise InputError(message, place=str(tokenizer), found=found, hint=hint)
    kind = np.dtype(f"<u{source.width // 8}")
    # The tokenizer uses every core for the texts of one call.
    while batch := list(itertools.islice(texts, BATCH_TEXTS)):
        for text, encoding in zip(batch, encoder.encode_batch(batch, add_special_tokens=False), strict=True):
            yield np.array([*encoding.ids, end], kind), len(text.encode())


# Tokens of a file that are read at once.
PIECE = 1 << 22


def texts_of(path: Path, form: str, column: str) -> Iterator[str]:
    """Yield the texts of one file.

    Args:
        form: `json`, `parquet` or `text`.
        column: key of a JSON object, or column of a table; a file of text is one document.

    Raises:
        InputError: the file is not of that form, has no such column, or no text.
    """
    number = 0
    try:
        for text in _texts(path, form, column):
            number += 1
            if not isinstance(text, str):
                raise TypeError(f"{type(text).__name__} is no text")
            yield text
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        message = f"not {form} with texts in `{column}`: {error}"
        raise InputError(message, place=f"{path}:{number + 1}") from None
    if not number:
        raise InputError("the file has no document", place=str(path))


def tokens_of(path: Path, *, header_bytes: int, width: int) -> Iterator[Tokens]:
    """Yield the tokens of a file of little-endian numbers of `width` bits after its header.

    Raises:
        InputError: nothing follows the header, or no whole numbers.
    """
    kind = np.dtype(f"<u{width // 8}")
    size = path.stat().st_size - header_bytes
    if size <= 0 or size % kind.itemsize:
        message = f"not tokens of {width} bits after a header of {header_bytes} bytes"
        hint = "`header_bytes` and `width` under [data] say what the file holds"
        raise InputError(message, place=str(path), found=f"{max(size, 0)} bytes", hint=hint)
    found: Tokens = np.memmap(path, kind, "r", header_bytes)
    for begin in range(0, len(found), PIECE):
        yield np.array(found[begin : begin + PIECE])


def _texts(path: Path, form: str, column: str) -> Iterator[Any]:
    if form == "parquet":
        from pyarrow.parquet import ParquetFile

        for batch in ParquetFile(path).iter_batches(columns=[column]):
            yield from batch[column].to_pylist()
        return
    opened: Any = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as stream:
        if form == "json":
            yield from (json.loads(line)[column] for line in stream)
        elif text := stream.read():
            yield text


if __name__ == "__main__":
    sys.exit(main())
