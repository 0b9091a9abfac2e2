from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.records import ROOT
from twinrun.foundation.errors import InputError
from twinrun.foundation.manifest import validate
from twinrun.protocol.models import FAMILIES, FORMULAS, ModelShape, members
from twinrun.workloads.training.manifest import TrainingPlan

MODELS = members()

# Dense peaks that the tables divide by, FLOP/s.
PEAKS = {"a100_40gb": 312e12, "a100_80gb": 312e12, "h100_80gb": 989.5e12}


def foundry_rows() -> list[dict[str, str]]:
    path = Path(__file__).parents[1] / "data" / "foundry_rows.csv"
    with path.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def shape_of(row: dict[str, str]) -> ModelShape:
    return MODELS[row["model"]].model_copy(update={"sequence": int(row["seq_len"])})


@pytest.mark.parametrize(
    "row", foundry_rows(), ids=lambda row: f"{row['model']}-{row['seq_len']}-{row['gpu']}"
)
def test_the_formula_reproduces_the_published_utilisation(row: dict[str, str]) -> None:
    shape = shape_of(row)
    assert shape.parameters() == int(row["n_params"])
    rate = shape.flops_per_token() * float(row["tokens_per_s"]) / int(row["n_gpus"])
    # Published with two decimals of a percent, and cut, not rounded.
    assert 100 * rate / PEAKS[row["gpu"]] == pytest.approx(float(row["mfu_pct"]), abs=0.011)
    if row["model_tflops_per_gpu_published"]:
        assert int(rate / 1e12) == int(row["model_tflops_per_gpu_published"])


def test_every_family_names_a_known_formula() -> None:
    assert set(FAMILIES) == {path.stem for path in (ROOT / "src/twinrun/train/models").glob("[a-z]*.py")}
    assert {shape.formula for shape in MODELS.values()} <= set(FORMULAS)


@pytest.mark.parametrize(
    ("model", "changed", "said"),
    [
        ("llama-8b", {"groups": 5}, "`groups` must divide `heads`: 5 does not divide 32"),
        ("llama-8b", {"heads": 3}, "leave each an even count of features: 3 heads of a width of 4096"),
        ("llama-8b", {"rope_scaling": "yarn"}, "rope_scaling: Input should be 'llama3'"),
        ("llama-8b", {"rope_factor": 0}, "rope_factor"),
        ("mpt-1b", {"heads": 3}, "3 does not divide 2048"),
        ("mpt-1b", {"family": "gpt"}, "family"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(model: str, changed: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        validate({"shape": MODELS[model].model_dump() | changed}, TrainingPlan, place="plan")


@pytest.mark.parametrize("shape", MODELS.values(), ids=MODELS.keys())
def test_a_pass_has_the_parameters_of_the_shape(shape: ModelShape) -> None:
    assert shape.work().parameters == shape.parameters()
