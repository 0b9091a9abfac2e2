"""What directions of imports, which import-linter has in pyproject.toml, cannot say of the host side."""

from __future__ import annotations

import ast
import graphlib
import json
import re
import sys
import tomllib

import grimp
import pytest

from tests.contracts.checks import imported
from tests.contracts.tree import ROOT, STACK_PACKAGES, host_modules, loaded_by, shown
from twinrun.workloads import workload_names

RECIPE = min(shown(path) for path in (ROOT / "recipes").iterdir())
# Extras that one module may import, when it is called.
EXTRAS = {
    "twinrun.export.trackers": {"mlflow", "tensorboard", "wandb"},
    "twinrun.parity.controls": {"torch"},
    "twinrun.protocol.digests": {"torch"},
    "twinrun.parity.readers": {"tensorboard", "wandb"},
}
# What a declared package hands out, or always brings, under another import name.
PARTS = {
    "cyclonedx_python_lib": {"cyclonedx", "packageurl"},
    "jinja2": {"markupsafe"},
    "pydantic": {"pydantic_core", "typing_extensions"},
}


def declared() -> set[str]:
    """Return the import names of the packages that pyproject.toml requires on the host."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {re.split(r"[^\w-]", text, maxsplit=1)[0].replace("-", "_") for text in project["dependencies"]}
    return names.union(*(PARTS.get(name, set()) for name in names))


def test_the_host_side_imports_only_what_the_project_declares() -> None:
    assert not declared() & STACK_PACKAGES
    allowed = declared() | set(sys.stdlib_module_names) | {"twinrun"}
    for name, path in host_modules().items():
        foreign = imported(path.read_text(encoding="utf-8")) - allowed - EXTRAS.get(name, set())
        assert not foreign, f"{name} imports {sorted(foreign)}"


def test_nothing_imports_in_a_circle() -> None:
    graph = grimp.build_graph("twinrun")
    graphlib.TopologicalSorter(
        {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    ).prepare()


def test_no_module_asks_which_workload_it_has() -> None:
    """What differs between workloads is a function of theirs; none is asked for by its name elsewhere."""
    for module, path in host_modules().items():
        if module.split(".")[1:2] == ["workloads"]:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Compare, ast.MatchValue)):
                texts = {one.value for one in ast.walk(node) if isinstance(one, ast.Constant)}
                named = [name for name in workload_names() if name in texts]
                assert not named, f"{module}:{node.lineno} asks for {named}"


def test_importing_the_host_side_loads_no_framework() -> None:
    code = "import importlib, json, sys\nfor name in json.loads(sys.argv[1]): importlib.import_module(name)"
    # The program itself runs where it is imported.
    assert loaded_by(code, json.dumps(sorted(host_modules().keys() - {"twinrun.__main__"}))) == set()


@pytest.mark.parametrize("arguments", [["--list"], ["run", RECIPE, "--scale", "smoke", "--dry"]])
def test_quick_commands_load_no_framework(arguments: list[str]) -> None:
    code = "import sys\nfrom invoke.main import program\nprogram.run(['invoke', *sys.argv[1:]], exit=False)"
    assert loaded_by(code, *arguments) == set()
