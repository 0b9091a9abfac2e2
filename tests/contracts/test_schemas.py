"""The committed JSON Schemas are those of the models that validate manifests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.manifest_keys import PAGES, page
from twinrun.cli.schemas import FOLDER, MODELS, schema_text

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", MODELS)
def test_schema_is_current(name: str) -> None:
    committed = (ROOT / FOLDER / f"{name}.schema.json").read_text(encoding="utf-8")
    assert committed == schema_text(name), "run `invoke schemas` and commit what it writes"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_the_page_of_keys_is_current(path: Path) -> None:
    written = path.read_text(encoding="utf-8")
    assert written == page(written), "run `python -m tools.manifest_keys` and commit what it writes"


def test_no_schema_is_left_over() -> None:
    assert {path.name for path in (ROOT / FOLDER).iterdir()} == {f"{name}.schema.json" for name in MODELS}
