"""The model that is scored: a folder of transformers with its tokenizer, refused where both do not fit."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from twinrun.checkpoints.hugging_face.tokenizer import CONFIG as TOKENIZER_CONFIG
from twinrun.checkpoints.hugging_face.tokenizer import FILE as TOKENIZER
from twinrun.checkpoints.hugging_face.writing import CONFIG
from twinrun.foundation.errors import InputError
from twinrun.foundation.files import sha256_of_file
from twinrun.train.models import DTYPES


def digest_of_folder(folder: Path) -> str:
    """Return a digest of the configuration, the weights and the tokenizer of a folder of transformers.

    Raises:
        InputError: there is no configuration, or no weights as safetensors.
    """
    weights = sorted(folder.glob("*.safetensors"))
    for name, there in ((CONFIG, (folder / CONFIG).is_file()), ("*.safetensors", bool(weights))):
        if not there:
            raise InputError("not a folder of transformers", place=str(folder), found=f"no {name}")
    files = [folder / CONFIG, *weights, folder / TOKENIZER]
    lines = [f"{one.name} {sha256_of_file(one)}\n" for one in files if one.is_file()]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def load_model(folder: Path, *, precision: str, device: torch.device) -> Any:
    """Return the model of a folder on `device`, its weights in the type that it is scored in."""
    # Half a minute at most; a rank that only trains needs none of it.
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        str(folder), torch_dtype=DTYPES[precision], local_files_only=True, use_safetensors=True
    )
    return model.to(device).eval()


def load_tokenizer(folder: Path, *, vocabulary: int) -> Any:
    """Return the tokenizer of a folder.

    Raises:
        InputError: there is none, it has no end token, or tokens that the model has no row for.
    """
    from transformers import PreTrainedTokenizerFast

    if not (folder / TOKENIZER).is_file():
        raise InputError(
            "no tokenizer beside the model",
            place=str(folder),
            found=f"no {TOKENIZER}",
            hint="`invoke checkpoint convert --tokenizer FILE` writes one",
        )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    if tokenizer.eos_token_id is None:
        raise InputError(
            "the tokenizer has no end token, with which a prompt without a context begins",
            place=str(folder / TOKENIZER_CONFIG),
            found="no eos_token",
        )
    largest = max(tokenizer.get_vocab().values())
    if largest >= vocabulary:
        raise InputError(
            "the tokenizer has tokens that the model has no row for: it is another model's",
            place=str(folder / TOKENIZER),
            found=largest,
            allowed=f"below {vocabulary}",
        )
    return tokenizer


def tokenizer_digest(tokenizer: Any) -> str:
    """Return the digest of a tokenizer as it was loaded."""
    return hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()


def vocabulary_of(folder: Path) -> int:
    """Return the rows of the embedding, as config.json has them; raises InputError."""
    content = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    if not isinstance(content.get("vocab_size"), int):
        raise InputError(
            "config.json does not say how many tokens the model knows",
            place=str(folder / CONFIG),
            found=content.get("vocab_size"),
            allowed="vocab_size",
        )
    found: int = content["vocab_size"]
    return found
