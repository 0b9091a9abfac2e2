"""A folder as transformers reads it: which of its files decide a score, and their digest.

Weights are safetensors alone: what has to be executed to be read is not looked at.
"""

from __future__ import annotations

import contextlib
import re
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from twinrun.checkpoints.folder import DamagedError
from twinrun.checkpoints.tokenizer import CONFIG as TOKENIZER_CONFIG
from twinrun.checkpoints.tokenizer import FILE as TOKENIZER
from twinrun.foundation.errors import InputError, require_equal
from twinrun.foundation.files import leaves, real, sha256_of_bytes, sha256_of_file
from twinrun.foundation.manifest import read_json

CONFIG, WEIGHTS = "config.json", "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
# A tokenizer is one file, or the two that GPT-2's came in.
PARTS = ("vocab.json", "merges.txt")
SMALL = (CONFIG, TOKENIZER, TOKENIZER_CONFIG, *PARTS, "special_tokens_map.json", "added_tokens.json")
# Shell patterns of the files that are fetched from a repository.
PATTERNS = (*SMALL, WEIGHTS, "model-*-of-*.safetensors", INDEX)

# Transformers looks the value of these keys up among all names of torch.
_DTYPE_KEYS, _DTYPES = ("dtype", "torch_dtype"), ("float64", "float32", "float16", "bfloat16", "auto")
_FILE_OF_WEIGHTS = re.compile(r"\w[\w.-]*[.]safetensors", re.ASCII)
# Keys that say where a model came from; nothing is read from there.
_ORIGIN = ("_name_or_path", "name_or_path")
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
    config = read_object(folder / CONFIG)
    for key in _DTYPE_KEYS:
        if (found := config.get(key)) is not None and found not in _DTYPES:
            message, place = "no type of weights", f"{folder / CONFIG}:{key}"
            raise InputError(message, place=place, found=repr(found), allowed=_DTYPES)
    if elsewhere := [name for name in ELSEWHERE if name in config]:
        raise _elsewhere(folder / CONFIG, elsewhere[0], elsewhere)
    small = [folder / name for name in (*SMALL, INDEX) if (folder / name).is_file()]
    files = sorted([*small, *weight_files(folder)])
    for file in (one for one in small if one.name in (CONFIG, TOKENIZER_CONFIG)):
        for key, value in leaves(read_object(file)):
            if isinstance(value, str) and _leads_away(folder, key, value, files):
                raise _elsewhere(file, key, value)
    return files


def _leads_away(folder: Path, key: str, value: str, files: list[Path]) -> bool:
    """Say whether a text of a configuration is the name of something that no digest covers."""
    for path in (folder / value, Path(value)):
        try:
            mode = path.stat().st_mode
        except (OSError, ValueError):
            continue
        if not stat.S_ISDIR(mode) and real(path) not in map(real, files):
            return True
        # A token may be a slash or a dot.
        if stat.S_ISDIR(mode) and "/" in value.strip("/") and key.rpartition(".")[2] not in _ORIGIN:
            return True
    return False


def _elsewhere(file: Path, key: str, found: object) -> InputError:
    return InputError(
        "weights, words or code of another place, which no digest of this folder covers",
        place=f"{file}:{key}",
        found=found,
        hint="take this out, and put the files where transformers looks for them",
    )


@contextlib.contextmanager
def hashed_alone(folder: Path) -> Iterator[Path]:
    """Give a folder that has the files which decide a score, as links, and nothing else of `folder`."""
    with tempfile.TemporaryDirectory() as place:
        for file in model_files(folder):
            (Path(place) / file.name).symlink_to(file.absolute())
        yield Path(place)


def weight_files(folder: Path) -> list[Path]:
    """Return the files with the weights: one, or those that an index names; raises InputError, DamagedError.

    Files that nothing names are not read.
    """
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        message = "no weights that can be read without executing them"
        found = sorted(path.name for path in folder.iterdir())
        raise InputError(message, place=str(folder), found=found, allowed=(WEIGHTS, INDEX))
    named = read_object(folder / INDEX).get("weight_map")
    names = {str(name) for name in named.values()} if isinstance(named, dict) else set()
    if elsewhere := sorted(name for name in names if not _FILE_OF_WEIGHTS.fullmatch(name)):
        raise _elsewhere(folder / INDEX, "weight_map", elsewhere)
    missing = sorted(name for name in names if not (folder / name).is_file())
    if missing or not names:
        raise DamagedError("files are missing", place=str(folder / INDEX), found=missing or "none named")
    return [folder / name for name in sorted(names)]


def read_object(path: Path) -> dict[str, Any]:
    """Return an object of JSON beside weights; raises InputError."""
    if not isinstance(found := read_json(path), dict):
        raise InputError("not an object of JSON", place=str(path))
    return found


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
    found = sha256_of_bytes("".join(lines).encode())
    require_equal(found, allowed or found, "the model has another digest", place=str(folder))
    return found
