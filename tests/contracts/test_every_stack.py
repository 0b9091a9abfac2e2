"""Every folder of images/stacks/ against the contract of a stack."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contracts.checks import STACK_CHECKS, processor
from twinrun.stack import LoadedStack, find_stacks

ROOT = Path(__file__).resolve().parents[2]
STACKS = find_stacks(ROOT)


@pytest.mark.parametrize("check", STACK_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("stack", STACKS.values(), ids=STACKS)
def test_stack(stack: LoadedStack, check: Callable[[Path, LoadedStack], None]) -> None:
    check(ROOT, stack)


def test_a_machine_without_gpus_has_a_stack() -> None:
    assert processor(ROOT) in {stack.stack.vendor for stack in STACKS.values()}
