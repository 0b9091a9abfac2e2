"""Preparation of both kinds of data, on real files."""

from __future__ import annotations

import gzip
import hashlib
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("streaming")

import numpy as np
import pyarrow
import pyarrow.parquet
from streaming.base.format import reader_from_json
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from tests.train.small import documents
from twinrun.checkpoints.tokenizer import END_OF_TEXT, SEPARATOR
from twinrun.foundation.errors import InputError
from twinrun.protocol.training import FORMS, DataSource
from twinrun.train.corpus import Origin, Tokens, read_corpus, write_corpus
from twinrun.train.prepare import main, prepare_files

ORIGIN = Origin(source="test", sequence=16)
KEYS: dict[str, Any] = {
    "kind": "hugging-face",
    **dict.fromkeys(("repository", "tokenizer"), "x"),
    **dict.fromkeys(("revision", "tokenizer_revision"), "0" * 40),
}
TEXTS = DataSource(files="*.json.gz", **KEYS)


def stream(folder: Path) -> Any:
    """Return all tokens of a prepared folder, in the order they were written."""
    shards = json.loads((folder / "index.json").read_text())["shards"]
    readers = [reader_from_json(str(folder), None, shard) for shard in shards]
    return np.concatenate([reader[number]["tokens"] for reader in readers for number in range(len(reader))])


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("library") / "data"
    status = main(["--source", "standard-library", "--sequence", "2048", "--out", str(folder)])
    assert status == 0
    return folder


def test_standard_library_is_bytes_and_separators(library: Path) -> None:
    tokens = stream(library)
    first = min(Path(sysconfig.get_path("stdlib")).glob("*.py")).read_bytes()
    assert bytes(tokens[: len(first)].astype(np.uint8)) == first
    assert tokens[len(first)] == SEPARATOR
    assert tokens.max() == SEPARATOR


def test_data_prepared_otherwise_is_not_replaced(library: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--source", "standard-library", "--sequence", "64", "--out", str(library)]) == 2
    assert "this folder holds data prepared otherwise" in capsys.readouterr().err


def test_an_interrupted_preparation_leaves_nothing(tmp_path: Path) -> None:
    def breaking() -> Iterator[tuple[Tokens, int]]:
        yield from documents()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_corpus(tmp_path / "data", ORIGIN, breaking())
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    words = {"a": 0, "b": 1, "c": 2, "?": 3, END_OF_TEXT: 4}
    made = Tokenizer(WordLevel(words, unk_token="?"))
    made.pre_tokenizer = Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def write_texts(path: Path, *lines: str) -> Path:
    with gzip.open(path, "wt", encoding="utf-8") as out:
        out.write("".join(f"{line}\n" for line in lines))
    return path


def test_texts_are_joined_by_the_end_of_text(tmp_path: Path, tokenizer: Path) -> None:
    second = write_texts(tmp_path / "2.json.gz", '{"text": "c unknown"}')
    first = write_texts(tmp_path / "1.json.gz", '{"text": "a b", "url": "x"}', '{"text": "b"}')
    corpus = prepare_files(
        tmp_path / "data", source=TEXTS, files=[second, first], tokenizer=tokenizer, sequence=4
    )
    assert stream(tmp_path / "data").tolist() == [0, 1, 4, 1, 4, 2, 3, 4]
    assert corpus.origin.files[0].split() == ["1.json.gz", hashlib.sha256(first.read_bytes()).hexdigest()]
    assert (tmp_path / "data" / "tokenizer.json").read_bytes() == tokenizer.read_bytes()


@pytest.mark.parametrize("line", ["{", "[]", '{"url": "x"}'])
def test_a_broken_line_is_named(tmp_path: Path, tokenizer: Path, line: str) -> None:
    file = write_texts(tmp_path / "1.json.gz", '{"text": "a"}', line)
    with pytest.raises(InputError, match=r"1\.json\.gz:2: "):
        prepare_files(tmp_path / "data", source=TEXTS, files=[file], tokenizer=tokenizer, sequence=1)
    assert not (tmp_path / "data").exists()


def keys(form: str, **others: Any) -> DataSource:
    return DataSource.model_validate(KEYS | {"form": form, "files": f"x{FORMS[form][0]}"} | others)


def written(folder: Path, form: str) -> Path:
    """Return a file of a form that says `a b`, then `c`; text has one document."""
    texts = ["a b", "c"]
    path = folder / f"x{FORMS[form][0]}"
    if form == "json":
        path.write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
    elif form == "text":
        path.write_text("a b c")
    else:
        pyarrow.parquet.write_table(pyarrow.table({"body": texts, "other": [1, 2]}), path)
    return path


@pytest.mark.parametrize("form", ["json", "parquet", "text"])
def test_every_form_gives_its_texts(tmp_path: Path, tokenizer: Path, form: str) -> None:
    (tmp_path / "in").mkdir()
    file = written(tmp_path / "in", form)
    source = keys(form, column="body", end="?", width=32)
    prepare_files(tmp_path / "data", source=source, files=[file], tokenizer=tokenizer, sequence=4)
    expected = [0, 1, 2, 3] if form == "text" else [0, 1, 3, 2]
    assert stream(tmp_path / "data").tolist()[:4] == expected
    assert read_corpus(tmp_path / "data").origin.width == 32


@pytest.mark.parametrize(("header", "width"), [(0, 16), (1024, 16), (0, 32)])
def test_tokens_are_read_after_their_header(tmp_path: Path, header: int, width: int) -> None:
    numbers: Any = np.arange(8, dtype=f"<u{width // 8}")
    (tmp_path / "x.bin").write_bytes(bytes(header) + numbers.tobytes())
    source = keys("tokens", header_bytes=header, width=width)
    prepare_files(tmp_path / "data", source=source, files=[tmp_path / "x.bin"], tokenizer=None, sequence=4)
    assert stream(tmp_path / "data").tolist() == [*range(8)]


@pytest.mark.parametrize(
    ("form", "content", "said"),
    [
        ("json", "", "no document"),
        ("text", "", "no document"),
        ("tokens", "", "not tokens"),
        ("tokens", "abc", "not tokens"),
    ],
)
def test_an_empty_or_ragged_shard_is_refused(
    tmp_path: Path, tokenizer: Path, form: str, content: str, said: str
) -> None:
    path = tmp_path / f"x{FORMS[form][0]}"
    path.write_text(content)
    with pytest.raises(InputError, match=said):
        prepare_files(tmp_path / "data", source=keys(form), files=[path], tokenizer=tokenizer, sequence=1)
    assert not (tmp_path / "data").exists()
