"""Pages of records: what they say first, that nothing is fetched or run, and that names are text."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from functools import partial
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.records import PROJECT, bench_record, measurement, replaced, smoke_record
from tests.report.committed import changed, judged, newest, verdict
from twinrun.foundation.errors import InputError, MachineError
from twinrun.report.page import write_recipe_report, write_report
from twinrun.results.judged import Judged
from twinrun.results.reading import FinishedRun

VOID = {"meta", "br", "link", "img", "hr", "input"}
EVIL = '<script>alert("$x$")</script>&amp;{{ 7 * 7 }}'
TRAINING = newest("mpt7b-scaling")
RUNS: dict[str, Callable[[], Judged]] = {
    "training": lambda: TRAINING,
    "bench": lambda: bench_record({"scan-forward-fp16": [1.0] * 20}),
    "one point": lambda: changed(TRAINING, points=TRAINING.points[:1]),
    "unknown GPU": lambda: changed(TRAINING, gpu=None),
    "no verdict": lambda: judged(TRAINING),
    **{
        name: partial(smoke_record, name)
        for name in ("cluster-acceptance", "mpt-chinchilla", "mpt7b-scaling", "ring-allreduce", "rmsnorm")
    },
}


class Page(HTMLParser):
    """What a page consists of; fails on tags that do not close."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open += [tag] if tag not in VOID else []

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += f" {data}" if "style" not in self._open else ""

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    def values(self, name: str) -> list[str]:
        return [one for _, attributes in self.tags if (one := attributes.get(name)) is not None]

    def words(self) -> str:
        return " ".join(self.text.split())


def run_page(folder: Path, record: Judged) -> Page:
    run = FinishedRun(record=record, folder=folder, file=folder / "record.json")
    return Page(write_report(folder / "report.html", run))


def recipe_page(folder: Path, name: str, *records: Judged) -> Page:
    path, recipe = folder / "report.html", PROJECT.recipe(name)
    return Page(write_recipe_report(path, records=records, recipe=recipe, project=PROJECT))


@pytest.mark.parametrize("name", RUNS)
def test_a_page_is_whole_and_fetches_and_runs_nothing(name: str, tmp_path: Path) -> None:
    record = RUNS[name]()
    for page in (run_page(tmp_path, record), recipe_page(tmp_path, record.plan.recipe, record)):
        assert not {"script", "link", "iframe", "object", "embed", "base", "form"} & {
            tag for tag, _ in page.tags
        }
        assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
        addresses = [
            one for key in ("src", "href", "xlink:href", "action", "srcset") for one in page.values(key)
        ]
        assert all(re.fullmatch(r"#.*|report/[\w-]+\.html", one) for one in addresses)
        assert not re.search(r"url\((?!#)|@import|expression", " ".join(page.values("style")))
        identifiers = page.values("id")
        assert len(identifiers) == len(set(identifiers))
        assert {one[1:] for one in addresses if one.startswith("#")} <= set(identifiers)
        assert all(picture["role"] == "img" for picture in page.all("svg"))
        assert (len(page.all("caption")), len(page.all("h1"))) == (len(page.all("table")), 1)
        assert all(head.get("scope") in ("col", "row") for head in page.all("th"))
        assert any("default-src 'none'" in one for one in page.values("content"))


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("training", "On 2 x NVIDIA H200 SXM: 0 of 5 claims reproduced as published, 4 hold here"),
        ("rmsnorm", "2 of 2 results within the allowed error, 3 claims need a GPU."),
        ("ring-allreduce", "26 of 26 results within the allowed error, 3 checks of the code hold"),
        ("mpt7b-scaling", "2 checks of the code hold, 3 claims need a GPU."),
        ("cluster-acceptance", "9 of 18 checks pass"),
        ("cluster-acceptance", "9 of 18 checks passed, "),
    ],
)
def test_the_first_sentence_is_true(name: str, sentence: str, tmp_path: Path) -> None:
    assert sentence in run_page(tmp_path, RUNS[name]()).words()
    # The share that passed counts what the sentence counts.
    assert measurement(smoke_record("cluster-acceptance"), "devices=2", "checks-passed").median == 0.5


