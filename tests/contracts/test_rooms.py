"""Each room of the package keeps to its budget of code lines, in `rooms.toml`."""

from __future__ import annotations

import ast
import io
import sys
import tokenize
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from tests.contracts.tree import ROOT

PACKAGE = ROOT / "src" / "twinrun"
BUDGETS = Path(__file__).with_name("rooms.toml")
# Tokens that are no code: blank ends of lines, indentation and comments.
SILENT = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}


def code_lines(text: str) -> int:
    """Return how many lines of a module are code: no blank line, no comment, no docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SILENT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        # A string that stands alone documents what is above it.
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def rooms() -> Counter[str]:
    """Return the code lines of each package below twinrun; modules beside them count as `.`."""
    found: Counter[str] = Counter()
    for path in PACKAGE.rglob("*.py"):
        inside = path.relative_to(PACKAGE).parts
        found[inside[0] if len(inside) > 1 else "."] += code_lines(path.read_text(encoding="utf-8"))
    return found


def test_every_room_keeps_to_its_budget(capsys: pytest.CaptureFixture[str]) -> None:
    budgets, found = tomllib.loads(BUDGETS.read_text(encoding="utf-8"))["lines"], rooms()
    rows = [*found.most_common(), ("all", found.total())]
    allowed = budgets | {"all": sum(budgets.values())}
    table = [f"{room:12} {lines:6,} of {allowed.get(room, 0):6,} code lines" for room, lines in rows]
    with capsys.disabled():
        sys.stdout.write("\n".join(["", *table, ""]))
    assert found.keys() == budgets.keys(), "a room without a budget, or a budget without a room"
    over = {room: lines for room, lines in found.items() if lines > budgets[room]}
    assert not over, "raise a budget only with the reason in the same commit"


def test_neither_blanks_nor_comments_nor_docstrings_count() -> None:
    module = '"""A module.\n\nOf three lines."""\n\n# A comment.\nX = (\n    1,  # one\n)\n\n'
    fields = 'class A:\n    """One."""\n\n    x: int\n    """A field."""\n'
    assert code_lines(module + fields) == 5
