"""What the project says of its images is what was measured in them."""

from __future__ import annotations

import re

import pytest

from tests.contracts.tree import ROOT
from twinrun.images.checks import applicable
from twinrun.images.inventory.inventory import committed_inventory, lock_differences
from twinrun.manifests.image_identity import COMMITTED
from twinrun.manifests.stack import LoadedStack, find_stacks
from twinrun.planning.project import Project
from twinrun.results.reading import read_record

STACKS = find_stacks(ROOT)
ROW = re.compile(
    r"^\| `(?P<stack>[\w.-]+)` \| (?P<archs>.*) \| (?P<image>.*) \| (?P<gpu>.*) \|$", re.MULTILINE
)


def test_the_readme_has_a_true_row_for_every_stack() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = {row["stack"]: row for row in ROW.finditer(readme) if row["stack"] in STACKS}
    assert list(rows) == list(STACKS)
    ran = stacks_whose_image_ran_on_a_gpu()
    for name, stack in STACKS.items():
        assert rows[name]["archs"] == (", ".join(stack.stack.archs) or "-")
        assert rows[name]["image"] == ("built" if committed_inventory(ROOT, stack) else "not built")
        assert (rows[name]["gpu"] != "no") == (name in ran), name


def stacks_whose_image_ran_on_a_gpu() -> set[str]:
    project = Project(ROOT)
    paths = [path for loaded in project.recipes().values() for path in project.results(loaded)]
    records = [read_record(path, project) for path in paths]
    return {
        record.plan.stack for record in records if record.machine.devices and record.environment.image_digest
    }


@pytest.mark.parametrize("stack", STACKS.values(), ids=STACKS)
def test_committed_contents_are_of_the_committed_locks(stack: LoadedStack) -> None:
    contents = committed_inventory(ROOT, stack)
    if contents is None:
        return
    place = f"{stack.folder}/{COMMITTED}"
    assert contents.stack == stack.stack.name, place
    assert contents.lock_sha256 == stack.lock_sha256, (
        f"{place}: of other locks; build the image and copy anew"
    )
    assert lock_differences(contents, stack, ROOT) == [], place


@pytest.mark.parametrize("stack", STACKS.values(), ids=STACKS)
def test_every_stack_has_checks_that_it_can_run(stack: LoadedStack) -> None:
    names = [path.stem for path in applicable(ROOT, stack)]
    assert "imports" in names
    assert len(names) == len(set(names))
    torch = "torch" in stack.locked(ROOT) or any("torch==" in pin for pin in stack.unhashed(ROOT))
    assert ({"matmul", "attention", "collective"} <= set(names)) == torch, names
