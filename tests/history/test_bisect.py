"""Bisections of a library whose faults are known: real locks, real environments, real processes."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.history.slow_library import RECIPE, STACK, SlowLibrary, made, slower, versions
from tests.indexes import serving_folder, wheel
from twinrun.history.path import ChangePath, between, path_between, resolver, side_of
from twinrun.history.state_runs import RecipeRunner, RunQuestion
from twinrun.planning.project import Project
from twinrun.runs.selection import Request

Make = Callable[..., SlowLibrary]


@pytest.fixture
def two_minutes() -> Iterator[None]:
    """End a test that hangs: the runner then stops what it started."""

    def late(_number: int, _frame: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Yield what makes a checkout over an index with the given versions of the library."""
    index = tmp_path / "served" / "simple"
    with serving_folder(tmp_path / "served") as address:
        monkeypatch.setenv("UV_DEFAULT_INDEX", f"{address}/simple")
        monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
        monkeypatch.setenv("UV_NO_CONFIG", "1")

        def site(texts: dict[str, str], *, workload: str = "bench", **others: str) -> SlowLibrary:
            for version, text in texts.items():
                wheel(index, "slowlib", version, files={"slowlib.py": text})
            for name, text in others.items():
                for version in ("1.0", "2.0"):
                    wheel(index, name, version, files={f"{name}.py": text.format(version=version)})
            return made(tmp_path, f"{address}/simple", index, workload=workload)

        yield site


