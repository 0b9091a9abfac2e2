"""Numbers, texts and dates that are none, in records and published.toml: exit code 2, with file and key."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_bad_input import RECIPE, refused, replace, with_manifests
from tests.records import training_record
from twinrun.results.record import content_digest

RECORD: dict[str, Any] = training_record(
    {"devices=1": 400.0}, gpu="h200", scale="node", settings=("model=mpt-1b",)
).model_dump(mode="json")
Change = Callable[[dict[str, Any]], Any]


def median(value: float) -> Change:
    """Return a change of the step time to one value."""
    samples = {"median": value, "low": value, "high": value}
    return lambda content: content["points"][0]["measurements"][0].update(samples)


def losses(*values: float) -> Change:
    """Return a change of the losses."""
    return lambda content: content["points"][0]["series"][0].update(values=list(values))


def twice(content: dict[str, Any]) -> None:
    content["points"].append(copy.deepcopy(content["points"][0]))


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose files no command changes, which `refused` sees to."""
    return with_manifests(tmp_path_factory.mktemp("untouched") / "project")


TIME, LOSS = "points.0.measurements.0.median", "points.0.series.0.values.1"
RECORDS: dict[str, tuple[Change, list[str]]] = {
    "a time that is not a number": (median(float("nan")), [f"{TIME}: Input should be a finite number"]),
    "an infinite time": (median(float("inf")), [f"{TIME}: Input should be a finite number"]),
    "a time of 1e308": (median(1e308), [f"{TIME}: too large a number", "found: 1e+308"]),
    "a time of 1e-308": (median(1e-308), [f"{TIME}: too small a number", "found: 1e-308"]),
    "no time": (median(0.0), ["points.devices=1.measurements.step-time.low: no step time", "more than 0"]),
    "a time below 0": (median(-1.0), ["points.devices=1.measurements.step-time.low: no step time"]),
    "a loss that is not a number": (losses(4.0, float("nan")), [f"{LOSS}: Input should be a finite number"]),
    "a loss of 1e308": (losses(4.0, 1e308), [f"{LOSS}: too large a number"]),
    "an empty series": (losses(), ["points.devices=1.series.loss: a series without a value"]),
    "two points of one name": (twice, ["points.devices=1: two points of one name"]),
    "half a character in a fact": (
        lambda content: content["points"][0]["facts"].update({"device name": "a\ud800"}),
        [r"not a record: points.0.facts.device name: half a character, 'a\ud800'"],
    ),
    "half a character in a name": (
        lambda content: content["environment"]["libraries"].update({"a\udfff": "1"}),
        [r"not a record: environment.libraries.a\udfff: half a character"],
    ),
    "a date that is none": (lambda content: content.update(created="2024-13"), ["created: not a time"]),
}


@pytest.mark.parametrize(("change", "parts"), RECORDS.values(), ids=RECORDS)
def test_a_record(untouched: Path, tmp_path: Path, change: Change, parts: list[str]) -> None:
    content = copy.deepcopy(RECORD)
    change(content)
    try:
        content["sha256"] = content_digest(content)
    except UnicodeEncodeError:
        content["sha256"] = "0" * 64
    file = tmp_path / "record.json"
    file.write_text(json.dumps(content), encoding="utf-8")
    message = refused(untouched, "report", str(file))
    assert message.startswith(f"error: {file}")
    for part in parts:
        assert part in message


CLAIM, DATE = "value = 166\n", 'published = "2023-10"\n'
PUBLISHED: dict[str, tuple[str, str, str, list[str]]] = {
    "1e30": ("published.toml", CLAIM, "value = 1e30\n", ["claim.0.value: no value of a", "found: 1e+30"]),
    "1e308": ("published.toml", CLAIM, "value = 1e308\n", ["claim.0.value: no value of a publication"]),
    "infinity": (
        "published.toml",
        CLAIM,
        "value = inf\n",
        ["claim.0.value: Input should be a finite number"],
    ),
    "not a number": ("published.toml", CLAIM, "value = nan\n", ["claim.0.value: Input should be a finite"]),
    "beyond the peak": (
        "published.toml",
        CLAIM,
        "value = 400\n",
        ["claim.0.value: more than the device can do", "found: 400", "allowed: up to 362 TFLOP/s"],
    ),
    "half a character": ("published.toml", "MPT-7B trains", r"\uD800 trains", ["published.toml:", "broken"]),
    "another workload's metric": (
        "published.toml",
        'metric = "model-flops"\nunit = "TFLOP/s"\nper = "card"\nformula = "model-flops/6N+12LDS"\n',
        'metric = "bandwidth"\nunit = "GB/s"\nper = "device"\n',
        ["published.toml:claim.0", "found: bandwidth"],
    ),
    "the 13th month": ("recipe.toml", DATE, 'published = "2024-13"\n', ["recipe.toml:publication.published"]),
    "no date": ("recipe.toml", DATE, 'published = "soon"\n', ["recipe.toml:publication.published", "soon"]),
}


@pytest.mark.parametrize(("name", "old", "new", "parts"), PUBLISHED.values(), ids=PUBLISHED)
def test_a_manifest(tmp_path: Path, name: str, old: str, new: str, parts: list[str]) -> None:
    root = with_manifests(tmp_path / "project")
    replace(root / RECIPE / name, old, new)
    message = refused(root, "run", RECIPE, "--vendor", "cpu", "--engine", "host", "--dry")
    for part in parts:
        assert part in message
