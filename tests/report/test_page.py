from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Callable
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.records import (
    gpus,
    judged,
    loaded_recipe,
    node_record,
    paper_record,
    smoke_record,
    with_losses,
    with_point,
)
from twinrun.errors import InputError, MachineError
from twinrun.record import Record
from twinrun.report.page import write_recipe_report, write_report

VOID = {"meta", "br", "link", "img", "hr", "input"}
EVIL = '<script>alert("$x$")</script>&amp;{{ 7 * 7 }}'
RUNS: dict[str, Callable[[], Record]] = {
    "smoke": smoke_record,
    "node": node_record,
    "paper": paper_record,
    "one point": lambda: node_record(rates={1: 65_000.0}),
    "no number": lambda: with_losses(smoke_record(), (5.0, math.nan, math.inf), (5.0, 4.0, 3.0)),
    "no loss": lambda: with_losses(smoke_record(), (), ()),
    "unknown GPU": lambda: judged(node_record().model_copy(update={"gpu": None})),
    "no point": lambda: judged(smoke_record().model_copy(update={"points": ()})),
    "no verdict": lambda: smoke_record().model_copy(update={"verdicts": ()}),
}


class Page(HTMLParser):
    """What a page consists of; fails on tags that do not close."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self.text += f" {data}"

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    def words(self) -> str:
        return " ".join(self.text.split())


def run_page(folder: Path, record: Record) -> Page:
    path = folder / "report.html"
    write_report(path, record=record, recipe=loaded_recipe(), gpus=gpus())
    return Page(path.read_text(encoding="utf-8"))


def recipe_page(folder: Path, *records: Record) -> Page:
    path = folder / "report.html"
    write_recipe_report(path, records=records, recipe=loaded_recipe(), gpus=gpus())
    return Page(path.read_text(encoding="utf-8"))


@cache
def page_of(name: str) -> Page:
    with tempfile.TemporaryDirectory() as folder:
        if name == "recipe":
            return recipe_page(Path(folder), *(made() for made in RUNS.values()))
        return run_page(Path(folder), RUNS[name]())


@pytest.fixture(params=[*RUNS, "recipe"])
def page(request: pytest.FixtureRequest) -> Page:
    return page_of(request.param)


def test_nothing_is_fetched_and_nothing_runs(page: Page) -> None:
    assert not {"script", "link", "iframe", "object", "embed", "base", "form"} & {tag for tag, _ in page.tags}
    for _, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("src", "href", "xlink:href", "action", "srcset", "poster"):
            assert (attributes.get(name) or "#").startswith("#")
        assert not re.search(r"url\((?!#)|@import|expression", attributes.get("style") or "")


def test_identifiers_are_unique_and_references_have_targets(page: Page) -> None:
    identifiers = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(identifiers) == len(set(identifiers))
    targets = {
        (attributes.get("href") or attributes.get("xlink:href") or "#")[1:] for _, attributes in page.tags
    }
    assert targets - {""} <= set(identifiers)


def test_pictures_can_be_heard(page: Page) -> None:
    identifiers = {attributes.get("id") for _, attributes in page.tags}
    for picture in page.all("svg"):
        assert picture["role"] == "img"
        assert set((picture["aria-labelledby"] or "-").split()) <= identifiers
    assert len(page.all("figcaption")) == len(page.all("figure")) == len(page.all("svg"))


def test_tables_have_captions_and_scoped_heads(page: Page) -> None:
    assert len(page.all("caption")) == len(page.all("table"))
    assert page.all("th")
    assert all(head.get("scope") in ("col", "row") for head in page.all("th"))


def test_the_page_has_a_language_a_title_and_one_heading(page: Page) -> None:
    assert page.all("html")[0]["lang"] == "en"
    assert len(page.all("title")) >= 1
    assert len(page.all("h1")) == 1
    assert any(meta.get("name") == "viewport" for meta in page.all("meta"))
    assert any("default-src 'none'" in (meta.get("content") or "") for meta in page.all("meta"))


def test_published_and_measured_stand_side_by_side(tmp_path: Path) -> None:
    text = run_page(tmp_path, paper_record()).words()
    for expected in (
        "166 TFLOP/s per card",
        "165.8 TFLOP/s per card",
        "model-flops/6N+12LDS",
        "4 x AMD Instinct MI250, 8 devices, 1 node",
        "128 x AMD Instinct MI250, 256 devices, 32 nodes",
        "“Training LLMs at Scale with AMD MI250 GPUs”, bullet list and Figure 5; derived: 159 / 166",
        "✓ reproduced",
        "Reproduced. Of 4 claims: 4 reproduced.",
    ):
        assert expected in text


def test_what_is_missing_is_listed(tmp_path: Path) -> None:
    text = run_page(tmp_path, smoke_record()).words()
    for item in loaded_recipe().published.missing:
        assert item.what in text
        assert item.why in text


def test_differences_from_the_published_configuration_are_listed(tmp_path: Path) -> None:
    text = run_page(tmp_path, node_record()).words()
    assert "parameters 1,315,950,592 6,658,859,008" in text
    assert "Nowhere: every published field" in run_page(tmp_path, paper_record()).words()


def test_the_circumstances_are_all_there(tmp_path: Path) -> None:
    record = node_record()
    text = run_page(tmp_path, record).words()
    environment = record.environment
    for expected in (
        record.plan_sha256,
        record.plan.lock_sha256,
        record.plan.engine,
        record.machine.cpu,
        record.machine.kernel,
        record.run,
        record.created,
        record.sha256,
        environment.python,
        *environment.libraries.values(),
        *environment.variables,
        *record.files,
        *record.files.values(),
        record.points[0].data_hash,
        "570.86",
        "measured",
    ):
        assert expected in text


def test_the_lock_is_told_apart_from_what_was_installed(tmp_path: Path) -> None:
    original = smoke_record()
    changed = original.environment.model_copy(update={"lock_differences": {"torch": "2.8.0, lock has 2.7.0"}})
    text = run_page(tmp_path, original.model_copy(update={"environment": changed})).words()
    assert "torch 2.8.0, lock has 2.7.0" in text
    assert "the environment is the lock" in run_page(tmp_path, original).words()


def test_failed_microbatches_are_named(tmp_path: Path) -> None:
    assert "out of memory at 24, 16, 12, 8, 6" in run_page(tmp_path, node_record()).words()


def test_points_with_other_batches_show_both_hashes(tmp_path: Path) -> None:
    text = run_page(tmp_path, with_point(smoke_record(), 0, order_hash="c" * 64)).words()
    assert f"{'c' * 64}, {'b' * 64}" in text


@pytest.mark.parametrize("where", ["device", "machine", "libraries", "verdict", "point", "files"])
def test_strings_from_elsewhere_are_text(tmp_path: Path, where: str) -> None:
    original = smoke_record()
    poisoned: dict[str, Record] = {
        "device": with_point(original, 0, device_name=EVIL, attention_backend=EVIL),
        "machine": _with(original, machine=original.machine.model_copy(update={"cpu": EVIL, "host": EVIL})),
        "libraries": _with(
            original, environment=original.environment.model_copy(update={"libraries": {EVIL: EVIL}})
        ),
        "verdict": _with(original, verdicts=(original.verdicts[0].model_copy(update={"reason": EVIL}),)),
        "point": with_point(original, 0, id=EVIL),
        "files": _with(original, files={EVIL: EVIL}, run=EVIL),
    }
    for found in (run_page(tmp_path, poisoned[where]), recipe_page(tmp_path, poisoned[where])):
        assert not found.all("script")
    assert EVIL in run_page(tmp_path, poisoned[where]).words()


def test_a_claim_that_the_recipe_dropped_is_still_shown(tmp_path: Path) -> None:
    original = smoke_record()
    gone = original.verdicts[0].model_copy(update={"claim": "gone"})
    assert "no longer in published.toml" in run_page(tmp_path, _with(original, verdicts=(gone,))).words()


def test_another_version_of_the_recipe_is_named(tmp_path: Path) -> None:
    original = smoke_record()
    older = _with(original, plan=original.plan.model_copy(update={"recipe_version": 99}))
    assert "version 99 of the recipe" in run_page(tmp_path, older).words()


def test_another_recipe_is_refused(tmp_path: Path) -> None:
    original = smoke_record()
    other = _with(original, plan=original.plan.model_copy(update={"recipe": "another"}))
    with pytest.raises(InputError, match="another recipe"):
        run_page(tmp_path, other)
    with pytest.raises(InputError, match="another recipe"):
        recipe_page(tmp_path, other)


def test_a_page_that_cannot_be_written_is_our_error(tmp_path: Path) -> None:
    (tmp_path / "report.html").mkdir()
    with pytest.raises(MachineError):
        run_page(tmp_path, smoke_record())


def test_the_same_record_gives_the_same_page(tmp_path: Path) -> None:
    pages = []
    for _ in range(2):
        run_page(tmp_path, paper_record())
        pages.append((tmp_path / "report.html").read_bytes())
    assert pages[0] == pages[1]


def test_records_are_listed_newest_first(tmp_path: Path) -> None:
    dates = ("2026-01-01T00:00:00+00:00", "2026-03-01T00:00:00+00:00", "2026-02-01T00:00:00+00:00")
    records = [_with(node_record(), created=date, run=f"run-{date[5:7]}") for date in dates]
    text = recipe_page(tmp_path, *records).words()
    assert "3 records, newest first" in text
    places = [text.index(f"run-{month}") for month in ("03", "02", "01")]
    assert places == sorted(places)


def test_every_record_has_its_points_and_verdicts(tmp_path: Path) -> None:
    page = recipe_page(tmp_path, smoke_record(), node_record())
    assert len([table for table in page.all("table") if table.get("class") == "points"]) == 2
    assert len([table for table in page.all("table") if table.get("class") == "claims"]) == 2
    assert "torch 2.7.0" in page.words()


def test_a_recipe_without_records_says_so(tmp_path: Path) -> None:
    assert "No run of this recipe has been recorded." in recipe_page(tmp_path).words()


def _with(original: Record, **changes: Any) -> Record:
    return original.model_copy(update=changes)
