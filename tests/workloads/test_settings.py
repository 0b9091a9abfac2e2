"""Where a configuration is not the published one."""

from __future__ import annotations

import pytest

from tests.records import PROJECT, RECIPE
from twinrun.workloads.settings import Difference, Value, differences
from twinrun.workloads.training.manifest import TrainingPlan
from twinrun.workloads.training.numbers import fingerprint

PUBLISHED, TABLES = PROJECT.recipe(RECIPE).published.fingerprint, PROJECT.recipe(RECIPE).tables
OWN = TrainingPlan(shape=TABLES.models["mpt-7b"], training=TABLES.training, data=TABLES.data["c4"])


@pytest.mark.parametrize(
    ("field", "value"), [("sharding", "none"), ("optimizer.warmup_steps", 10), ("loss_function", "another")]
)
def test_one_changed_field_is_the_only_difference(field: str, value: Value) -> None:
    found = differences(fingerprint(OWN) | {field: value}, PUBLISHED)
    assert found == (Difference(field=field, found=value, published=PUBLISHED[field]),)


def test_differences_keep_the_published_order() -> None:
    found = differences({}, PUBLISHED)
    assert [item.field for item in found] == list(PUBLISHED)
    assert {item.found for item in found} == {"not recorded"}


@pytest.mark.parametrize(("backend", "count"), [("flash", 0), ("sdpa", 0), ("math", 1)])
def test_a_list_means_any_of_its_values(backend: str, count: int) -> None:
    assert len(differences({"attention": backend}, {"attention": ("flash", "sdpa")})) == count


def test_another_model_or_batch_shows_in_every_field_it_moves() -> None:
    smaller = OWN.training.model_copy(update={"global_batch": 192})
    part = OWN.model_copy(update={"shape": TABLES.models["mpt-1b"], "training": smaller})
    found = differences(fingerprint(part), PUBLISHED)
    assert [item.field for item in found] == ["parameters", "global_batch", "tokens_per_step"]
