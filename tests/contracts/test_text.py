"""What no file of the project may say."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable
from pathlib import Path

from tests.contracts.tree import ROOT, host_modules, project_files, shown
from twinrun.planning.project import Project

FORBIDDEN = {
    "an absolute path of one machine": re.compile(r"(?<![\w.$~{}-])/(?:home|root|work|Users)/[\w.]"),
    "the host of a package index": re.compile(
        r"\b(?:pypi|pythonhosted|download\.pytorch|repo\.radeon|anaconda)\.(?:org|com)\b", re.IGNORECASE
    ),
    "a note to oneself": re.compile(r"\b(?:TO[D]O|FIX[M]E|X[X]X)\b"),
}
# Vendors are data in images/vendors/. Registries call any processor amd64, and PyTorch any GPU torch.cuda.
VENDOR = re.compile(r"(?<![a-z])(?<!torch\.)(?:amd(?!64)|nvidia|rocm|cuda|hip)(?![a-z])", re.IGNORECASE)
# Readers that would execute what they read, beside the modules that ruff bans.
EXECUTING = re.compile(
    r"\b(?:allow_pickle|allow_unsafe_types|trust_remote_code)\W{1,3}True|\bweights_only\b|\.load_checkpoint\("
    r"|\bread_pickle\b|\byaml\.load\(|(?:import_module|__import__)\(.(?:pickle|marshal|dill)"
)
# The framework's own index is data: of a stack.toml, in the one key that names it.
INDEX = re.compile(r'index = "https://[^"]+"')


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


def test_the_statements_are_of_publications_and_name_what_is_there() -> None:
    with (ROOT / "docs/statements.csv").open(encoding="utf-8", newline="") as file:
        statements = list(csv.DictReader(file))
    keys = {loaded.recipe.publication.key for loaded in Project(ROOT).recipes().values()}
    assert {one["publication"] for one in statements} <= keys
    named = re.findall(r"`((?:images|recipes|tests)/[^`]+)`", "".join(one["held by"] for one in statements))
    assert named
    assert not [name for name in named if not any(ROOT.glob(name))]
