"""JSON Schemas of the manifests, generated from the models that validate them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, create_model

from twinrun.foundation.files import write_atomically
from twinrun.manifests.cluster import ClusterTable
from twinrun.manifests.metrics import MetricTable
from twinrun.manifests.published import PublishedClaims
from twinrun.manifests.recipe import Recipe
from twinrun.manifests.stack import Stack
from twinrun.manifests.vendor import GpuTable, Vendor
from twinrun.results.record import Record
from twinrun.workloads import load_workload, workload_names

FOLDER = Path("docs/reference/schemas")


def _recipe() -> Any:
    """Return what a recipe.toml may be: the common part with the tables of one workload."""
    kinds = [
        create_model(f"{name.title()}Recipe", __base__=(load_workload(name).tables, Recipe))
        for name in workload_names()
    ]
    union: Any = kinds[0]
    for kind in kinds[1:]:
        union = union | kind
    return union


MODELS: dict[str, Any] = {
    "cluster": ClusterTable,
    "gpus": GpuTable,
    "published": PublishedClaims,
    "metrics": MetricTable,
    "record": Record,
    "recipe": _recipe(),
    "stack": Stack,
    "vendor": Vendor,
}


def schema_of(name: str) -> dict[str, Any]:
    """Return the schema of the manifest `name`; one of two kinds is either of theirs."""
    return TypeAdapter(MODELS[name]).json_schema()


def schema_text(name: str) -> str:
    """Return the schema of the manifest `name` as it stands in the docs."""
    schema = schema_of(name)
    # Where editors meet it: a directive in the first line of the manifest.
    schema["title"] = f"twinrun {name}"
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def write_schemas(root: Path) -> list[Path]:
    """Write every schema and return the paths."""
    paths = [root / FOLDER / f"{name}.schema.json" for name in MODELS]
    for name, path in zip(MODELS, paths, strict=True):
        write_atomically(path, schema_text(name))
    return paths
