from __future__ import annotations

import pytest

from tests.records import PROJECT, RECIPE
from twinrun.manifests.published import Accepted
from twinrun.workloads.settings import Difference, Fingerprint, Value, differences
from twinrun.workloads.training.manifest import TrainingPlan, TrainingTables
from twinrun.workloads.training.numbers import fingerprint


def published() -> dict[str, Accepted]:
    return PROJECT.recipe(RECIPE).published.fingerprint


def recipes_own() -> Fingerprint:
    recipe: TrainingTables = PROJECT.recipe(RECIPE).tables
    training = recipe.training
    data = recipe.data[training.data]
    return fingerprint(TrainingPlan(shape=recipe.models[training.model], training=training, data=data))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("precision", "fp32"),
        ("global_batch", 768),
        ("sharding", "none"),
        ("attention", "math"),
        ("parameters", 1),
        ("data.repository", "another"),
        ("data.order_seed", 18),
        ("optimizer.learning_rate", 1e-6),
        ("optimizer.beta2", 0.96),
        ("optimizer.warmup_steps", 10),
        ("loss_function", "another"),
        ("dropout", 0.1),
    ],
)
def test_one_changed_field_is_the_only_difference(field: str, value: Value) -> None:
    found = differences(recipes_own() | {field: value}, published())
    assert found == (Difference(field=field, found=value, published=published()[field]),)


def test_differences_keep_the_published_order() -> None:
    found = differences({}, published())
    assert [item.field for item in found] == list(published())
    assert {item.found for item in found} == {"not recorded"}


@pytest.mark.parametrize(("backend", "count"), [("flash", 0), ("sdpa", 0), ("math", 1)])
def test_a_list_means_any_of_its_values(backend: str, count: int) -> None:
    assert len(differences({"attention": backend}, {"attention": ("flash", "sdpa")})) == count


def test_another_model_or_batch_shows_in_every_field_it_moves() -> None:
    recipe = PROJECT.recipe(RECIPE).tables
    smaller = recipe.training.model_copy(update={"global_batch": 192})
    part = TrainingPlan(shape=recipe.models["mpt-1b"], training=smaller, data=recipe.data["c4"])
    found = [one for one in differences(fingerprint(part), published()) if one.stated]
    assert [item.field for item in found] == ["parameters", "global_batch", "tokens_per_step"]
