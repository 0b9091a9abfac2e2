"""The model that is scored: a folder of transformers with its tokenizer, refused where both do not fit.

Nothing that lies in the folder is executed: weights are safetensors, and code beside them is not imported.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer

from twinrun.checkpoints.model_folder import CONFIG, PARTS, hashed_alone, read_object
from twinrun.checkpoints.tokenizer import CONFIG as TOKENIZER_CONFIG
from twinrun.checkpoints.tokenizer import FILE as TOKENIZER
from twinrun.foundation.errors import InputError
from twinrun.foundation.text import plural
from twinrun.train.models import DTYPES

# Transformers raises these where a value of config.json is not of the kind that it looks up unasked.
_FAULTS = (
    *(OSError, ValueError, LookupError, AttributeError, TypeError, ArithmeticError, ImportError),
    *(AssertionError, RuntimeError, SafetensorError),
)
_TRUST = {"local_files_only": True, "trust_remote_code": False}


def load_model(folder: Path, *, precision: str, device: torch.device) -> Any:
    """Return the model of a folder on `device`, its weights in the type that it is scored in.

    Raises:
        InputError: transformers has no class for it without code of others, or weights are missing.
    """
    # Half a minute at most; a rank that only trains needs none of it.
    from transformers import AutoModelForCausalLM

    try:
        with hashed_alone(folder) as place:
            model, loaded = AutoModelForCausalLM.from_pretrained(
                str(place),
                torch_dtype=DTYPES[precision],
                use_safetensors=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **_TRUST,
            )
    except _FAULTS as error:
        raise _unloadable("model", folder, error) from None
    # transformers draws what does not fit, and scores of that would be noise.
    other = [name for name, *_ in loaded["mismatched_keys"]]
    if unfit := sorted([*loaded["missing_keys"], *other]):
        found = f"{plural(len(unfit), 'tensor')}, {unfit[0]} first"
        message = "weights that config.json asks for are missing or of another size"
        raise InputError(message, place=str(folder), found=found)
    return model.to(device).eval()


def digest_of_tensors(model: torch.nn.Module) -> str:
    """Return a digest of name, type, shape and values of every tensor that a model has in memory."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def load_tokenizer(folder: Path, *, vocabulary: int, allowed: str | None = None) -> Any:
    """Return the tokenizer of a folder.

    Args:
        allowed: the only digest that it may have.

    Raises:
        InputError: it cannot be loaded, is another one, has no end token, or tokens that the model has no row
            for.
    """
    from transformers import AutoTokenizer

    try:
        with hashed_alone(folder) as place:
            tokenizer = AutoTokenizer.from_pretrained(str(place), use_fast=True, **_TRUST)
    except _FAULTS as error:
        raise _unloadable("tokenizer", folder, error) from None
    if not tokenizer.is_fast:
        found = type(tokenizer).__name__
        raise InputError("no tokenizer of the library tokenizers", place=str(folder), found=found)
    if (end := tokenizer.eos_token) is None or not _has(folder, end):
        message = "the tokenizer has no end token, with which a prompt without a context begins"
        found = f"eos_token {end}, which is no token" if end else "no eos_token"
        raise InputError(message, place=str(folder / TOKENIZER_CONFIG), found=found)
    if (largest := max(tokenizer.get_vocab().values())) >= vocabulary:
        message = "the tokenizer has tokens that the model has no row for: it is another model's"
        raise InputError(message, place=str(folder), found=largest, allowed=f"below {vocabulary}")
    digest = tokenizer_digest(tokenizer)
    if allowed not in (None, digest):
        raise InputError("another tokenizer", place=str(folder), found=f"sha256 {digest}", allowed=allowed)
    return tokenizer


def _has(folder: Path, token: str) -> bool:
    """Say whether the tokenizer's files have a token; transformers adds one that they lack, as a new row."""
    if (folder / TOKENIZER).is_file():
        return Tokenizer.from_file(str(folder / TOKENIZER)).token_to_id(token) is not None
    added = folder / "added_tokens.json"
    return any(token in read_object(file) for file in (folder / PARTS[0], added) if file.is_file())


def tokenizer_digest(tokenizer: Any) -> str:
    """Return the digest of a tokenizer as it was loaded."""
    return hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()


def vocabulary_of(folder: Path) -> int:
    """Return the rows of the embedding, as config.json has them; raises InputError."""
    found, place = read_object(folder / CONFIG).get("vocab_size"), str(folder / CONFIG)
    if not isinstance(found, int):
        message = "config.json does not say how many tokens the model knows"
        raise InputError(message, place=place, found=found, allowed="vocab_size")
    return found


def _unloadable(what: str, folder: Path, error: Exception) -> InputError:
    said = str(error).strip().partition("\n")[0]
    return InputError(f"transformers cannot load the {what}", place=str(folder), found=said)
