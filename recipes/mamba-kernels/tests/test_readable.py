"""A kernel author can read the sources: headers say what they compute, and functions fit a page."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from sources import KERNELS

ROOT = KERNELS.parents[2]
SOURCES = sorted(path for path in (KERNELS / "csrc").iterdir() if path.suffix in (".h", ".cpp"))
HEADERS = [path for path in SOURCES if path.suffix == ".h"]
FUNCTION_LINES = 60
# Functions that may be longer: "file:name" to their lines and why no part can leave them; it only shrinks.
LONGER: dict[str, tuple[int, str]] = {}

_WORDS = re.compile(r"//[^\n]*|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])+'")
_DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", re.MULTILINE)
_CALLED_MACRO = re.compile(r"^[A-Z_]+\([^{}]*\)$", re.MULTILINE)
_SCOPE = re.compile(r"\s*(?:namespace|struct|class|enum|union|extern \"C\")\b[^()]*$")


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match[0])


def functions(text: str) -> dict[str, int]:
    """Return how many lines each function has, from its template parameters on; of one name the most."""
    for pattern in (_WORDS, _DIRECTIVE, _CALLED_MACRO):
        text = pattern.sub(_blank, text)
    found: dict[str, int] = {}
    start, opened = 0, list[tuple[str, int]]()
    for at, sign in enumerate(text):
        if sign == "{":
            head = text[start:at]
            within = any(name for name, _ in opened)
            name = re.search(r"([\w~]+)\s*\(", head) if not within and not _SCOPE.match(head) else None
            opened.append((name[1] if name else "", start + len(head) - len(head.lstrip())))
        elif sign == "}" and opened:
            name_of, begin = opened.pop()
            lines = text.count("\n", begin, at) + 1
            if name_of:
                found[name_of] = max(lines, found.get(name_of, 0))
        if sign in ";{}":
            start = at + 1
    return found


def test_no_function_is_longer_than_a_page() -> None:
    lengths = {
        f"{path.name}:{name}": lines
        for path in SOURCES
        for name, lines in functions(path.read_text(encoding="utf-8")).items()
    }
    assert lengths["scan_backward.h:backward_chunks"] > FUNCTION_LINES // 2, "functions are found"
    over = {name: lines for name, lines in lengths.items() if lines > FUNCTION_LINES}
    assert over == {name: lines for name, (lines, _) in LONGER.items()}


def test_lines_of_functions_are_counted() -> None:
    text = """
struct Pair {
  int a;  // {
  int sum() const { return a; }
};
#define BODY(x) { x }
template <class T>
void outer(T x) {
  auto inner = [&] {
    if (x) {
    }
  };
}
"""
    assert functions(text) == {"sum": 1, "outer": 7}


@pytest.mark.parametrize("path", HEADERS, ids=lambda path: path.name)
def test_a_header_says_what_it_computes_how_and_how_to_run_it(path: Path) -> None:
    opening = path.read_text(encoding="utf-8").partition("#pragma once")[0]
    said = dict(re.findall(r"^// (Equation|Tiling|Alone): (.+)$", opening, re.MULTILINE))
    assert sorted(said) == ["Alone", "Equation", "Tiling"]
    program, tests, *rest = shlex.split(said["Alone"])
    assert program == "pytest"
    words = rest[1].split(" or ") if rest else ["def test_"]
    assert rest[:1] in ([], ["-k"])
    source = (ROOT / tests).read_text(encoding="utf-8")
    assert all(re.search(rf"^def test_\w*{word}|^{word}", source, re.MULTILINE) for word in words)
