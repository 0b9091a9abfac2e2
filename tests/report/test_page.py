from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.report.committed import (
    PROJECT,
    RECIPES,
    as_published,
    changed,
    committed,
    judged,
    named,
    newest,
    verdict,
)
from twinrun.foundation.errors import InputError, MachineError
from twinrun.report.page import overview, write_recipe_report, write_report
from twinrun.report.summary import selected
from twinrun.results.between import judge_between
from twinrun.results.finished_run import run_of
from twinrun.results.record import Record, hardware
from twinrun.workloads.tables_and_charts import LineChart

VOID = {"meta", "br", "link", "img", "hr", "input"}
EVIL = '<script>alert("$x$")</script>&amp;{{ 7 * 7 }}'
TRAINING, BENCH = (newest(recipe) for recipe in RECIPES)


def without_numbers(record: Record) -> Record:
    points = tuple(point.model_copy(update={"measurements": (), "series": ()}) for point in record.points)
    return changed(record, points=points)


RUNS: dict[str, Callable[[], Record]] = {
    "training": lambda: TRAINING,
    "bench": lambda: BENCH,
    "one point": lambda: changed(TRAINING, points=TRAINING.points[:1]),
    "unknown GPU": lambda: changed(TRAINING, gpu=None),
    "no number": lambda: without_numbers(TRAINING),
    "bench without numbers": lambda: without_numbers(BENCH),
    "no point": lambda: changed(TRAINING, points=()),
    "no bench point": lambda: changed(BENCH, points=()),
    "no verdict": lambda: judged(TRAINING),
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
    write_report(path, run_of(record, PROJECT, folder=folder))
    return Page(path.read_text(encoding="utf-8"))


def recipe_page(folder: Path, name: str, *records: Record) -> Page:
    path = folder / "report.html"
    write_recipe_report(
        path,
        records=records,
        recipe=PROJECT.recipe(name),
        project=PROJECT,
        between=judge_between(selected(records), PROJECT),
    )
    return Page(path.read_text(encoding="utf-8"))


@cache
def page_of(name: str) -> Page:
    with tempfile.TemporaryDirectory() as folder:
        if name in RECIPES:
            return recipe_page(Path(folder), name, *map(named, committed(name)))
        return run_page(Path(folder), RUNS[name]())


@pytest.fixture(params=[*RUNS, *RECIPES])
def page(request: pytest.FixtureRequest) -> Page:
    return page_of(request.param)


def test_nothing_is_fetched_and_nothing_runs(page: Page) -> None:
    assert not {"script", "link", "iframe", "object", "embed", "base", "form"} & {tag for tag, _ in page.tags}
    for _, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("src", "href", "xlink:href", "action", "srcset", "poster"):
            assert re.fullmatch(r"#.*|report/[\w-]+\.html", attributes.get(name) or "#")
        assert not re.search(r"url\((?!#)|@import|expression", attributes.get("style") or "")


def test_identifiers_are_unique_and_references_have_targets(page: Page) -> None:
    identifiers = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(identifiers) == len(set(identifiers))
    targets = {
        target[1:]
        for _, attributes in page.tags
        if (target := attributes.get("href") or attributes.get("xlink:href") or "#").startswith("#")
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
    text = run_page(tmp_path, TRAINING).words()
    for expected in (
        "166 TFLOP/s per card",
        "model-flops/6N+12LDS",
        "4 x AMD Instinct MI250, 8 devices, 1 node",
        "“Training LLMs at Scale with AMD MI250 GPUs”, bullet list and Figure 5; derived: 159 / 166",
        "✓ holds here",
    ):
        assert expected in text


def test_the_headline_has_the_colour_of_what_was_found(tmp_path: Path) -> None:
    for record, colour in (
        (judged(TRAINING, "not-comparable"), "neutral"),
        (judged(TRAINING, "reproduced"), "good"),
        (judged(TRAINING, "failed"), "bad"),
    ):
        page = run_page(tmp_path, record)
        assert [one["class"] for one in page.all("p") if "headline" in (one.get("class") or "")] == [
            f"headline {colour}"
        ]


def test_a_record_that_decides_claims_opens_the_page_and_hardware_can_be_chosen() -> None:
    text = page_of("mpt7b-scaling").words()
    assert "On 4 x NVIDIA H200 SXM: 0 of 5 claims reproduced as published, 2 hold here, " in text
    # 166 TFLOP/s of MPT-7B on an MI250 of 560 W, and 459 on an H100 of 700 W.
    for row in ("mpt-7b 166 45.9% 3,845 560 24.7", "mpt-7b 459 46.4% 10,631 700 54.7"):
        assert row in text
    assert "PyTorch 2.11.0" in text


def test_what_is_missing_is_listed_and_code_is_code(tmp_path: Path) -> None:
    for record in (TRAINING, BENCH):
        text = " ".join(run_page(tmp_path, record).words().split())
        for what in PROJECT.recipe(record.plan.recipe).published.missing:
            assert what in text
        assert "`" not in text


def test_differences_from_the_published_configuration_are_listed(tmp_path: Path) -> None:
    assert "parameters 1,315,950,592 6,658,859,008" in run_page(tmp_path, TRAINING).words()
    assert "Nowhere: every published field" in run_page(tmp_path, as_published(TRAINING)).words()


@pytest.mark.parametrize("record", [TRAINING, BENCH], ids=RECIPES)
def test_the_circumstances_are_all_there(tmp_path: Path, record: Record) -> None:
    text = run_page(tmp_path, record).words()
    environment = record.environment
    configuration = record.description.configuration
    for expected in (
        *(record.plan_sha256, record.plan.lock_sha256, record.plan.engine, record.machine.cpu, record.run),
        *(
            record.machine.kernel,
            record.created,
            record.sha256,
            environment.python,
            str(record.machine.driver),
        ),
        *environment.libraries.values(),
        *environment.variables,
        *(*record.files, *record.files.values()),
        *(value for _, values in configuration for value in values.values()),
        *(name for point in record.points for name in (point.id, *point.facts)),
    ):
        assert " ".join(expected.split()) in text


def test_every_number_of_the_tables_is_there(tmp_path: Path) -> None:
    for record in (TRAINING, BENCH):
        text = run_page(tmp_path, record).words()
        for table in record.workload.show(record.shown()):
            assert all(cell.text in text for row in table.rows for cell in row)


def test_the_lock_is_told_apart_from_what_was_installed(tmp_path: Path) -> None:
    def page_with(**differences: str) -> str:
        environment = TRAINING.environment.model_copy(update={"lock_differences": differences})
        return run_page(tmp_path, changed(TRAINING, environment=environment)).words()

    assert "torch 2.8.0, lock has 2.7.0" in page_with(torch="2.8.0, lock has 2.7.0")
    assert "the environment is the lock" in page_with()


def test_what_did_not_fit_is_named(tmp_path: Path) -> None:
    points = (TRAINING.points[0].model_copy(update={"attempts": ("microbatch 48",)}), *TRAINING.points[1:])
    assert "microbatch 48" in run_page(tmp_path, changed(TRAINING, points=points)).words()


def test_facts_that_differ_name_their_points(tmp_path: Path) -> None:
    first, *rest = TRAINING.points
    facts = {**first.facts, "order hash": "c" * 64}
    points = (first.model_copy(update={"facts": facts}), *rest)
    assert (
        f"{first.id}: {'c' * 64}; {rest[0].id}: "
        in run_page(tmp_path, changed(TRAINING, points=points)).words()
    )


@pytest.mark.parametrize("where", ["facts", "machine", "libraries", "verdict", "point", "files"])
def test_strings_from_elsewhere_are_text(tmp_path: Path, where: str) -> None:
    record = TRAINING
    first, *rest = record.points
    poisoned: dict[str, Record] = {
        "facts": changed(
            record, points=(first.model_copy(update={"facts": {**first.facts, EVIL: EVIL}}), *rest)
        ),
        "machine": changed(record, machine=record.machine.model_copy(update={"cpu": EVIL, "host": EVIL})),
        "libraries": changed(
            record, environment=record.environment.model_copy(update={"libraries": {EVIL: EVIL}})
        ),
        "verdict": changed(record, verdicts=(verdict("failed", reason=EVIL),)),
        "point": changed(record, points=(first.model_copy(update={"id": EVIL}), *rest)),
        "files": changed(record, files={EVIL: EVIL}, run=EVIL),
    }
    for found in (
        run_page(tmp_path, poisoned[where]),
        recipe_page(tmp_path, record.plan.recipe, poisoned[where]),
    ):
        assert not found.all("script")
    assert EVIL in run_page(tmp_path, poisoned[where]).words()


def test_a_claim_that_the_recipe_dropped_is_still_shown(tmp_path: Path) -> None:
    gone = changed(TRAINING, verdicts=(verdict("reproduced", claim="gone"),))
    assert "no longer in published.toml" in run_page(tmp_path, gone).words()


def test_a_record_of_another_recipe_is_refused(tmp_path: Path) -> None:
    recipe = PROJECT.recipe(BENCH.plan.recipe)
    with pytest.raises(InputError, match="another recipe"):
        write_recipe_report(tmp_path / "r.html", records=[TRAINING], recipe=recipe, project=PROJECT)


def test_an_older_version_of_the_recipe_is_named(tmp_path: Path) -> None:
    older = changed(TRAINING, plan=TRAINING.plan.model_copy(update={"recipe_version": 99}))
    assert "version 99 of the recipe" in run_page(tmp_path, older).words()


def test_an_unwritable_place_is_an_error_of_the_machine(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError):
        run_page(tmp_path / "file", TRAINING)


def test_records_have_pages_of_their_own_and_a_list_newest_first(tmp_path: Path) -> None:
    months = ("01", "03", "02")
    runs = [changed(named(TRAINING), run=f"run-{month}", created=f"2026-{month}-01") for month in months]
    page = recipe_page(tmp_path, TRAINING.plan.recipe, *runs)
    assert "run-03" in page.text
    assert "run-01" not in page.text
    beside = {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "report").iterdir()}
    assert sorted(beside) == ["1.html", "2.html", "3.html", "records-1.html"]
    assert "run-01" in beside["1.html"]
    assert [beside["records-1.html"].index(f"run-{month}") for month in ("03", "02", "01")] == sorted(
        beside["records-1.html"].index(f"run-{month}") for month in months
    )


def test_the_page_of_a_recipe_does_not_grow_with_its_records(tmp_path: Path) -> None:
    def written(count: int) -> tuple[int, int, int]:
        folder = tmp_path / str(count)
        runs = [
            changed(named(BENCH), run=f"run-{place:03}", created=f"2026-01-01T00:00:{place:03}")
            for place in range(count)
        ]
        page = recipe_page(folder, BENCH.plan.recipe, *runs)
        files = {path.name: path.stat().st_size for path in (folder / "report").iterdir()}
        lists = {name: size for name, size in files.items() if name.startswith("records-")}
        assert len(files) - len(lists) == count
        return len(page.text), len(page.all("table")), max(lists.values()) // 1000

    # The number of records has as many digits in both, and a full page of the list has as many rows.
    assert written(25) == written(75)


def test_a_recipe_without_records_says_so(tmp_path: Path) -> None:
    assert "No run of this recipe has been recorded." in recipe_page(tmp_path, RECIPES[0]).words()


def test_claims_between_records_open_the_page_of_their_recipe() -> None:
    with tempfile.TemporaryDirectory() as folder:
        page = recipe_page(Path(folder), "mpt-throughput", *map(named, committed("mpt-throughput")))
    claims = PROJECT.recipe("mpt-throughput").published.between_records
    assert f"0 of {len(claims)} claims reproduced as published" in page.words()
    for claim in claims:
        assert claim.statement in page.words()
        assert claim.here is None or claim.here.statement in page.words()


def test_the_table_of_hardware_is_of_what_was_measured_first() -> None:
    recipe = PROJECT.recipe("mpt-throughput")
    (first, folded) = overview(committed("mpt-throughput"), recipe, PROJECT.gpus).tables
    measured = {record.plan.part.training.model for record in committed("mpt-throughput")}
    assert {row[1].text for row in first.rows} == measured
    assert len(folded.rows) > 100
    assert not measured & {row[1].text for row in folded.rows}


def test_a_picture_has_one_curve_of_each_published_gpu() -> None:
    recipe, records = PROJECT.recipe("mpt-throughput"), committed("mpt-throughput")
    (chart,) = [one for one in overview(records, recipe, PROJECT.gpus).charts if one.name == "per-card"]
    assert isinstance(chart, LineChart)
    published = [curve for curve in chart.curves if curve.kind == "reference"]
    assert [curve.label for curve in published] == [
        f"published elsewhere: {name}, mpt-7b"
        for name in ("NVIDIA A100 80GB SXM", "NVIDIA A100 40GB", "NVIDIA H100 80GB SXM")
    ]
    for curve in published:
        sizes = [spot.x for spot in curve.spots]
        assert sizes == sorted(set(sizes))


def test_legs_on_a_processor_are_no_throughput_of_a_gpu() -> None:
    recipe, records = PROJECT.recipe("mpt1b-convergence"), committed("mpt1b-convergence")
    drawn = {
        one.name: one for one in overview(records, recipe, PROJECT.gpus).charts if isinstance(one, LineChart)
    }
    speeds = [spot.value for curve in drawn["per-card"].curves for spot in curve.spots]
    # Of a run on the GPU and its three legs there, in TFLOP/s; the processor's have 0.7.
    assert len(speeds) == 4 * len(records)
    assert min(speeds) > 20


def test_published_tokens_of_a_node_are_drawn_as_flops_of_a_card() -> None:
    recipe, records = PROJECT.recipe("mamba-throughput"), committed("mamba-throughput")
    (chart,) = [one for one in overview(records, recipe, PROJECT.gpus).charts if one.name == "per-card"]
    assert isinstance(chart, LineChart)
    (curve,) = [one for one in chart.curves if one.kind == "published"]
    # 5,500 tokens/s of a die are 47.8 TFLOP/s.
    (spot,) = curve.spots
    assert spot.x == 8
    assert spot.value == pytest.approx(95.6, rel=2e-3)
    (table, *_) = overview(records, recipe, PROJECT.gpus).tables
    row = next(row for row in table.rows if "AMD" in row[0].text)
    assert [one.text for one in row[3:5]] == ["26.4%", "11,000"]
    assert "44,000 tokens/s per node" in row[0].detail


def test_bandwidths_of_two_records_of_one_machine_stay_apart_and_have_the_librarys_beside_them() -> None:
    recipe, records = PROJECT.recipe("ring-allreduce"), selected([*map(named, committed("ring-allreduce"))])
    (chart,) = overview(records, recipe, PROJECT.gpus).charts
    assert isinstance(chart, LineChart)
    machines = [hardware(record) for record in records]
    for record, machine in zip(records, machines, strict=True):
        mark = record.run[:15] if machines.count(machine) > 1 else machine
        (curve,) = [one for one in chart.curves if mark in one.label and ", library" in one.label]
        assert [spot.x for spot in curve.spots] == [point.part.settings["bytes"] for point in record.points]
        times = [point.measurement("ring-fp32@library") for point in record.points]
        # Two ranks: a link carries as many bytes as the buffer has.
        assert [spot.value * 1e6 for spot in curve.spots] == pytest.approx(
            [spot.x / time.median for spot, time in zip(curve.spots, times, strict=True) if time]
        )
    assert len({curve.label for curve in chart.curves}) == len(chart.curves)
    assert not any("none" in curve.label for curve in chart.curves)
