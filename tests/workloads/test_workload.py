"""A workload is what its folder offers, and what files say of a plan is read as its types."""

from __future__ import annotations

import json

import pytest

from tests.records import plan, training_record
from twinrun.foundation.errors import InputError
from twinrun.planning.plan import Plan
from twinrun.protocol.training import Report
from twinrun.workloads import load_workload, workload_names
from twinrun.workloads.training.numbers import numbers

PLACE = "twinrun.workloads"
RECIPES = {
    "training": "mpt7b-scaling",
    "bench": "mamba-kernels",
    "checks": "cluster-acceptance",
    "evaluation": "mpt-chinchilla",
}


@pytest.mark.parametrize("name", workload_names())
def test_a_plan_from_a_file_has_the_types_of_its_workload(name: str) -> None:
    workload, made = load_workload(name), plan(RECIPES[name], scale="smoke", gpu=None)
    again = Plan.model_validate_json(made.model_dump_json())
    assert (again, again.sha256()) == (made, made.sha256())
    assert type(again.part) is workload.plan_part
    assert {type(point.part) for point in again.points} == {workload.point_part}
    other, content = next(one for one in workload_names() if one != name), json.loads(made.model_dump_json())
    with pytest.raises(InputError, match=r"plan\.part"):
        Plan.model_validate_json(json.dumps(content | {"workload": other}))
    for change in ({"workload": "nothing"}, {"points": [content["points"][0] | {"part": {"mode": 1}}]}):
        with pytest.raises(InputError):
            Plan.model_validate_json(json.dumps(content | change))


def test_a_report_of_a_script_has_the_unit_that_its_training_names() -> None:
    record = training_record({"nodes=1": 100.0}).record
    reported = {"reported": (Report(metric="bits-per-byte", value=1.5),)}
    result = record.points[0].result.model_copy(update=reported)
    training = record.plan.part.training.model_copy(update={"reports": {"bits-per-byte": "bits/byte"}})
    part = record.plan.part.model_copy(update={"training": training})
    found = {one.id: one for one in numbers(part, record.plan.points[0], result, None).measurements}
    one = found["bits-per-byte"]
    assert (one.samples, one.unit, one.per) == ((1.5,), "bits/byte", "run")
