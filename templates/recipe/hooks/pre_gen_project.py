"""Refuses answers that no recipe can have; runs in the new folder, which goes when this exits with 1."""

import difflib
import re
import sys
import tomllib
from pathlib import Path

NAME = {{ cookiecutter.name | tojson }}
GPU = {{ cookiecutter.gpu | tojson }}
TITLES = {
    "title": {{ cookiecutter.title | tojson }},
    "publication_title": {{ cookiecutter.publication_title | tojson }},
}
GPUS = Path("../../images/gpus.toml")


def refuse(key: str, found: str, allowed: str) -> None:
    """End with what is wrong, in the words of every other wrong input."""
    sys.exit(f"{key}: found {found!r}, allowed: {allowed}")


if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", NAME):
    refuse("name", NAME, "lower-case letters and digits joined by hyphens")
for key, text in TITLES.items():
    if not text.strip() or re.search(r"[\x00-\x1f\x7f]", text):
        refuse(key, text, "one line of text")
if not GPUS.is_file():
    refuse("--output-dir", str(Path.cwd().parent), "recipes/ of a checkout of twinrun")
gpus = [row["id"] for row in tomllib.loads(GPUS.read_text(encoding="utf-8"))["gpu"]]
if GPU not in gpus:
    nearest = [gpu for gpu in gpus if gpu.startswith(f"{GPU}-")] or difflib.get_close_matches(GPU, gpus, 1)
    refuse("gpu", GPU, ", ".join(gpus) + (f"; did you mean {nearest[0]}?" if nearest else ""))
