"""What ranks find: packages as locked, variables that steer, and kernels that are compiled once."""

from __future__ import annotations

import json
import platform
import re
import sys
from pathlib import Path

import pytest

from twinrun.execution.engine import PYTHON, Command, Workspace
from twinrun.execution.engines import Interpreter
from twinrun.execution.environment import (
    PythonEnvironment,
    inspect,
    kernel_variables,
    lock_differences,
    package_folders,
    steering_variables,
)
from twinrun.manifests.stack import load_stack, normalise, stamp
from twinrun.planning.project import Project

ROOT = Path(__file__).resolve().parents[2]
LOCK = """\
alpha==1.0 --hash=sha256:{a}
beta==2.0 ; python_full_version < '3.12' --hash=sha256:{a}
beta==3.0 ; python_full_version >= '3.12' --hash=sha256:{a}
colours==4.0 ; sys_platform == 'win32' --hash=sha256:{a}
""".format(a="a" * 64).replace(" --hash", " \\\n    --hash")
MANIFEST = 'name = "small"\nvendor = "cpu"\ntitle = "A stack"\npython = ">=3.11"\nimage = "twinrun/small"\n'
COMPILE = """
import argparse, json, pathlib
parser = argparse.ArgumentParser()
parser.add_argument("--output", type=pathlib.Path)
parser.add_argument("--archs", nargs="+")
options = parser.parse_args()
{body}
options.output.mkdir(parents=True)
(options.output / "kernels.json").write_text(json.dumps(options.archs))
"""


@pytest.mark.parametrize(
    ("packages", "expected"),
    [
        ({"alpha": "1.0", "beta": "2.0", "pip": "25.0"}, {}),
        ({"alpha": "1.0", "beta": "3.0"}, {}),
        ({"beta": "2.5"}, {"alpha": "absent, lock has 1.0", "beta": "2.5, lock has 2.0 or 3.0"}),
        # A local label is another version.
        ({"alpha": "1.0+rocm6.3"}, {"alpha": "1.0+rocm6.3, lock has 1.0"}),
    ],
)
def test_what_differs_from_the_lock_is_named(
    tmp_path: Path, packages: dict[str, str], expected: dict[str, str]
) -> None:
    folder = tmp_path / "images" / "stacks" / "small"
    folder.mkdir(parents=True)
    (folder / "stack.toml").write_text(MANIFEST, encoding="utf-8")
    (folder / "requirements.in").write_text("alpha==1.0\n", encoding="utf-8")
    text = f"{stamp(folder / 'requirements.in')}\n{LOCK}"
    (folder / "requirements.lock").write_text(text, encoding="utf-8")
    installed = PythonEnvironment(python="3.11.7", packages=packages)
    assert lock_differences(installed, load_stack(tmp_path, "small"), tmp_path) == expected


STEERING = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "1", "UCX_TLS": "tcp"}
SECRETS = ("TORCH_HUB_TOKEN", "NCCL_KEY", "HSA_PASSWORD", "torch_token", "HF_TOKEN", "WANDB_API_KEY", "OMPX")
PLAIN = ("expandable_segments:True", "^docker0,lo", "/opt/Stack-2/lib/libPlugin64.so", "mlx5_0:1,mlx5_1:1")


def test_what_steers_a_run_is_kept_in_order_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    told = dict(reversed(STEERING.items())) | dict.fromkeys((*SECRETS, "HOME"), "hidden")
    assert list(steering_variables(told).items()) == sorted(STEERING.items())
    for value in PLAIN:
        assert steering_variables({"NCCL_NET_PLUGIN": value}) == {"NCCL_NET_PLUGIN": value}
    monkeypatch.setenv("WANDB_API_KEY", "planted-key")
    found = steering_variables(
        {"NCCL_NET_PLUGIN": "plugin?key=planted-key", "TORCH_LOGS": "a hf_plantedABCD b"}
    )
    assert "***" in found["NCCL_NET_PLUGIN"]
    assert not re.search("planted", " ".join(found.values()))


def test_what_is_imported_is_compiled_once_and_leaves_the_checkout_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWINRUN_CACHE", str(tmp_path / "cache"))
    # Whatever the caller's interpreter does.
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    root = tmp_path / "project"
    (root / "src").mkdir(parents=True)
    (root / "src" / "imported.py").write_text("", encoding="utf-8")
    workspace = Workspace(root=root, run=tmp_path, data=tmp_path)
    interpreter = Interpreter(python=sys.executable, workspace=workspace)
    code = "import imported; print(imported.__cached__)"
    compiled = Path(interpreter.read(Command(arguments=(PYTHON, "-c", code), variables={})).strip())
    assert compiled.is_relative_to(tmp_path / "cache")
    assert compiled.is_file()
    assert [path.name for path in root.rglob("*")] == ["src", "imported.py"]
    found = inspect(interpreter)
    assert (found.python, found.packages["pytest"]) == (platform.python_version(), pytest.__version__)
    assert all(name == normalise(name) for name in found.packages)


def with_kernels(tmp_path: Path, body: str = "") -> Workspace:
    """Return a workspace whose recipe carries a package of kernels, which ranks import."""
    package = tmp_path / "project/recipes/tiny/kernels/src/tiny_kernels"
    package.mkdir(parents=True)
    (package.parents[1] / "csrc").mkdir()
    (package.parents[1] / "csrc/tiny.h").write_text("int one;\n")
    (package / "__init__.py").write_text("")
    (package / "compile.py").write_text(COMPILE.format(body=body))
    root, run = tmp_path / "project", tmp_path / "run"
    run.mkdir()
    return Workspace(root=root, run=run, data=tmp_path / "data", packages=package_folders(root, ["tiny"]))


def variables(workspace: Workspace) -> tuple[dict[str, str], list[str]]:
    said: list[str] = []
    engine = Interpreter(python=sys.executable, workspace=workspace)
    return kernel_variables(workspace, archs=("sm_80", "sm_90"), engine=engine, say=said.append), said


def test_kernels_are_compiled_once_for_their_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = with_kernels(tmp_path)
    first, said = variables(workspace)
    objects = Path(first["TINY_KERNELS_OBJECTS"])
    assert objects.is_relative_to(workspace.data)
    assert json.loads((objects / "kernels.json").read_text()) == ["sm_80", "sm_90"]
    assert "once" in said[0]
    assert variables(workspace) == (first, [])
    (workspace.packages[0].parent / "csrc/tiny.h").write_text("int two;\n")
    second, said = variables(workspace)
    assert said
    assert first != second
    monkeypatch.setenv("TINY_KERNELS_OBJECTS", "elsewhere")
    assert variables(workspace) == ({}, ["TINY_KERNELS_OBJECTS is set: elsewhere"])


def test_a_compiler_that_is_absent_is_told_and_the_run_goes_on(tmp_path: Path) -> None:
    workspace = with_kernels(tmp_path, body="raise SystemExit('cpu: needs a C++17 compiler, found none')")
    before = sorted(workspace.root.rglob("*"))
    found, said = variables(workspace)
    assert found == {}
    assert "needs a C++17 compiler" in said[-1]
    assert sorted(workspace.root.rglob("*")) == before


@pytest.mark.parametrize("name", Project(ROOT).recipe_names)
def test_every_recipe_names_kernels_that_exist(name: str) -> None:
    for folder in package_folders(ROOT, Project(ROOT).recipe(name).recipe.kernels):
        assert list(folder.glob("*/__init__.py"))
