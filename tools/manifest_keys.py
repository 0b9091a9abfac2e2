"""Writes the tables of keys into pages of docs/reference, where a reader of the repository sees them.

`python -m tools.manifest_keys` after a change of a manifest's model, as `invoke schemas`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from twinrun.cli.schemas import schema_of
from twinrun.foundation.files import write_atomically
from twinrun.foundation.text import markdown_table

PAGES = [
    Path(__file__).resolve().parents[1] / f"docs/reference/{name}.md" for name in ("manifests", "record")
]
KEYS = re.compile(r"^(<!-- keys of (\w+) -->)\n.*?^(<!-- end -->)$", re.MULTILINE | re.DOTALL)


def page(text: str) -> str:
    """Return the page with the keys of each manifest as its model has them."""
    return KEYS.sub(lambda mark: f"{mark[1]}\n\n{manifest(mark[2])}\n\n{mark[3]}", text)


def manifest(name: str) -> str:
    """Return the keys of a manifest, a table for each of its tables."""
    schema = schema_of(name)
    parts = []
    # One of two kinds has no keys of its own: theirs are among the definitions.
    whole = {"": schema} if "properties" in schema else {}
    for title, model in (whole | schema.get("$defs", {})).items():
        fields = model.get("properties", {}).items()
        rows = [
            (f"`{key}`", kind(field), given(key, field, model), field.get("description", ""))
            for key, field in fields
        ]
        about = str(model.get("description", "")).replace("\n", " ")
        parts += [one for one in (f"### {title}" if title else "", about) if one]
        table = markdown_table(("key", "type", "default", "meaning"), rows)
        folded = f'<details markdown="1"><summary>The keys: {len(rows)}</summary>\n\n{table}\n\n</details>'
        parts += [folded if title else table]
    return "\n\n".join(parts)


def kind(field: dict[str, Any]) -> str:
    """Return the type of a JSON Schema property in words."""
    if "$ref" in field:
        return f"table {field['$ref'].rpartition('/')[2]}"
    if "anyOf" in field:
        return " or ".join(kind(one) for one in field["anyOf"] if one.get("type") != "null")
    if "enum" in field or "const" in field:
        return " or ".join(f"`{value}`" for value in field.get("enum", [field.get("const")]))
    if field.get("type") == "array":
        items = field.get("items") or {"anyOf": field.get("prefixItems", [{}])[:1]}
        return f"list of {kind(items)}"
    if isinstance(field.get("additionalProperties"), dict):
        return f"table of {kind(field['additionalProperties'])}"
    return str(field.get("type", "any"))


def given(key: str, field: dict[str, Any], model: dict[str, Any]) -> str:
    """Return whether a key must be given, or its default."""
    if key in model.get("required", []):
        return "required"
    default = field.get("default")
    return "none" if default in (None, [], {}) else f"`{str(default).lower()}`"


if __name__ == "__main__":
    for one in PAGES:
        write_atomically(one, page(one.read_text(encoding="utf-8")))
