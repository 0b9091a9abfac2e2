"""What a data set must say before anything is fetched."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from twinrun.protocol.training import DataSource

HUB: dict[str, Any] = {"kind": "hugging-face", "repository": "a/b", "revision": "0" * 40}
TOKENIZER: dict[str, Any] = {"tokenizer": "a/t", "tokenizer_revision": "0" * 40}
LOCAL: dict[str, Any] = {"kind": "local", "folder": "data", "sha256": "0" * 64}


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (HUB | {"files": "x.json.gz"}, "tokenizer, tokenizer_revision"),
        (HUB | TOKENIZER | {"files": "x.parquet"}, "end with .json, .jsonl"),
        (HUB | TOKENIZER | {"files": "x.json", "form": "parquet"}, "end with .parquet"),
        (HUB | TOKENIZER | {"files": "x.json", "revision": "main"}, "a commit of 40 digits"),
        (HUB | {"files": "x.bin", "form": "tokens", "width": 8}, "width"),
        (LOCAL | {"files": "*.txt", "form": "text"}, "tokenizer"),
        (LOCAL | {"sha256": None, "files": "*.bin", "form": "tokens"}, "sha256"),
        (LOCAL | {"sha256": "f", "files": "*.bin", "form": "tokens"}, "sha256"),
    ],
)
def test_what_is_incomplete_is_refused_when_the_manifest_is_read(table: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        DataSource.model_validate(table)
