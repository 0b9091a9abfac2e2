"""Every folder of images/stacks/ against the contract of a stack."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contracts.checks import STACK_CHECKS
from twinrun.manifests.stack import LoadedStack, find_stacks

ROOT = Path(__file__).resolve().parents[2]
STACKS = find_stacks(ROOT)


@pytest.mark.parametrize("check", STACK_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("stack", STACKS.values(), ids=STACKS)
def test_stack(stack: LoadedStack, check: Callable[[Path, LoadedStack], None]) -> None:
    check(ROOT, stack)


def test_baked_kernels_are_compiled_for_what_their_package_knows() -> None:
    for name, stack in STACKS.items():
        # What is Triton's alone is compiled where it runs; a package with this module is compiled ahead.
        for module in (
            one for folder in stack.stack.kernel_folders() for one in ROOT.glob(f"{folder}/src/*/compile.py")
        ):
            targets = module.with_name("targets.py").read_text(encoding="utf-8")
            line = re.search(r"^GPU_ARCHS = (\(.+\))$", targets, re.MULTILINE)
            assert line
            assert set(stack.stack.archs) <= set(re.findall(r'"([^"]+)"', line[1])), name


def test_the_name_of_a_stack_says_its_torch() -> None:
    for name, stack in STACKS.items():
        _, marked, version = name.partition("-torch")
        locked = {f"torch=={one}" for one in stack.locked(ROOT).get("torch", ())}
        wanted = f"torch=={version}."
        assert not marked or any(one.startswith(wanted) for one in locked), name


def test_the_development_container_is_the_image_of_a_stack() -> None:
    settings = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text(encoding="utf-8"))
    command, image = settings["initializeCommand"], settings["image"]
    name = re.search(r"invoke build --stack (\S+)", command)
    assert name
    assert image.partition(":")[0] == STACKS[name[1]].stack.image
    assert command.endswith(f" {image}")
    dockerfile = (ROOT / "images/Dockerfile").read_text(encoding="utf-8")
    root = (ROOT / "src/twinrun/images/root_filesystem.py").read_text(encoding="utf-8")
    folder, user = settings["workspaceFolder"], settings["remoteUser"]
    assert f"WORKDIR {folder}\n" in dockerfile
    assert f"target={folder}," in settings["workspaceMount"]
    assert f"'{user}:x:1000:1000:" in root
