from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from twinrun.execution.engine import PYTHON, Command, Workspace
from twinrun.execution.engines import Interpreter
from twinrun.execution.environment import kernel_variables, package_folders
from twinrun.planning.project import Project

ROOT = Path(__file__).resolve().parents[2]

COMPILE = """
import argparse, json, pathlib
parser = argparse.ArgumentParser()
parser.add_argument("--output", type=pathlib.Path)
parser.add_argument("--archs", nargs="+")
options = parser.parse_args()
{body}
options.output.mkdir(parents=True, exist_ok=True)
index = {{"archs": {{arch: {{"object": arch}} for arch in options.archs}}, "missing": {{}}}}
(options.output / "kernels.json").write_text(json.dumps(index))
"""


def workspace_of(tmp_path: Path, body: str = "") -> Workspace:
    package = tmp_path / "project/recipes/tiny/kernels/src/tiny_kernels"
    package.mkdir(parents=True)
    (package.parents[1] / "csrc").mkdir()
    (package.parents[1] / "csrc/tiny.h").write_text("int one;\n")
    (package / "__init__.py").write_text("")
    (package / "compile.py").write_text(COMPILE.format(body=body))
    root = tmp_path / "project"
    packages = package_folders(root, ["tiny"])
    workspace = Workspace(root=root, run=tmp_path / "run", data=tmp_path / "data", packages=packages)
    workspace.run.mkdir()
    return workspace


def variables(workspace: Workspace, *archs: str) -> tuple[dict[str, str], list[str]]:
    said: list[str] = []
    engine = Interpreter(python=sys.executable, workspace=workspace)
    return kernel_variables(workspace, archs=archs or ("cpu",), engine=engine, say=said.append), said


def test_code_is_compiled_once_into_the_cache(tmp_path: Path) -> None:
    workspace = workspace_of(tmp_path)
    found, said = variables(workspace, "sm_80", "sm_90")
    objects = Path(found["TINY_KERNELS_OBJECTS"])
    assert objects.is_relative_to(workspace.data)
    assert set(json.loads((objects / "kernels.json").read_text())["archs"]) == {"sm_80", "sm_90"}
    assert "once" in said[0]
    assert variables(workspace, "sm_80", "sm_90") == (found, [])


def test_a_changed_source_is_compiled_again(tmp_path: Path) -> None:
    workspace = workspace_of(tmp_path)
    first, _ = variables(workspace)
    (workspace.packages[0].parent / "csrc/tiny.h").write_text("int two;\n")
    second, said = variables(workspace)
    assert first != second
    assert said


def test_where_the_user_says_code_lies_nothing_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINY_KERNELS_OBJECTS", "elsewhere")
    workspace = workspace_of(tmp_path)
    assert variables(workspace) == ({}, ["TINY_KERNELS_OBJECTS is set: elsewhere"])
    assert not (workspace.data / "kernels").exists()


def test_a_compiler_that_is_absent_is_told_and_the_run_goes_on(tmp_path: Path) -> None:
    workspace = workspace_of(tmp_path, body="raise SystemExit('cpu: needs a C++17 compiler, found none')")
    before = sorted(workspace.root.rglob("*"))
    found, said = variables(workspace)
    assert found == {}
    assert "needs a C++17 compiler" in said[-1]
    assert sorted(workspace.root.rglob("*")) == before


def test_ranks_import_the_package(tmp_path: Path) -> None:
    workspace = workspace_of(tmp_path)
    program = (PYTHON, "-c", "import tiny_kernels; print(tiny_kernels.__file__)")
    printed = Interpreter(python=sys.executable, workspace=workspace).read(
        Command(arguments=program, variables={})
    )
    assert Path(printed.strip()).parent == workspace.packages[0] / "tiny_kernels"


@pytest.mark.parametrize("name", Project(ROOT).recipe_names)
def test_every_recipe_names_kernels_that_exist(name: str) -> None:
    for folder in package_folders(ROOT, Project(ROOT).recipe(name).recipe.kernels):
        assert list(folder.glob("*/__init__.py"))
