"""No vendor is named in Python of the host side: what differs between vendors is data in images/vendors/."""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path

from tests.contracts.tree import host_modules, shown

# Distributions and registries call the processor amd64, whoever makes it.
WORDS = re.compile(r"(?<![a-z])(amd(?!64)|nvidia|rocm|cuda|hip)(?![a-z])", re.IGNORECASE)
SPEAKING = {"NAME", "STRING", "COMMENT", "FSTRING_START", "FSTRING_MIDDLE"}


def hits(source: str) -> list[tuple[int, str]]:
    """Return line and word of every vendor named in an identifier, a string or a comment."""
    return [
        (token.start[0] + token.string[: word.start()].count("\n"), word[0])
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if tokenize.tok_name[token.type] in SPEAKING
        for word in WORDS.finditer(token.string)
    ]


def named_in(path: Path) -> list[str]:
    found = hits(path.read_text(encoding="utf-8"))
    return [f"{shown(path)}:{line}: {word}" for line, word in found]


def test_no_vendor_is_named() -> None:
    found = [hit for path in host_modules().values() for hit in named_in(path)]
    assert not found, "\n".join(["", *found])


def test_words_are_found_wherever_they_speak() -> None:
    source = 'cuda_home = 1\n# ROCm\nx = f"{a}nvidia-smi"\n"""two\nlines: AMD"""\nship = chip = "amdahl"\n'
    assert hits(source) == [(1, "cuda"), (2, "ROCm"), (3, "nvidia"), (5, "AMD")]
