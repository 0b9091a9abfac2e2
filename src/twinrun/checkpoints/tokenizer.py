"""The tokenizer beside converted weights: made for byte tokens, copied and held by its digest for others.

Without one, a folder of transformers cannot be scored: harnesses take the tokenizer from where the model is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from twinrun.foundation.cache import cache_root
from twinrun.foundation.errors import InputError, require_equal
from twinrun.foundation.files import parse_json, sha256_of_bytes
from twinrun.foundation.manifest import read_text

# Field of a checkpoint's identity that names its tokenizer: a source of byte tokens, or a SHA-256.
IDENTITY = "tokenizer"
BYTES = "standard-library"
# Byte tokens are 0 to 255; the next number separates documents.
SEPARATOR = 256
END_OF_TEXT = "<|endoftext|>"
FILE, CONFIG = "tokenizer.json", "tokenizer_config.json"


class TokenizerFiles(NamedTuple):
    """What transformers reads of a tokenizer, and the token that ends a document."""

    content: dict[str, bytes]
    """Content of each file by its name."""
    end: int


def tokenizer_files(
    identity: Mapping[str, str], *, vocabulary: int, sequence: int | None, file: Path | None, place: str
) -> TokenizerFiles | None:
    """Return the tokenizer that a model was trained with; None where nothing here is that tokenizer.

    Args:
        identity: what the checkpoint says of its run.
        vocabulary: rows of the model's embedding.
        sequence: tokens that the model was trained on at once, where its sizes say so.
        file: tokenizer.json; where none is given, what `invoke data` has fetched is searched.
        place: the checkpoint, for messages.

    Raises:
        InputError: `file` is no such tokenizer, has another digest, no end of text or too many tokens.
    """
    known = identity.get(IDENTITY)
    if known == BYTES and file is None:
        content = json.dumps(_byte_tokenizer(), ensure_ascii=False).encode()
    else:
        found = file or fetched_tokenizer(known)
        if found is None:
            return None
        content = read_text(found).encode()
        # Weights without a run were trained with any.
        digest = sha256_of_bytes(content) if known else None
        message = "the model was trained with another tokenizer"
        require_equal(digest, known, message, place=str(found), hint=f"{place} names it by its SHA-256")
    source = str(file or place)
    end = _end_of(content, vocabulary, place=source)
    described: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT}
    described |= {"clean_up_tokenization_spaces": False}
    described |= {"model_max_length": sequence} if sequence else {}
    config = json.dumps(described, indent=2, sort_keys=True).encode() + b"\n"
    return TokenizerFiles({FILE: content, CONFIG: config}, end)


def is_known(identity: Mapping[str, str]) -> bool:
    """Say whether `tokenizer_files` finds the tokenizer of a model without being given a file."""
    known = identity.get(IDENTITY)
    return known == BYTES or fetched_tokenizer(known) is not None


def fetched_tokenizer(sha256: str | None) -> Path | None:
    """Return the file with this digest among those that `invoke data` has fetched or prepared."""
    if sha256 is None:
        return None
    root = cache_root()
    found = sorted([*(root / "downloads").rglob(FILE), *(root / "data").glob(f"*/{FILE}")])
    return next((one for one in found if sha256_of_bytes(one.read_bytes()) == sha256), None)


def _end_of(content: bytes, vocabulary: int, *, place: str) -> int:
    """Return the token that ends a document; raises InputError where the model cannot use the tokenizer."""
    try:
        described = parse_json(content)
        tokens = dict(described["model"]["vocab"])
        tokens |= {str(one["content"]): int(one["id"]) for one in described["added_tokens"]}
        largest = max(tokens.values())
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"not a tokenizer.json of a vocabulary by name: {error!r}", place=place) from None
    if END_OF_TEXT not in tokens:
        raise InputError("the tokenizer has no end of text", place=place, allowed=END_OF_TEXT)
    if largest >= vocabulary:
        message, allowed = "the tokenizer has tokens that the model has no row for", f"below {vocabulary}"
        raise InputError(message, place=place, found=largest, allowed=allowed)
    return int(tokens[END_OF_TEXT])


def _byte_tokenizer() -> dict[str, Any]:
    """Return the tokenizer whose tokens are the bytes of UTF-8."""
    end = {"id": SEPARATOR, "content": END_OF_TEXT, "special": True}
    end |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "vocab": {letter: byte for byte, letter in _letters()}, "merges": []},
    }


def _letters() -> list[tuple[int, str]]:
    """Return the letter that ByteLevel of tokenizers writes for each byte: itself where it can be seen."""
    seen = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in seen]
    return [(byte, chr(byte) if byte in seen else chr(256 + others.index(byte))) for byte in range(256)]
