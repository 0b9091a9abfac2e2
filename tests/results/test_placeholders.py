"""What the template bakes is no claim until somebody has written it: no verdict, and the keys are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkouts import checkout
from tests.contracts.baking import bake
from tests.records import judge, training_record
from twinrun.workloads import workload_names


@pytest.mark.parametrize("workload", workload_names())
def test_a_baked_claim_is_not_judged_and_its_placeholders_are_named(workload: str, tmp_path: Path) -> None:
    root = checkout(tmp_path)
    published = bake(root, {"workload": workload, "gpu": "mi300x"}).published
    # Whatever the record measured, nothing stands beside it.
    record = training_record({"nodes=1": 400.0}, recipe="mpt7b-scaling", gpu="mi300x")
    for verdict in judge(record, published):
        assert (verdict.final, verdict.here) == ("not-comparable", None)
        assert "published.toml still contains the template's placeholder in:" in verdict.reason
        assert f"claim.{verdict.claim}.source.where" in verdict.reason
        assert f"claim.{verdict.claim}.hardware.software" in verdict.reason
