"""The flow of `invoke run`, with a fault at every step, for each workload; an engine plays the ranks."""

from __future__ import annotations

import dataclasses
import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.flow_sites import RECIPE, REFUSED, FlowSite
from tests.cli.played_ranks import Job
from tests.execution.fake_engine import NAME, Play, torchrun_report
from tests.runs.test_models import folder_at
from twinrun.foundation.errors import InputError, MachineError, RunError, RunInterruptedError, TwinrunError
from twinrun.planning.project import Project
from twinrun.protocol.job import OUT_OF_MEMORY
from twinrun.results.reading import FinishedRun, read_record
from twinrun.runs.prepared import prepare
from twinrun.runs.run import Display, execute
from twinrun.runs.selection import Request, Selection, select


def test_a_run_measures_records_judges_and_reports(
    site: FlowSite, capsys: pytest.CaptureFixture[str]
) -> None:
    assert site.invoke() == 0
    printed = json.loads(capsys.readouterr().out)
    record = site.record()
    assert [point["id"] for point in printed["points"]] == [one.id for one in record.plan.points]
    assert {one.claim for one in record.verdicts} == {one["claim"] for one in printed["verdicts"]}
    assert all(one.measurements or one.checks for one in record.points)
    (folder,) = site.folders()
    assert {"plan.json", "metrics.jsonl", "record.json", "report.html"} <= {
        path.name for path in folder.iterdir()
    }


def test_a_model_that_is_there_is_scored_without_a_training(evaluated: FlowSite, tmp_path: Path) -> None:
    folder = folder_at(tmp_path / "small")
    jobs: list[Job] = []

    def play(job: Job) -> Play:
        jobs.append(job)
        return evaluated.play(job)

    evaluated.script.play = play
    assert evaluated.invoke(f"model={folder}") == 0
    record = evaluated.record()
    (point,) = record.points
    assert (point.series, jobs[0]["training"]) == ((), None)
    assert jobs[0]["model"]["folder"] == str(folder)
    assert not (tmp_path / "cache" / "data").is_dir() or not list((tmp_path / "cache" / "data").iterdir())
    with pytest.raises(InputError, match="the model has another digest"):
        evaluated.invoke(f"model={folder}@{'0' * 64}")
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match="not a whole folder of transformers"):
        evaluated.invoke(f"model={folder}")
    assert len(evaluated.folders()) == 1


@pytest.mark.needs("tensorboard", "mlflow")
def test_a_run_is_written_for_trackers(site: FlowSite, capsys: pytest.CaptureFixture[str]) -> None:
    assert site.invoke(track="tensorboard,mlflow") == 0
    (folder,) = site.folders()
    printed = capsys.readouterr().err
    for name, found in (("tensorboard", "*/events.out.*"), ("mlflow", "*/*/artifacts/record.json")):
        tracked = folder / "trackers" / name
        assert f"{name}: " in printed
        assert len([*tracked.glob(found)]) == len(site.record().points)


def test_runs_of_one_second_are_apart(site: FlowSite) -> None:
    for _ in range(3):
        site.invoke()
    folders = site.folders()
    assert len({read_record(one / "record.json", Project(site.root)).run for one in folders}) == 3
    for folder in folders:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        attempts = {(line["point"], line["attempt"]) for line in map(json.loads, lines)}
        assert len(attempts) == len({point for point, _ in attempts})


FAILED = RunError("it ended", place="here")


def engine_refuses(site: FlowSite) -> None:
    site.script.opening = REFUSED


def versions_cannot_be_read(site: FlowSite) -> None:
    site.script.reading = FAILED


def command_cannot_be_started(site: FlowSite) -> None:
    site.script.starting = MachineError("no such program", place="here")


def a_rank_fails(site: FlowSite) -> None:
    site.script.play = lambda job: Play(status=1, log=torchrun_report(1, 3))


def the_launcher_dies(site: FlowSite) -> None:
    site.script.play = lambda job: Play(status=-9, log="out of files\n")


def no_result(site: FlowSite) -> None:
    site.script.play = lambda job: dataclasses.replace(site.play(job), result=None)


def a_torn_result(site: FlowSite) -> None:
    site.script.play = lambda job: dataclasses.replace(site.play(job), result={"point": "devices=1"})


def a_result_of_another_point(site: FlowSite) -> None:
    def elsewhere(job: Job) -> Play:
        play = site.play(job)
        return dataclasses.replace(play, result={**(play.result or {}), "point": "elsewhere"})

    site.script.play = elsewhere


def no_memory(site: FlowSite) -> None:
    site.script.play = lambda job: Play(status=1, log=torchrun_report(0, OUT_OF_MEMORY))


@pytest.mark.parametrize(
    ("plant", "code", "said"),
    [
        (engine_refuses, 3, "no such device"),
        (versions_cannot_be_read, 4, "it ended"),
        (command_cannot_be_started, 3, "no such program"),
        (a_rank_fails, 4, "rank 1 of"),
        (the_launcher_dies, 4, "signal 9"),
        (no_result, 4, "result.json"),
        (a_torn_result, 4, "result.json"),
        (a_result_of_another_point, 4, "elsewhere"),
        (no_memory, 3, "fits into the memory"),
    ],
)
def test_a_fault_ends_the_run_without_a_record(
    site: FlowSite, plant: Callable[[FlowSite], None], code: int, said: str
) -> None:
    plant(site)
    with pytest.raises(TwinrunError) as refused:
        site.invoke()
    assert refused.value.exit_code == code
    assert said in str(refused.value)
    (folder,) = site.folders()
    assert (folder / "plan.json").is_file()
    assert not (folder / "record.json").exists()
    assert not (folder / "report.html").exists()


