"""Count what has to be read and hold it against `tests/contracts/rooms.toml`, whose figures only fall.

`python -m tools.size` prints the figures and `--write` keeps them, unless one is above the last landed one.
Code lines are neither blank, nor a comment, nor a docstring, nor a string that stands alone below a field.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE = "tests/contracts/rooms.toml"
HEAD = """\
# Written by `nox -s size`: code lines of each room, and what else has to be read. No figure may pass that of
# the last landed commit, but for what recipes bring: recipes, C++, published.toml and words of Markdown.
# A room may take lines that others have lost, as long as the sum falls.
"""
# Adding a recipe touches nothing outside its folder, so the ratchet does not weigh it.
OF_RECIPES = frozenset({"recipes", "C++ lines", "published.toml lines", "words of Markdown"})
INNER_NAMES = "inner names in tests"
# What tests may import of the package without a reason: the library and the program.
DOORS = frozenset({"twinrun", "twinrun.api"})
SILENT = frozenset(
    {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    | {tokenize.ENCODING, tokenize.ENDMARKER}
)
C_FAMILY = frozenset({".c", ".cpp", ".cu", ".cuh", ".h", ".hip", ".hpp"})
READ = C_FAMILY | {".md", ".py", ".toml"}


def code_lines(text: str) -> int:
    """Return how many lines of a module are code; a template's, before it is baked, may be no Python."""
    lines: set[int] = set()
    try:
        tokens, tree = list(tokenize.generate_tokens(io.StringIO(text).readline)), ast.parse(text)
    except (SyntaxError, tokenize.TokenError):
        return sum(bool(line.strip()) for line in text.splitlines())
    for token in tokens:
        if token.type not in SILENT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def inner_names(text: str) -> int:
    """Return how many names of the package a test imports, but for those of its doors."""
    found = 0
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            inner = node.module.startswith("twinrun.") and node.module not in DOORS
            names = [one for one in node.names if f"{node.module}.{one.name}" not in DOORS]
            found += len(names) if inner or node.module == "twinrun" else 0
        elif isinstance(node, ast.Import):
            found += sum(one.name.startswith("twinrun.") and one.name not in DOORS for one in node.names)
    return found


def _counts(name: Path, text: str) -> Iterator[tuple[str, int]]:
    parts, suffix = name.parts, name.suffix
    if suffix == ".py":
        if parts[:2] == ("src", "twinrun"):
            yield "src", code_lines(text)
            yield "src modules", 1
            yield f"src/{parts[2] if len(parts) > 3 else '.'}", code_lines(text)
        elif parts[0] == "tests" or (parts[0] in ("recipes", "kernels") and "tests" in parts):
            yield "tests", len(text.splitlines())
            yield INNER_NAMES, inner_names(text)
        else:
            yield "recipes" if parts[0] in ("recipes", "kernels") else "tools", code_lines(text)
    elif suffix in C_FAMILY:
        yield "C++ lines", len(text.splitlines())
    elif name.name == "published.toml":
        yield "published.toml lines", len(text.splitlines())
    elif suffix == ".md" and parts[0] != "templates":
        yield "words of Markdown", len(re.findall(r"\S+", text))


def figures(root: Path = ROOT) -> dict[str, int]:
    """Return the figures of the files that git tracks or would track."""
    kinds = ("--cached", "--others", "--exclude-standard")
    listed = _git(root, "ls-files", "-z", *kinds)
    assert listed is not None, f"{root} is no checkout of git"
    found: Counter[str] = Counter()
    for name in sorted({Path(one) for one in listed.split("\0") if one}):
        if name.suffix in READ and (root / name).is_file():
            for key, amount in _counts(name, (root / name).read_text(encoding="utf-8")):
                found[key] += amount
    return dict(sorted(found.items()))


def raised(now: dict[str, int], before: dict[str, int], *, trade: bool = False) -> list[str]:
    """Return the figures that are higher than before; a new one is none.

    Args:
        trade: a room may take lines that others have lost, as long as the sum of all falls.
    """
    traded = trade and now.get("src", 0) < before.get("src", 0)
    return [
        f"{key}: {figure:,} above the {before[key]:,} of the last landed commit"
        for key, figure in now.items()
        if key not in OF_RECIPES and figure > before.get(key, figure)
        if not (traded and key.startswith("src/"))
    ]


def landed(root: Path = ROOT) -> dict[str, dict[str, dict[str, int]]]:
    """Return the tables of `rooms.toml` by the commits that it must not pass.

    They are HEAD, its first parent, and the point where its branch left main; a shallow clone has only some.
    """
    commits = {"HEAD", "HEAD^"}
    for main in ("origin/main", "main"):
        if base := _git(root, "merge-base", "HEAD", main):
            commits.add(base.strip())
    texts = {commit: _git(root, "show", f"{commit}:{FILE}") for commit in sorted(commits)}
    return {commit: tomllib.loads(text) for commit, text in texts.items() if text is not None}


def kept(root: Path = ROOT) -> dict[str, dict[str, int]]:
    """Return the tables of `rooms.toml`: `figures` and `aims`."""
    return tomllib.loads((root / FILE).read_text(encoding="utf-8"))


def _git(root: Path, *arguments: str) -> str | None:
    done = subprocess.run(("git", "-C", str(root), *arguments), capture_output=True, text=True, check=False)
    return None if done.returncode else done.stdout


def _table(name: str, rows: dict[str, int]) -> str:
    return "\n".join([f"[{name}]", *(f'"{key}" = {figure}' for key, figure in rows.items()), ""])


def main(arguments: list[str]) -> int:
    """Print every figure beside its aim; with `--write`, keep the figures unless one rose."""
    found, aims = figures(), kept()["aims"]
    for key in sorted(found.keys() | aims.keys()):
        count, aim = found.get(key, 0), aims.get(key)
        above = aim is not None and count > aim
        beside = ("" if aim is None else f" of {aim:7,}") + ("  above" if above else "")
        print(f"{key:28} {count:8,}{beside}")
    faults = [
        fault
        for tables in landed().values()
        for fault in raised(found, tables.get("figures", {}), trade=True)
    ]
    for fault in dict.fromkeys(faults):
        print(fault, file=sys.stderr)
    if "--write" in arguments and not faults:
        text = "\n".join([HEAD, _table("figures", found), _table("aims", aims)])
        (ROOT / FILE).write_text(text, encoding="utf-8")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
