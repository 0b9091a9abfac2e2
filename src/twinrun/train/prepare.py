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

import numpy as np

from twinrun.checkpoints.hugging_face.tokenizer import BYTES, END_OF_TEXT, FILE, SEPARATOR
from twinrun.foundation.errors import InputError, TwinrunError
from twinrun.foundation.files import sha256_of_file
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
            corpus = prepare_standard_library(options.out, sequence=options.sequence)
        else:
            if options.tokenizer is None or not options.files:
                raise InputError("--source hugging-face needs --tokenizer and --files")
            corpus = prepare_texts(
                options.out,
                files=options.files,
                tokenizer=options.tokenizer,
                sequence=options.sequence,
            )
    except TwinrunError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.write(corpus.model_dump_json() + "\n")
    return 0


def prepare_standard_library(out: Path, *, sequence: int) -> Corpus:
    """Write the running interpreter's own sources as byte tokens into `out`."""
    origin = Origin(source=BYTES, sequence=sequence, python=platform.python_version())
    return write_corpus(out, origin, _read_bytes(standard_library()))


def prepare_texts(out: Path, *, files: list[Path], tokenizer: Path, sequence: int) -> Corpus:
    """Write local `*.json.gz` files, one JSON object with `text` a line, as tokens into `out`.

    Raises:
        InputError: a file is missing or not of that form.
    """
    files = sorted(files)
    for path in (tokenizer, *files):
        if not path.is_file():
            raise InputError("no such file", place=str(path))
    origin = Origin(
        source="hugging-face",
        sequence=sequence,
        files=tuple(f"{path.name} {sha256_of_file(path)}" for path in files),
        tokenizer_sha256=sha256_of_file(tokenizer),
    )
    # Ranks write it beside the weights that they train.
    beside = {FILE: tokenizer.read_bytes()}
    return write_corpus(out, origin, _tokenize(_read_texts(files), tokenizer), beside=beside)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="twinrun.train.prepare", description=__doc__)
    parser.add_argument("--source", choices=(BYTES, "hugging-face"), required=True)
    parser.add_argument("--sequence", type=int, required=True, help="tokens in a sample")
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    parser.add_argument("--files", type=Path, nargs="*", help="local *.json.gz files")
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


def _read_texts(files: Iterable[Path]) -> Iterator[str]:
    for path in files:
        number = 0
        try:
            with gzip.open(path, "rt", encoding="utf-8") as stream:
                for line in stream:
                    number += 1
                    yield json.loads(line)["text"]
        except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"not lines of JSON with `text`, compressed: {error}", place=f"{path}:{number}"
            ) from None


def _tokenize(texts: Iterator[str], tokenizer: Path) -> Iterator[tuple[Tokens, int]]:
    """Yield the tokens of each text with the end-of-text token after it."""
    from tokenizers import Tokenizer

    encoder = Tokenizer.from_file(str(tokenizer))
    end = encoder.token_to_id(END_OF_TEXT)
    if end is None:
        raise InputError(f"the tokenizer has no {END_OF_TEXT}", place=str(tokenizer))
    if encoder.get_vocab_size() > np.iinfo(TOKEN).max + 1:
        raise InputError(
            "the vocabulary does not fit into 16 bits", place=str(tokenizer), found=encoder.get_vocab_size()
        )
    # The tokenizer uses every core for the texts of one call.
    while batch := list(itertools.islice(texts, BATCH_TEXTS)):
        for text, encoding in zip(batch, encoder.encode_batch(batch, add_special_tokens=False), strict=True):
            yield np.array([*encoding.ids, end], TOKEN), len(text.encode())


if __name__ == "__main__":
    sys.exit(main())
