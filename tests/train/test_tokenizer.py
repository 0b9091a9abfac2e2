"""The tokenizer beside converted weights: made for byte tokens, found or named for others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the packages of a stack")
pytest.importorskip("transformers", reason="needs the packages of a stack")

import transformers
from tokenizers import Tokenizer
from tokenizers.models import BPE

from twinrun.checkpoints.tokenizer import BYTES, END_OF_TEXT, SEPARATOR, tokenizer_files
from twinrun.foundation.errors import InputError
from twinrun.foundation.files import sha256_of_bytes


def tokenizer_at(path: Path, *, end: str = END_OF_TEXT) -> str:
    """Write a tokenizer of its own and return its digest."""
    made = Tokenizer(BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    made.add_special_tokens([end])
    made.save(str(path))
    return sha256_of_bytes(path.read_bytes())


def test_the_tokenizer_of_the_data_is_found_or_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINRUN_CACHE", str(tmp_path))
    fetched = tmp_path / "downloads" / "owner" / "name" / "revision" / "tokenizer.json"
    fetched.parent.mkdir(parents=True)
    known = {"tokenizer": tokenizer_at(fetched)}

    def files(identity: dict[str, str], file: Path | None = None, vocabulary: int = 4) -> Any:
        return tokenizer_files(identity, vocabulary=vocabulary, sequence=16, file=file, place="checkpoint")

    found = files(known)
    assert (found.end, found.content["tokenizer.json"]) == (3, fetched.read_bytes())
    assert json.loads(found.content["tokenizer_config.json"])["model_max_length"] == 16
    assert files({"tokenizer": "0" * 64}) is None
    assert files({}) is None
    assert files({}, fetched).end == 3

    other = tmp_path / "other.json"
    tokenizer_at(other, end="<stop>")
    for identity, file, vocabulary, said in (
        (known, other, 4, "trained with another tokenizer"),
        ({"tokenizer": BYTES}, other, 4, "trained with another tokenizer"),
        ({}, other, 4, "no end of text"),
        (known, None, 3, "tokens that the model has no row for"),
        ({"tokenizer": BYTES}, None, 256, "tokens that the model has no row for"),
    ):
        with pytest.raises(InputError, match=said):
            files(identity, file, vocabulary)
    other.write_text('{"model": []}')
    with pytest.raises(InputError, match=r"not a tokenizer\.json"):
        files({}, other)


def test_byte_tokens_are_the_bytes_of_a_text(tmp_path: Path) -> None:
    made = tokenizer_files({"tokenizer": BYTES}, vocabulary=320, sequence=16, file=None, place="checkpoint")
    assert made is not None
    for name, content in made.content.items():
        (tmp_path / name).write_bytes(content)
    read, text = transformers.AutoTokenizer.from_pretrained(tmp_path), "Grüße, 世界!\n\t x"
    tokens = read(text)["input_ids"]
    assert (tokens, read.decode(tokens)) == (list(text.encode()), text)
    assert read(f"a{END_OF_TEXT}")["input_ids"] == [ord("a"), SEPARATOR]
    assert made.end == read.eos_token_id == SEPARATOR