@pytest.mark.usefixtures("two_minutes")
def test_states_of_a_path_run_in_real_environments(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a search is made of: the path between two locks, the versions inside a step, and their runs."""
    site = make(versions(lambda number: slower(0.1 * number), count=3))
    good, bad = site.lock("good", "slowlib==1.0"), site.lock("bad", "slowlib==3.0")
    # The index goes on naming its hash: what arrives is another file.
    (tmp_path / "served/simple/slowlib/slowlib-2.0-py3-none-any.whl").write_bytes(b"no wheel")
    for name, value in site.variables.items():
        monkeypatch.setenv(name, value)
    project = Project(site.root)
    stack = project.stack(STACK).stack
    sides = [side_of(project, str(lock)) for lock in (good, bad)]
    path = path_between(*sides, resolves=resolver(stack.interpreter()))
    (step,) = path.steps
    inner = ChangePath(start=path.start, steps=between(step, path.start, python=stack.interpreter()))
    assert [one.label for one in inner.steps] == ["slowlib 1.0 -> 2.0", "slowlib 2.0 -> 3.0"]
    runner = RecipeRunner(
        subject=RECIPE,
        project=project,
        request=Request(recipe=RECIPE, vendor="cpu", scale="smoke"),
        stack=STACK,
        question=RunQuestion(kind="metric", metric="norm-fp32"),
        folder=tmp_path / "bisect",
        say=print,
    )
    first, broken, last = (
        runner.run(inner.state(range(1, at + 1)), position=str(at), purpose="") for at in range(3)
    )
    assert (first.outcome, broken.outcome, last.outcome) == ("measured", "refused", "measured"), broken.detail
    assert first.value is not None
    assert last.value == pytest.approx(3 * first.value, rel=0.5)


@pytest.mark.usefixtures("two_minutes")
@pytest.mark.parametrize(
    ("last", "options", "most"),
    [("print(slowlib.RATE)", ("--number", r"^([\d.]+)$"), 40), ("assert slowlib.RATE > 95", (), 10)],
    ids=["number", "exit code"],
)
def test_any_command_is_bisected_over_the_versions_of_a_lock(
    make: Make, last: str, options: tuple[str, ...], most: int
) -> None:
    """A version makes a number 10 % worse, or a command fail; no recipe takes part."""
    site = make(versions(lambda number: f"RATE = {100 if number < 11 else 90}\n"))
    good, bad = site.lock("good", "slowlib==1.0"), site.lock("bad", "slowlib==16.0")
    run = ("--run", f"python -c 'import slowlib; {last}'")
    code, found = site.bisect(good, bad, *options, ran=run)
    assert (code, found["outcome"]) == (0, "found"), found["sentence"]
    assert [one["steps"] for one in found["culprits"]] == [["slowlib 10.0 -> 11.0"]]
    assert len(found["runs"]) <= most
    assert "unexplained" not in found["sentence"]


@pytest.mark.trials
def test_the_version_that_sleeps_is_found_beside_one_that_does_not_install(
    make: Make, tmp_path: Path
) -> None:
    site = make(versions(lambda number: slower(1.05 if number >= 11 else 1.0)))
    good, bad = site.lock("good", "slowlib==1.0"), site.lock("bad", "slowlib==16.0")
    # The index goes on naming their hashes: what arrives are other files.
    for version in (8, 9):
        file = tmp_path / "served/simple/slowlib" / f"slowlib-{version}.0-py3-none-any.whl"
        file.write_bytes(b"no wheel")
    code, found = site.bisect(good, bad, "--metric", "norm-fp32")
    assert (code, found["outcome"]) == (0, "found"), found["sentence"]
    assert found["culprits"][0]["steps"] == ["slowlib 10.0 -> 11.0"]
    assert any("-> 8.0" in text or "-> 9.0" in text for text in found["refused"].values())
    assert 0.03 < found["culprits"][0]["effect"]["value"] < 0.08
    assert Path(found["report"]).is_file()


@pytest.mark.trials
def test_a_killed_bisection_goes_on_and_a_second_one_is_refused(make: Make) -> None:
    site = make(versions(lambda number: slower(1.5 if number >= 2 else 1.0), count=3))
    good, bad = site.lock("good", "slowlib==1.0"), site.lock("bad", "slowlib==3.0")
    command = site.arguments(good, bad, "--metric", "norm-fp32")
    first = site.start(command)
    limit = time.monotonic() + 300
    while not (before := recorded(site)) or len(before) < 4:
        assert first.poll() is None, first.communicate(timeout=120)
        assert time.monotonic() < limit
        time.sleep(0.2)
    second = site.start(command)
    _, said = second.communicate(timeout=120)
    assert second.returncode == 2
    assert "another bisection runs on this machine" in said
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=120)
    before = recorded(site)
    code, found = site.bisect(good, bad, "--metric", "norm-fp32")
    assert (code, found["culprits"][0]["steps"]) == (0, ["slowlib 1.0 -> 2.0"]), found["sentence"]
    assert found["runs"][: len(before)] == before
    # The answer is there: nothing runs again.
    again = site.bisect(good, bad, "--metric", "norm-fp32")
    assert again == (0, found)


@pytest.mark.trials
def test_two_packages_that_each_slow_it_are_both_named(make: Make) -> None:
    text = (
        "import time, alpha, beta\n\n\ndef work():\n"
        '    time.sleep(0.02 + 0.01 * (alpha.VERSION == "2.0") + 0.006 * (beta.VERSION == "2.0"))\n'
    )
    package = "VERSION = {version!r}\n"
    site = make({"1.0": text}, alpha=package, beta=package, gamma=package)
    good, bad = (
        site.lock(name, "slowlib==1.0", *(f"{one}=={number}" for one in ("alpha", "beta", "gamma")))
        for name, number in (("good", "1.0"), ("bad", "2.0"))
    )
    code, found = site.bisect(good, bad, "--metric", "norm-fp32")
    assert code == 0, found["sentence"]
    assert {one["steps"][0] for one in found["culprits"]} == {"alpha 1.0 -> 2.0", "beta 1.0 -> 2.0"}
    assert found["explained"] > 0.9
    assert "unexplained" not in found["sentence"]


@pytest.mark.trials
def test_a_version_that_raises_in_one_of_three_runs(make: Make) -> None:
    fault = "import random\nif random.random() < 1 / 3:\n    raise RuntimeError('a race')\n"
    site = make(versions(lambda number: (fault if number >= 7 else "") + slower(0.1)))
    good, bad = site.lock("good", "slowlib==1.0"), site.lock("bad", "slowlib==16.0")
    code, found = site.bisect(good, bad, "--fails")
    assert (code, found["culprits"][0]["steps"]) == (0, ["slowlib 6.0 -> 7.0"]), found["sentence"]


@pytest.mark.trials
def test_a_version_that_changes_an_epsilon(make: Make) -> None:
    texts = versions(lambda number: f"EPSILON = {0.05 if number >= 9 else 0.0}\n")
    site = make(texts, workload="training")
    good, bad = site.lock("good", "slowlib==1.0"), site.lock("bad", "slowlib==16.0")
    code, found = site.bisect(good, bad, "--parity", "--set", "devices=1")
    assert (code, found["culprits"][0]["steps"]) == (0, ["slowlib 8.0 -> 9.0"]), found["sentence"]


@pytest.mark.trials
def test_equal_ends_name_no_culprit(make: Make) -> None:
    site = make(versions(lambda number: slower(1.0), count=4))
    good, bad = site.lock("good", "slowlib==1.0"), site.lock("bad", "slowlib==4.0")
    code, found = site.bisect(good, bad, "--metric", "norm-fp32")
    # A machine whose speed drifts may seem to have a difference; no step of it is confirmed.
    assert (code, found["outcome"]) in ((1, "unconfirmed"), (3, "no change")), found["sentence"]


@pytest.mark.trials
def test_a_rerun_holds_both_sides_against_the_noise_of_this_machine(make: Make) -> None:
    site = make(versions(lambda number: slower(1.5 if number >= 2 else 1.0), count=2))
    good, bad = site.lock("good", "slowlib==1.0"), site.lock("bad", "slowlib==2.0")
    options = ("--rerun", "--recipe", "timed", "--metric", "norm-fp32", "--scale", "smoke", "--json")
    process = site.start([sys.executable, "-m", "twinrun", "compare", str(good), str(bad), *options])
    printed, said = process.communicate(timeout=600)
    assert process.returncode == 1, said
    found = json.loads(printed)
    assert found["differs"]
    assert found["difference"]["effect"]["value"] == pytest.approx(0.5, abs=0.1)
    assert abs(found["noise"]["effect"]["value"]) < 0.1


def recorded(site: SlowLibrary) -> list[object]:
    """Return the runs that the bisection of a checkout has kept so far."""
    files = list(site.root.glob("runs/timed/bisect-*/runs.json"))
    found: list[object] = json.loads(files[0].read_text(encoding="utf-8"))["runs"] if files else []
    return found
