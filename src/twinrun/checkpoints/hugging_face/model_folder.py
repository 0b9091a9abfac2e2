"""A folder as transformers reads it: which of its files decide a score, and their digest.

Weights are safetensors alone: what has to be executed to be read is not looked at.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from twinrun.checkpoints.hugging_face.reading import INDEX, read_json, weight_files
from twinrun.checkpoints.hugging_face.tokenizer import CONFIG as TOKENIZER_CONFIG
from twinrun.checkpoints.hugging_face.tokenizer import FILE as TOKENIZER
from twinrun.checkpoints.hugging_face.writing import CONFIG, WEIGHTS
from twinrun.foundation.errors import InputError
from twinrun.foundation.files import sha256_of_file

# A tokenizer is one file, or the two that GPT-2's came in.
PARTS = ("vocab.json", "merges.txt")
SMALL = (CONFIG, TOKENIZER, TOKENIZER_CONFIG, *PARTS, "special_tokens_map.json", "added_tokens.json")
# Shell patterns of the files that are fetched from a repository.
PATTERNS = (*SMALL, WEIGHTS, "model-*-of-*.safetensors", INDEX)

# Transformers looks the value of these keys up among all names of torch.
_DTYPE_KEYS, _DTYPES = ("dtype", "torch_dtype"), ("float64", "float32", "float16", "bfloat16", "auto")
# Keys of config.json with which transformers takes weights or kernels from elsewhere.
ELSEWHERE = ("transformers_weights", "_attn_implementation", "_attn_implementation_internal")


def lacking(names: set[str]) -> tuple[str, str] | None:
    """Return what the files of a model lack and what helps, or None."""
    if CONFIG not in names:
        return f"no {CONFIG}", f"a model of transformers has its sizes in {CONFIG}"
    if not any(name.endswith(".safetensors") for name in names):
        return "no *.safetensors", (
            "pickles are never loaded; some repositories have a conversion under another commit"
        )
    if TOKENIZER not in names and not names.issuperset(PARTS):
        return f"no {TOKENIZER}, and no {' with '.join(PARTS)}", (
            "`invoke checkpoint convert --tokenizer FILE` writes one beside the weights of a checkpoint"
        )
    return None


def model_files(folder: Path) -> list[Path]:
    """Return the files that decide a score; raises InputError, DamagedError where one is missing."""
    if not folder.is_dir():
        raise InputError("no such folder of a model", place=str(folder))
    if lack := lacking({path.name for path in folder.iterdir()}):
        raise InputError("not a whole folder of transformers", place=str(folder), found=lack[0], hint=lack[1])
    config = read_json(folder / CONFIG)
    for key in _DTYPE_KEYS:
        if (found := config.get(key)) is not None and found not in _DTYPES:
            raise InputError(
                "no type of weights", place=f"{folder / CONFIG}:{key}", found=repr(found), allowed=_DTYPES
            )
    if elsewhere := [name for name in ELSEWHERE if name in config]:
        raise InputError(
            "weights or code of another place, which no digest of this folder covers",
            place=f"{folder / CONFIG}:{elsewhere[0]}",
            found=elsewhere,
            hint="take these keys out, and put the weights where transformers looks for them",
        )
    small = [folder / name for name in (*SMALL, INDEX) if (folder / name).is_file()]
    return sorted([*small, *weight_files(folder)])


def stamps(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return what the file system says of the files that decide a score; no write leaves it the same."""
    found = {path.name: path.stat() for path in model_files(folder)}
    return {
        name: (one.st_dev, one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns)
        for name, one in found.items()
    }


def digest_of_folder(folder: Path, *, allowed: str | None = None) -> str:
    """Return a digest of the configuration, the weights and the tokenizer of a folder.

    Args:
        allowed: the only digest that it may have.

    Raises:
        InputError: one of these is not there, or they have another digest.
        DamagedError: an index names weights that are not there.
    """
    lines = [f"{one.name} {sha256_of_file(one)}\n" for one in model_files(folder)]
    found = hashlib.sha256("".join(lines).encode()).hexdigest()
    if allowed is not None and found != allowed:
        raise InputError("the model has another digest", place=str(folder), found=found, allowed=allowed)
    return found