def test_a_microbatch_that_does_not_fit_is_told(trained: FlowSite) -> None:
    no_memory(trained)
    with pytest.raises(MachineError, match="nothing that was tried fits into the memory") as refused:
        trained.invoke("microbatch=4")
    assert refused.value.found == "tried microbatch 4"
    assert "choose a smaller model" in str(refused.value)


def test_a_smaller_microbatch_is_tried(trained: FlowSite) -> None:
    project = Project(trained.root)
    request = Request(
        recipe=RECIPE, vendor="cpu", engine=NAME, scale="smoke", set=("devices=1", "microbatch=16")
    )
    selection = with_microbatches(select(project, request), (16, 8))
    full = Play(status=1, log=torchrun_report(0, OUT_OF_MEMORY))
    trained.script.play = lambda job: full if job["microbatch"] > 8 else trained.play(job)
    ended = execute(prepare(project, selection, out=trained.out), display=Display())
    assert isinstance(ended, FinishedRun)
    (point,) = ended.record.points
    assert point.sent.attempts == ("microbatch 16",)
    assert point.result.microbatch == 8


def with_microbatches(selection: Selection, sizes: tuple[int, ...]) -> Selection:
    """Return the selection as if the memory of a device were known, which on a CPU it is not."""
    points = tuple(
        point.model_copy(update={"part": point.part.model_copy(update={"microbatches": sizes})})
        for point in selection.plan.points
    )
    return dataclasses.replace(selection, plan=selection.plan.model_copy(update={"points": points}))


def test_what_was_mended_goes_on_with_the_points_that_are_left(site: FlowSite) -> None:
    def interrupted(job: Job) -> Play:
        return dataclasses.replace(site.play(job), result=None, interrupted=KeyboardInterrupt())

    last = (
        select(Project(site.root), Request(recipe=RECIPE, vendor="cpu", engine=NAME, scale="smoke"))
        .plan.points[-1]
        .id
    )
    site.script.play = lambda job: interrupted(job) if job["point"] == last else site.play(job)
    with pytest.raises(RunInterruptedError, match="points finished"):
        site.invoke()
    jobs: list[str] = []

    def noted(job: Job) -> Play:
        jobs.append(job["point"])
        return site.play(job)

    site.script.play = noted
    assert site.invoke(resume=True) == 0
    assert jobs == [last]
    assert site.record().points[-1].id == last


def test_a_finished_run_is_not_resumed(trained: FlowSite) -> None:
    assert trained.invoke() == 0
    with pytest.raises(InputError, match="no unfinished run of this plan"):
        trained.invoke(resume=True)


def test_the_newest_unfinished_run_goes_on(trained: FlowSite) -> None:
    trained.script.opening = REFUSED
    for _ in range(2):
        with pytest.raises(MachineError):
            trained.invoke()
    first = trained.folders()[0]
    stamp = len("20260101-000000")
    first.rename(first.with_name("20200101-000000" + first.name[stamp:]))
    older, newer = trained.folders()
    trained.script.opening = None
    assert trained.invoke(resume=True) == 0
    assert (newer / "record.json").is_file()
    assert not (older / "record.json").exists()


def test_a_run_that_is_alive_is_not_joined(trained: FlowSite) -> None:
    refused = []

    def joined(job: Job) -> Play:
        with pytest.raises(InputError, match="another process is running this run") as caught:
            trained.invoke(resume=True)
        refused.append(caught.value)
        return trained.play(job)

    trained.script.play = joined
    assert trained.invoke() == 0
    assert refused


def test_a_changed_option_is_another_run(trained: FlowSite) -> None:
    trained.script.opening = REFUSED
    with pytest.raises(MachineError):
        trained.invoke()
    with pytest.raises(InputError, match="no unfinished run of this plan"):
        trained.invoke("steps=11", resume=True)


def test_a_claim_that_is_edited_during_a_run_is_not_judged(trained: FlowSite) -> None:
    published = trained.root / "recipes" / RECIPE / "published.toml"
    before = Project(trained.root).recipe(RECIPE).published

    def edited(job: Job) -> Play:
        text = published.read_text(encoding="utf-8")
        published.write_text(text.replace("tolerance = 0.", "tolerance = 0.9", 1), encoding="utf-8")
        return trained.play(job)

    trained.script.play = edited
    trained.invoke()
    (folder,) = trained.folders()
    assert Project(trained.root).recipe(RECIPE).published != before
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "90 %" not in page


def test_a_full_disk_leaves_no_record_and_what_was_measured(
    site: FlowSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "record.json")

    with monkeypatch.context() as disk:
        disk.setattr("twinrun.runs.run.write_record", full)
        with pytest.raises(OSError, match="No space left"):
            site.invoke()
    (folder,) = site.folders()
    assert not (folder / "record.json").exists()
    site.script.play = lambda job: pytest.fail("measured twice")
    assert site.invoke(resume=True) == 0
    assert site.record().points
