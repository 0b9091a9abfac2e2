from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from tests.benches import POINT, bench_record, judged_bench, loaded_bench
from tests.records import gpus, smoke_record
from tests.report.test_page import EVIL, Page
from twinrun.errors import InputError
from twinrun.record import BenchRecord
from twinrun.report.bars import operation_bars
from twinrun.report.form import file_name, form
from twinrun.report.page import write_recipe_report, write_report
from twinrun.report.roofline import roofline
from twinrun.report.tables import measurement_tables


def renamed(record: BenchRecord, name: str) -> BenchRecord:
    points = tuple(point.model_copy(update={"device_name": name}) for point in record.points)
    return judged_bench(record.model_copy(update={"points": points}))


RUNS: dict[str, Callable[[], BenchRecord]] = {
    "smoke": lambda: bench_record(gpu=None, scale="smoke"),
    "node": bench_record,
    "paper": lambda: bench_record(gpu="mi250", scale="paper", factor=9),
    "unknown GPU": lambda: judged_bench(bench_record().model_copy(update={"gpu": None})),
    "no ceilings": lambda: judged_bench(
        bench_record().model_copy(
            update={"points": tuple(one.model_copy(update={"ceilings": ()}) for one in bench_record().points)}
        )
    ),
    "no point": lambda: judged_bench(bench_record().model_copy(update={"points": ()})),
    "evil name": lambda: renamed(bench_record(), EVIL),
}


def page_of(record: BenchRecord, folder: Path) -> str:
    write_report(folder / "report.html", record=record, recipe=loaded_bench(), gpus=gpus())
    return (folder / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", RUNS)
def test_nothing_is_fetched_and_nothing_runs(name: str, tmp_path: Path) -> None:
    text = page_of(RUNS[name](), tmp_path)
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in page.tags}
    assert not any(
        key in ("src", "href") and not (value or "").startswith("#")
        for _, a in page.tags
        for key, value in a.items()
        if key != "xlink:href"
    )
    assert EVIL not in text


def test_identifiers_are_unique(tmp_path: Path) -> None:
    found = [
        value
        for _, a in Page(page_of(bench_record(), tmp_path)).tags
        for key, value in a.items()
        if key == "id"
    ]
    assert len(found) == len(set(found))


def test_every_measurement_stands_on_the_page(tmp_path: Path) -> None:
    record = bench_record()
    text = Page(page_of(record, tmp_path)).text
    for case in record.points:
        assert case.id in text
        assert all(one.id in text for one in case.measurements)
    assert "2.67" in text
    assert "delta bias 1.7e-03, 1.7e-03 baseline" in text


def test_what_stands_between_backticks_is_code(tmp_path: Path) -> None:
    page = page_of(bench_record(), tmp_path)
    assert "<code>out.backward(g)</code> and keeps <code>.grad</code>" in page
    assert "`" not in Page(page).text


def test_published_and_measured_stand_side_by_side() -> None:
    pictures = list(operation_bars([bench_record()], loaded_bench().published, gpus()))
    assert [one.title for one in pictures][:2] == [f"Scan, forward, {POINT}", f"Scan, backward, {POINT}"]
    assert len(pictures) == 4
    for label in ("published, MI250 die", "published, A40", "ours bf16", "mamba_ssm fp16", "floor bf16"):
        assert label in pictures[0].svg
    assert pictures[0].keys[0].label == "published"


def test_untimed_records_have_no_pictures() -> None:
    smoke = bench_record(gpu=None, scale="smoke")
    assert not list(operation_bars([smoke], loaded_bench().published, gpus()))
    assert roofline(smoke, name="r") is None


def test_the_roofline_names_what_was_measured() -> None:
    picture = roofline(bench_record(), name="r")
    assert picture
    assert any("copy: 4.25 TB/s" in note for note in picture.notes)
    assert "update, step" not in picture.svg
    assert "mathdefault" not in picture.svg


def test_the_recipe_page_has_all_records_and_bars_of_each_hardware(tmp_path: Path) -> None:
    records = [bench_record(), bench_record(gpu="mi250", factor=3), bench_record(gpu=None, scale="smoke")]
    path = tmp_path / "recipe.html"
    write_recipe_report(path, records=records, recipe=loaded_bench(), gpus=gpus())
    page = Page(path.read_text(encoding="utf-8"))
    assert "3 records" in page.text
    assert "H200 ours bf16" in page.text
    assert "times as fast" in page.text


def test_a_record_of_another_recipe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="another recipe"):
        write_report(tmp_path / "r.html", record=smoke_record(), recipe=loaded_bench(), gpus=gpus())


@pytest.mark.parametrize("name", RUNS)
def test_the_terminal_shows_it_too(name: str) -> None:
    console = Console(width=120, no_color=True)
    with console.capture() as captured:
        console.print(measurement_tables(RUNS[name]()))
    if name != "no point":
        assert "twinrun-mamba" in captured.get()


def test_the_terminal_needs_no_more_than_80_columns() -> None:
    console = Console(width=80, no_color=True)
    with console.capture() as captured:
        console.print(measurement_tables(bench_record()))
    lines = captured.get().splitlines()
    assert any(line.split()[:1] == ["scan-backward-"] for line in lines)
    assert "±2.0%" in captured.get()


def test_a_gpu_without_a_record_gets_a_form() -> None:
    record = bench_record(gpu="mi250", factor=3)
    text = form(record, [bench_record(gpu="h200")])
    assert text
    assert "AMD Instinct MI250" in text
    assert record.digest() in text
    assert "record.json" in text
    assert f"results/{file_name(record)}" in text


def test_no_form_for_a_processor_or_a_known_gpu() -> None:
    assert form(bench_record(gpu=None, scale="smoke"), []) is None
    assert form(bench_record(gpu="h200"), [bench_record(gpu="h200", factor=2)]) is None