def test_published_and_measured_stand_side_by_side_with_all_circumstances(tmp_path: Path) -> None:
    text = run_page(tmp_path, TRAINING).words()
    expected = (
        "166 TFLOP/s per card",
        "model-flops/6N+12LDS",
        "4 x AMD Instinct MI250, 8 devices, 1 node",
        "“Training LLMs at Scale with AMD MI250 GPUs”, bullet list and Figure 5; derived: 159 / 166",
        "✓ holds here",
        *(TRAINING.run, TRAINING.created, TRAINING.plan.lock_sha256, TRAINING.plan.engine, TRAINING.node.cpu),
        *TRAINING.record.libraries.values(),
        *(name for point in TRAINING.points for name in (point.id, *point.facts)),
        *PROJECT.recipe("mpt7b-scaling").published.missing,
        *(cell.text for table in TRAINING.workload.show(TRAINING.view) for row in table.rows for cell in row),
    )
    for one in expected:
        assert " ".join(one.split()) in text
    assert "`" not in text


def test_doubts_and_what_exceeds_and_who_vouches_stand_beside_a_verdict(tmp_path: Path) -> None:
    verdicts = (
        verdict("exceeds", factor=1.234, measured=1.18),
        verdict("holds-here", claim="b", doubts=("the commit had changes", "numpy 2 beside the lock")),
    )
    text = run_page(tmp_path, changed(TRAINING, verdicts=verdicts)).words()
    assert "0 of 2 claims reproduced as published, 1 exceeds the published value, 1 holds here." in text
    assert "▲ exceeds, 1.23 times" in text
    assert "✓ holds here unsigned Doubt 1: the commit had changes. Doubt 2: numpy 2 beside the lock." in text
    assert "no longer in published.toml" in text
    assert "The record is unsigned." in text
    signed = run_page(tmp_path, changed(TRAINING, signer="signed by ann")).words()
    assert "The record is signed by ann, one signer." in signed
    assert "✓ holds here signed by ann, one signer" in signed


def test_strings_from_elsewhere_are_text(tmp_path: Path) -> None:
    point = TRAINING.points[0].id
    poisoned = replaced(TRAINING, point, libraries={EVIL: EVIL})
    failed = verdict("failed", reason=EVIL, doubts=(EVIL,))
    for record in (poisoned, changed(TRAINING, verdicts=(failed,))):
        page = run_page(tmp_path, record)
        assert EVIL in page.words()
        assert not page.all("script")
        assert not recipe_page(tmp_path, record.plan.recipe, record).all("script")
    said = run_page(tmp_path, replaced(TRAINING, point, order_hash="c" * 64)).words()
    assert f"{point}: {'c' * 64}; {TRAINING.points[1].id}: " in said


def test_records_have_pages_of_their_own_and_the_newest_stands_for_its_subject(tmp_path: Path) -> None:
    def made(month: str) -> Judged:
        record = TRAINING.record.model_copy(update={"run": f"run-{month}", "created": f"2026-{month}-01"})
        return dataclasses.replace(TRAINING, record=record)

    text = recipe_page(tmp_path, TRAINING.plan.recipe, *map(made, ("01", "03", "02"))).words()
    assert text.index("run-03") < text.index("2 more records") < text.index("run-02")
    beside = {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "report").iterdir()}
    assert sorted(beside) == ["1.html", "2.html", "3.html"]
    assert "run-01" in beside["1.html"]
    assert "No run of this recipe has been recorded." in recipe_page(tmp_path, TRAINING.plan.recipe).words()


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="another recipe"):
        recipe_page(tmp_path, "mamba-kernels", TRAINING)
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError):
        run_page(tmp_path / "file", TRAINING)
