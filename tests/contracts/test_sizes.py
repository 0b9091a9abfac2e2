"""Files and functions stay short enough to be read in one sitting."""

from __future__ import annotations

import ast
from fnmatch import fnmatchcase
from pathlib import Path

from tests.contracts.tree import project_files, shown

FUNCTION_LINES = 60
CLASS_LINES = 200
# The first pattern that fits decides.
FILE_LINES = {
    "tasks.py": 200,
    "noxfile.py": 230,
    "kernels/*.py": 400,
    "recipes/*/kernels/*.py": 400,
    "recipes/*/kernels/csrc/*.h": 400,
    "recipes/*/tests/*.py": 400,
    "recipes/*/tools/*.py": 400,
    "recipes/*.py": 300,
    "src/twinrun/train/models/*.py": 300,
    "images/*Dockerfile": 100,
    "*.py": 600,
}
# Path, or path and name of a function or class, to the reason why it may be longer.
ALLOWED: dict[str, str] = {"tasks.py": "Invoke wants every option of a command as a parameter with its help"}


def limit_of(path: Path) -> int | None:
    name = shown(path)
    return next((lines for pattern, lines in FILE_LINES.items() if fnmatchcase(name, pattern)), None)


FILES = [path for path in project_files() if limit_of(path)]


def too_long(path: Path) -> dict[str, str]:
    """Return what in `path` is over its limit, with its size."""
    text = path.read_text(encoding="utf-8")
    lines, limit = len(text.splitlines()), limit_of(path) or 0
    found = {shown(path): f"{lines} lines, at most {limit}"} if lines > limit else {}
    return found | (_long_parts(path, text) if path.suffix == ".py" else {})


def _long_parts(path: Path, text: str) -> dict[str, str]:
    found = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            limit = CLASS_LINES if isinstance(node, ast.ClassDef) else FUNCTION_LINES
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > limit:
                found[f"{shown(path)}:{node.name}"] = f"{lines} lines, at most {limit}"
    return found


def test_nothing_is_too_long_but_the_allowed() -> None:
    found = {name: size for path in FILES for name, size in too_long(path).items()}
    over = {name: size for name, size in found.items() if name not in ALLOWED}
    assert not over, "\n".join(["", *(f"{name}: {size}" for name, size in over.items())])
    assert ALLOWED.keys() <= found.keys(), "no longer too long, so no longer allowed"
    assert all(reason.strip() for reason in ALLOWED.values())


def test_long_functions_are_found() -> None:
    text = "class A:\n    def f(self):\n" + FUNCTION_LINES * "        g()\n"
    assert list(_long_parts(FILES[0], text)) == [f"{shown(FILES[0])}:f"]
