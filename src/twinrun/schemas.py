"""JSON Schemas of the manifests, generated from the models that validate them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from twinrun.claims import Published
from twinrun.files import write_atomically
from twinrun.recipe import BenchRecipe, Recipe
from twinrun.record import BenchRecord, Record
from twinrun.stack import Stack
from twinrun.vendor import GpuTable, Vendor

FOLDER = Path("docs/reference/schemas")
MODELS: dict[str, Any] = {
    "gpus": GpuTable,
    "published": Published,
    "recipe": Recipe | BenchRecipe,
    "record": Record | BenchRecord,
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
