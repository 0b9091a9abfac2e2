"""JSON Schemas of manifests and records, and pages of their keys, from the models that validate them.

`nox -s schemas` writes the schemas where the first line of each manifest says, so that an editor finds them.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, create_model

# Models take the texts below their fields only where they are asked to.
os.environ["TWINRUN_DESCRIBE"] = "1"

from twinrun.foundation.files import write_atomically
from twinrun.foundation.text import markdown_table
from twinrun.manifests.cluster import ClusterTable
from twinrun.manifests.metrics import MetricTable
from twinrun.manifests.published import PublishedClaims
from twinrun.manifests.recipe import Recipe
from twinrun.manifests.stack import Stack
from twinrun.manifests.vendor import GpuTable, Vendor
from twinrun.results.record import Record
from twinrun.workloads import load_workload, workload_names

FOLDER = Path("docs/reference/schemas")
# The files of each kind, and what they say.
KINDS = {
    "recipe": ("recipes/*/recipe.toml", "what is run"),
    "published": ("recipes/*/published.toml", "what the publication claims"),
    "metrics": ("recipes/metrics.toml", "what the numbers of claims and records are"),
    "stack": ("images/stacks/*/stack.toml", "with what software"),
    "vendor": ("images/vendors/*/vendor.toml", "all that differs between vendors"),
    "gpus": ("images/gpus.toml", "the GPU models"),
    "cluster": ("cluster.toml", "what stands at a site; the user's own file"),
    "record": ("record.json", "what a run measured; written by the program only"),
}


@cache
def models() -> dict[str, Any]:
    """Return the model of each kind; a recipe.toml is one of the workloads'."""
    kinds = [
        create_model(f"{name.title()}Recipe", __base__=(load_workload(name).tables, Recipe))
        for name in workload_names()
    ]
    recipe: Any = kinds[0]
    for kind in kinds[1:]:
        recipe = recipe | kind
    found = (recipe, PublishedClaims, MetricTable, Stack, Vendor, GpuTable, ClusterTable, Record)
    return dict(zip(KINDS, found, strict=True))


@cache
def schema_of(kind: str) -> dict[str, Any]:
    """Return the JSON Schema of a kind."""
    return TypeAdapter(models()[kind]).json_schema() | {"title": f"twinrun {kind}"}


def schemas() -> dict[str, str]:
    """Return the text of each schema by its file name."""
    return {
        f"{kind}.schema.json": json.dumps(schema_of(kind), indent=1, ensure_ascii=False) + "\n"
        for kind in KINDS
    }


def page_of(title: str, *kinds: str) -> str:
    """Return a page in Markdown with the keys of each kind, a table for each of its tables."""
    parts = [f"# {title}", "Made from the models that validate these files; an unknown key is an error."]
    for kind in kinds:
        schema, (file, says) = schema_of(kind), KINDS[kind]
        parts += [f"## {file.rpartition('/')[2]}", f"`{file}` says {says}."]
        # One of several kinds has no keys of its own: theirs are among the definitions.
        whole = {"": schema} if "properties" in schema else {}
        for name, model in (whole | schema.get("$defs", {})).items():
            if fields := model.get("properties"):
                about = " ".join(str(model.get("description", "")).split()) if name else ""
                rows = [
                    (f"`{key}`", _type(field), _given(key, field, model), field.get("description", ""))
                    for key, field in fields.items()
                ]
                parts += [*([f"### {name}"] if name else []), *([about] if about else [])]
                parts.append(markdown_table(("key", "type", "default", "meaning"), rows))
    return "\n\n".join(parts) + "\n"


def _type(field: dict[str, Any]) -> str:
    """Return the type of a property in words."""
    if "$ref" in field:
        return f"table {field['$ref'].rpartition('/')[2]}"
    if "anyOf" in field:
        return " or ".join(_type(one) for one in field["anyOf"] if one.get("type") != "null")
    if "enum" in field or "const" in field:
        return " or ".join(f"`{value}`" for value in field.get("enum", [field.get("const")]))
    if field.get("type") == "array":
        return f"list of {_type(field.get('items') or {'anyOf': field.get('prefixItems', [{}])[:1]})}"
    if isinstance(field.get("additionalProperties"), dict):
        return f"table of {_type(field['additionalProperties'])}"
    return str(field.get("type", "any"))


def _given(key: str, field: dict[str, Any], model: dict[str, Any]) -> str:
    """Return whether a key must be given, or its default."""
    if key in model.get("required", []):
        return "required"
    default = field.get("default")
    return "none" if default in (None, [], {}) else f"`{str(default).lower()}`"


if __name__ == "__main__":
    for name, text in schemas().items():
        write_atomically(Path(__file__).resolve().parents[1] / FOLDER / name, text)
