"""What no file of the project may say, and what its pages may not promise."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Container, Iterable
from functools import cache
from pathlib import Path

import pytest
from invoke.collection import Collection
from invoke.parser.context import ParserContext

import tasks
from tests.contracts.tree import ROOT, host_modules, project_files, shown
from twinrun.cli.program import contexts, refuse_options
from twinrun.foundation.errors import InputError, require_known

FORBIDDEN = {
    "an absolute path of one machine": re.compile(r"(?<![\w.$~{}-])/(?:home|root|work|Users)/[\w.]"),
    "the host of a package index": re.compile(
        r"\b(?:pypi|pythonhosted|download\.pytorch|repo\.radeon|anaconda)\.(?:org|com)\b", re.IGNORECASE
    ),
    "a note to oneself": re.compile(r"\b(?:TO[D]O|FIX[M]E|X[X]X)\b"),
}
# Vendors are data in images/vendors/; amd64 is what registries call a processor of any maker.
VENDOR = re.compile(r"(?<![a-z])(?:amd(?!64)|nvidia|rocm|cuda|hip)(?![a-z])", re.IGNORECASE)
# Readers that would execute what they read, beside the modules that ruff bans.
EXECUTING = re.compile(
    r"\b(?:allow_pickle|allow_unsafe_types|trust_remote_code)\W{1,3}True|\bweights_only\b|\.load_checkpoint\("
    r"|\bread_pickle\b|\byaml\.load\(|(?:import_module|__import__)\(.(?:pickle|marshal|dill)"
)
# The framework's own index is data: of a stack.toml, in the one key that names it.
INDEX = re.compile(r'index = "https://[^"]+"')
# What the template's page says is held against the recipe that is baked.
PAGES = [path for path in project_files("*.md") if "{{" not in shown(path)]
BLOCK = re.compile(r"^```(?:console|bash|sh)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# A page bakes a recipe before it runs it.
MADE = re.compile(r"^cookiecutter .*\bname=([\w-]+)", re.MULTILINE)
INLINE = re.compile(r"`((?:invoke|nox)\b[^`\n]*)`")


def hits(path: Path) -> list[str]:
    """Return the lines of `path` that say what no file may say; what is not text says nothing."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        return []
    return [
        f"{shown(path)}:{number}: {what}: {match[0]}"
        for number, line in enumerate(lines, start=1)
        for what, pattern in FORBIDDEN.items()
        if (match := pattern.search(line)) and not (path.name == "stack.toml" and INDEX.fullmatch(line))
    ]


def test_no_file_says_what_none_may() -> None:
    found = [hit for path in project_files() for hit in hits(path)]
    assert not found, "\n".join(["", *found])


def test_no_vendor_is_named_on_the_host() -> None:
    assert not _said(VENDOR, host_modules().values())


def test_nothing_reads_what_executes() -> None:
    python = [
        path for path in project_files("src/*.py", "recipes/*.py", "images/*.py") if "tests" not in path.parts
    ]
    assert not _said(EXECUTING, python)


def _said(pattern: re.Pattern[str], paths: Iterable[Path]) -> list[str]:
    lines = (
        (path, number, line)
        for path in paths
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
    )
    return [
        f"{shown(path)}:{number}: {found[0]}"
        for path, number, line in lines
        if (found := pattern.search(line))
    ]


@pytest.mark.parametrize("path", PAGES, ids=shown)
def test_commands_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    made = {f"recipes/{name}" for name in MADE.findall(text)}
    for command in commands_in(text):
        fault = fault_of(command, made=made)
        assert fault is None, f"{shown(path)}: `{command}`: {fault}"


def test_faults_are_found() -> None:
    assert fault_of("invoke run recipes/mpt7b-scaling --set a=1 --dry") is None
    assert fault_of("invoke ran recipes/mpt7b-scaling")
    assert fault_of("invoke run recipes/mpt7b-scaling --dri")
    assert fault_of("invoke run recipes/no-such-recipe")
    assert fault_of("nox -s tests docs") is None
    assert fault_of("nox -s test")


def commands_in(text: str) -> list[str]:
    """Return the commands of code blocks and of inline code, continued lines joined."""
    blocks = "\n".join(BLOCK.findall(text)).replace("\\\n", " ")
    lines = [line.removeprefix("$ ").partition("  #")[0].strip() for line in blocks.splitlines()]
    parts = [part.strip() for line in lines for part in line.split("&&")]
    return [part for part in (*parts, *INLINE.findall(text)) if part.split()[:1] in (["invoke"], ["nox"])]


def fault_of(command: str, *, made: Container[str] = ()) -> str | None:
    """Return why `command` would not be understood; words in capitals stand for anything.

    Args:
        made: files that an earlier command of the page makes.
    """
    program, *words = shlex.split(command)
    if program == "nox":
        own = words[: words.index("--")] if "--" in words else words
        named = [word.partition("(")[0] for word in own[own.index("-s") + 1 :]] if "-s" in own else []
        return next((f"no session {name}" for name in named if name not in sessions()), None)
    if words[0] not in ("--list", "--help", "COMMAND", *(known_commands() if len(words) == 1 else ())):
        try:
            require_known(words[0], known_commands(), "unknown command", place="invoke")
            refuse_options(known_commands()[words[0]], words[1:])
        except InputError as error:
            return str(error)
    paths = [word for word in words if re.match(r"(recipes|images|templates)/(?![A-Z]+$)", word)]
    return next(
        (f"no such file: {word}" for word in paths if word not in made and not list(ROOT.glob(word))), None
    )


@cache
def known_commands() -> dict[str, ParserContext]:
    """Return the commands, which prose may name without their arguments."""
    return {str(one.name): one for one in contexts(Collection.from_module(tasks))}


@cache
def sessions() -> set[str]:
    """Return the functions of noxfile.py that are sessions."""
    tree = ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {node.name for node in functions if "nox.session" in ast.unparse(node).partition("def ")[0]}
