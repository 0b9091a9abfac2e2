"""Imports run one way, and the host side never needs what a stack installs."""

from __future__ import annotations

import ast
import functools
import graphlib
import json
import re
import sys
import tomllib
from pathlib import Path

import pytest

from tests.contracts.checks import imported
from tests.contracts.tree import (
    ROOT,
    STACK_PACKAGES,
    host_modules,
    is_train,
    loaded_by,
    modules,
    shown,
    train_modules,
)
from twinrun.workloads import workload_names

# From the ground up: a module imports its own package and those before it. Every package has its place.
LAYERS = (
    "foundation",
    "protocol",
    "checkpoints",
    "manifests",
    "predict",
    "machine",
    "execution",
    "workloads",
    "planning",
    "images",
    "results",
    "parity",
    "runs",
    "report",
    "export",
    "history",
    "api",
    "cli",
)
# `images` stands beside what is made of records: neither imports the other.
APART = {
    ("results", "images"),
    ("runs", "images"),
    ("report", "images"),
    ("export", "images"),
    ("parity", "images"),
}
# What ranks import of the package.
OF_RANKS = ("foundation", "protocol", "checkpoints", "train")
# A module of one workload; those that all share lie beside the folders.
WORKLOAD = re.compile(rf"twinrun\.workloads\.({'|'.join(workload_names())})(\..*)?")
RECIPE = min(shown(path) for path in (ROOT / "recipes").iterdir())
# Extras that one module may import, when it is called.
EXTRAS = {
    "twinrun.checkpoints.s3": {"boto3", "botocore"},
    "twinrun.export.trackers.mlflow": {"mlflow"},
    "twinrun.export.trackers.tensorboard": {"tensorboard"},
    "twinrun.export.trackers.wandb": {"wandb"},
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


def imports_of(path: Path) -> set[str]:
    """Return the modules of twinrun that `path` imports at any depth of its code."""
    known = modules()
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            names.update(members & known.keys() or {node.module})
    return names & known.keys()


@functools.cache
def graph() -> dict[str, set[str]]:
    """Return what each module imports."""
    return {name: imports_of(path) for name, path in modules().items()}


def reached(start: str) -> set[str]:
    """Return the modules that importing everything `start` names would import."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        following = graph()[waiting.pop()] - found
        found |= following
        waiting.extend(following)
    return found


def package_of(module: str) -> str:
    """Return the package below twinrun that a module belongs to, empty for twinrun itself."""
    return module.partition(".")[2].partition(".")[0]


def test_nothing_imports_in_a_circle() -> None:
    graphlib.TopologicalSorter(graph()).prepare()


def test_every_module_has_its_layer() -> None:
    assert {package_of(module) for module in graph()} == {"", "train", *LAYERS}


@pytest.mark.parametrize("module", [module for module in modules() if package_of(module) in LAYERS])
def test_a_module_imports_its_own_layer_and_those_before(module: str) -> None:
    own = package_of(module)
    allowed = {"", *LAYERS[: LAYERS.index(own) + 1]} - {other for user, other in APART if user == own}
    wrong = {other for other in graph()[module] if package_of(other) not in allowed}
    assert not wrong, f"{module} imports {sorted(wrong)}"


def test_a_workload_is_named_in_its_own_folder_alone() -> None:
    for module, imports in graph().items():
        named = {other for other in imports if WORKLOAD.fullmatch(other)}
        own = ".".join(module.split(".")[:3])
        wrong = {other for other in named if ".".join(other.split(".")[:3]) != own}
        assert not wrong, f"{module} imports {sorted(wrong)}"


def test_no_module_asks_which_workload_it_has() -> None:
    """What differs between workloads is a method of theirs; none is asked for by its name elsewhere."""
    for module, path in host_modules().items():
        if WORKLOAD.fullmatch(module):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Compare, ast.MatchValue)):
                texts = {one.value for one in ast.walk(node) if isinstance(one, ast.Constant)}
                named = [name for name in workload_names() if name in texts]
                assert not named, f"{module}:{node.lineno} asks for {named}"


PARTS_OF_EXECUTION = ("engines", "launchers", "schedulers")


@pytest.mark.parametrize("package", PARTS_OF_EXECUTION)
def test_engines_launchers_and_schedulers_stand_alone(package: str) -> None:
    prefixes = tuple(f"twinrun.execution.{name}." for name in PARTS_OF_EXECUTION)
    parts = [module for module in graph() if module.startswith(f"twinrun.execution.{package}.")]
    assert parts
    for module in parts:
        others = {one for one in reached(module) if one.startswith(prefixes)}
        assert not others, f"{module} reaches {sorted(others)}"


def test_the_host_side_never_imports_the_training_side() -> None:
    for name in host_modules():
        wrong = {one for one in graph()[name] if is_train(one)}
        assert not wrong, f"{name} imports {sorted(wrong)}"


def test_ranks_import_what_they_share_with_the_host_and_nothing_else() -> None:
    for name in train_modules():
        wrong = {one for one in graph()[name] if package_of(one) not in OF_RANKS}
        assert not wrong, f"{name} imports {sorted(wrong)}"


def test_models_import_torch_and_nothing_of_a_framework() -> None:
    models = {name: path for name, path in modules().items() if name.startswith("twinrun.train.models.")}
    assert models
    for name, path in models.items():
        packages = imported(path.read_text(encoding="utf-8")) - sys.stdlib_module_names
        assert packages <= {"torch", "twinrun"}, f"{name} imports {sorted(packages)}"
        others = {one for one in graph()[name] if one in models}
        assert not others, f"{name} imports the model {sorted(others)}"


@pytest.mark.parametrize(("framework", "own"), [("composer", ["composer_loop"]), ("deepspeed", [])])
def test_a_framework_is_imported_in_its_own_modules_alone(framework: str, own: list[str]) -> None:
    texts = {name: path.read_text(encoding="utf-8") for name, path in modules().items()}
    importers = [name for name, text in texts.items() if framework in imported(text)]
    assert sorted(importers) == [f"twinrun.train.{name}" for name in own]


def test_the_host_side_imports_only_what_the_project_declares() -> None:
    allowed = declared() | set(sys.stdlib_module_names) | {"twinrun"}
    for name, path in host_modules().items():
        foreign = imported(path.read_text(encoding="utf-8")) - allowed - EXTRAS.get(name, set())
        assert not foreign, f"{name} imports {sorted(foreign)}"


def test_what_the_project_declares_is_no_training_framework() -> None:
    assert not declared() & STACK_PACKAGES


def test_nothing_in_the_package_imports_what_uses_it() -> None:
    for name, path in modules().items():
        users = imported(path.read_text(encoding="utf-8")) & {"recipes", "tests", "tasks", "noxfile"}
        assert not users, f"{name} imports {sorted(users)}"


def test_noxfile_imports_nothing_of_ours() -> None:
    foreign = imported((ROOT / "noxfile.py").read_text(encoding="utf-8")) - sys.stdlib_module_names
    assert foreign == {"nox"}


def test_importing_the_host_side_loads_no_framework() -> None:
    code = "import importlib, json, sys\nfor name in json.loads(sys.argv[1]): importlib.import_module(name)"
    assert loaded_by(code, json.dumps(sorted(host_modules()))) == set()


@pytest.mark.parametrize("arguments", [["--list"], ["run", RECIPE, "--scale", "smoke", "--dry"]])
def test_quick_commands_load_no_framework(arguments: list[str]) -> None:
    code = "import sys\nfrom invoke.main import program\nprogram.run(['invoke', *sys.argv[1:]], exit=False)"
    assert loaded_by(code, *arguments) == set()


def declared() -> set[str]:
    """Return the import names of the packages that pyproject.toml requires on the host."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {re.split(r"[^\w-]", text, maxsplit=1)[0].replace("-", "_") for text in project["dependencies"]}
    return names.union(*(PARTS.get(name, set()) for name in names))
