"""Each fault of tools/mutations.toml is one that the source can have."""

from __future__ import annotations

import pytest

from tests.contracts.tree import ROOT
from tools.mutations import Fault, load_faults


@pytest.mark.parametrize("fault", load_faults().fault, ids=lambda fault: f"{fault.file}: {fault.right[:40]}")
def test_a_fault_has_its_place_in_the_source_once(fault: Fault) -> None:
    assert fault.place(ROOT).read_text(encoding="utf-8").count(fault.right) == 1, "renew it with the code"


def test_the_tests_of_every_area_are_there() -> None:
    faults = load_faults()
    assert {fault.area for fault in faults.fault} == faults.tests.keys()
    for name in {name for names in faults.tests.values() for name in names}:
        assert (ROOT / name).exists(), name
