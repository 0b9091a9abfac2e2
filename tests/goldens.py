"""Golden files, laid out for a reader; `TWINRUN_WRITE_GOLDEN=1` writes them anew."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parent / "golden"
WRITING = bool(os.environ.get("TWINRUN_WRITE_GOLDEN"))
WIDTH = 110
SHORT = 200
OPTION = re.compile(r"--?[a-z][a-z-]*")


def laid_out(value: Any, *, margin: str = "", key: str = "") -> str:
    """Return JSON in which what fits on a line is on one, and plain values share lines."""
    line = f"{margin}{key}{json.dumps(value, ensure_ascii=False)}"
    if len(line) < WIDTH or not isinstance(value, dict | list):
        return line
    inner = f"{margin} "
    if isinstance(value, dict):
        parts = [laid_out(one, margin=inner, key=f"{json.dumps(name)}: ") for name, one in value.items()]
    elif any(isinstance(one, dict | list) for one in value):
        parts = [laid_out(one, margin=inner) for one in value]
    else:
        parts = list(_filled([json.dumps(one, ensure_ascii=False) for one in value], inner))
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return f"{margin}{key}{opening}\n" + ",\n".join(parts) + f"\n{margin}{closing}"


def _filled(words: Sequence[str], margin: str) -> Iterator[str]:
    """Yield lines of words; an option begins one, so that a new one moves no other."""
    line = ""
    for word in words:
        if line and (OPTION.match(word[1:]) or len(margin) + len(line) + len(word) > WIDTH):
            yield margin + line
            line = ""
        line = f"{line}, {word}" if line else word
    yield margin + line


def shortened(content: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of a document: short ones as they are, long ones as their digests."""
    return {
        name: part if len(json.dumps(part)) < SHORT else "sha256:" + digest(json.dumps(part))
        for name, part in content.items()
    }


def digest(text: str) -> str:
    """Return the first half of a SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def check_golden(name: str, text: str, *, like: str = "") -> None:
    """Hold a text against its golden file, which has all of it or what `diff` tells of another golden file.

    Raises:
        AssertionError: They differ.
    """
    if like:
        base = (GOLDEN / like).read_text(encoding="utf-8").splitlines()
        hunks = list(difflib.unified_diff(base, text.splitlines(), n=0, lineterm=""))[2:]
        name, text = f"{name}.diff", "".join(f"{line}\n" for line in hunks)
    file = GOLDEN / name
    if WRITING:
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")


def check_entry(name: str, key: str, entry: dict[str, Any] | str) -> None:
    """Hold what is told of one of several documents against its entry in a golden file of all.

    Raises:
        AssertionError: They differ.
    """
    file = GOLDEN / name
    entries = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if WRITING:
        entries[key] = entry
        file.write_text(laid_out(dict(sorted(entries.items()))) + "\n", encoding="utf-8")
    assert entry == entries[key]
