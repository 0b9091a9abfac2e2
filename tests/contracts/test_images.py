"""What the project says of its images is what was measured in them."""

from __future__ import annotations

import pytest

from tests.contracts.tree import ROOT
from twinrun.images.checks import applicable
from twinrun.images.inventory import committed_inventory, differences_from_lock
from twinrun.manifests.image_identity import COMMITTED
from twinrun.manifests.stack import LoadedStack, find_stacks

STACKS = find_stacks(ROOT)


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
    assert differences_from_lock(contents, stack, ROOT) == [], place


@pytest.mark.parametrize("stack", STACKS.values(), ids=STACKS)
def test_every_stack_has_checks_that_it_can_run(stack: LoadedStack) -> None:
    names = [path.stem for path in applicable(ROOT, stack)]
    assert "imports" in names
    assert len(names) == len(set(names))
    torch = "torch" in stack.locked(ROOT)
    assert ({"matmul", "attention", "collective"} <= set(names)) == torch, names
