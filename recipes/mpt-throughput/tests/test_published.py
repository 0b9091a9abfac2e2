"""The published numbers of the recipe, as they are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from twinrun.foundation.errors import InputError
from twinrun.manifests.published import load_published
from twinrun.planning.project import Project
from twinrun.workloads.training.report import published_rates
from twinrun.workloads.workload import PictureContext

ROOT = Path(__file__).resolve().parents[3]
PROJECT = Project(ROOT)
RECIPE = PROJECT.recipe("mpt-throughput")


def test_the_means_are_those_of_the_publications() -> None:
    claims = RECIPE.published.between_records
    assert [claim.value for claim in claims] == [0.80, 0.73, 0.94, 0.85, 1.13, 0.85, 0.77]


def test_every_reference_is_of_a_model_that_can_be_run() -> None:
    references = RECIPE.published.reference
    assert len(references) == 380
    assert {one.model for one in references} <= RECIPE.tables.models.keys()


def test_a_reference_in_fp8_has_no_share_of_the_bf16_peak() -> None:
    published = RECIPE.published.reference
    fp8 = [one for one in published if one.precision == "fp8"]
    assert fp8
    assert all("amp_fp8" in one.source.where for one in fp8)
    rates = published_rates(PictureContext(recipe=RECIPE, gpus=PROJECT.gpus))
    drawn = [one for one in rates if one.mark == "reference" and one.precision == "bf16"]
    assert {one.formula for one in drawn} == {"model-flops/6N+12LDS"}
    assert len(drawn) == len(published) - len(fp8)


def test_models_of_a_claim_can_be_run() -> None:
    models = RECIPE.tables.models
    for claim in RECIPE.published.between_records:
        assert set(claim.values) <= models.keys()


def test_parameters_are_those_of_the_tables() -> None:
    models = RECIPE.tables.models
    counts = {name: models[name].parameters() for name in ("mpt-125m", "mpt-13b", "mpt-7b-65536", "mpt-70b")}
    assert counts == {
        "mpt-125m": 125311488,
        "mpt-13b": 12853954560,
        "mpt-7b-65536": 6918905856,
        "mpt-70b": 64862437376,
    }


def test_a_table_that_is_not_there_is_refused(tmp_path: Path) -> None:
    text = (ROOT / "recipes/mpt-throughput/published.toml").read_text(encoding="utf-8")
    (tmp_path / "published.toml").write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match="no such file"):
        load_published(tmp_path)
