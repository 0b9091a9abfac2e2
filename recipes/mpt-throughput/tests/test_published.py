"""The published numbers of the recipe, as they are read."""

from __future__ import annotations

from pathlib import Path

from twinrun.planning.project import Project
from twinrun.workloads.training.report import published_rates
from twinrun.workloads.workload import PictureContext

PROJECT = Project(Path(__file__).resolve().parents[3])
RECIPE = PROJECT.recipe("mpt-throughput")


PARAMETERS = {"mpt-125m": 125311488, "mpt-13b": 12853954560}
PARAMETERS |= {"mpt-7b-65536": 6918905856, "mpt-70b": 64862437376}


def test_references_and_claims_are_those_of_the_publications_and_of_models_that_can_be_run() -> None:
    claims, references = RECIPE.published.between_records, RECIPE.published.reference
    assert [claim.value for claim in claims] == [0.80, 0.73, 0.94, 0.85, 1.13, 0.85, 0.77]
    assert len(references) == 380
    models = {one.model for one in references}.union(*(claim.values for claim in claims))
    assert models <= RECIPE.tables.models.keys()


def test_a_reference_in_fp8_has_no_share_of_the_bf16_peak() -> None:
    published = RECIPE.published.reference
    fp8 = [one for one in published if one.precision == "fp8"]
    assert fp8
    assert all("amp_fp8" in one.source.where for one in fp8)
    rates = published_rates(PictureContext(recipe=RECIPE, gpus=PROJECT.gpus))
    drawn = [one for one in rates if one.mark == "reference" and one.precision == "bf16"]
    assert {one.formula for one in drawn} == {"model-flops/6N+12LDS"}
    assert len(drawn) == len(published) - len(fp8)


def test_parameters_are_those_of_the_tables() -> None:
    counts = {name: RECIPE.tables.models[name].parameters() for name in PARAMETERS}
    assert counts == PARAMETERS
