"""Bisections of a library whose faults are known: real locks, real environments, real processes."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.history.slow_library import VERSIONS, SlowLibrary, made, slower, versions
from tests.indexes import serving_folder, wheel

Make = Callable[..., SlowLibrary]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Yield what makes a checkout over an index with the given versions of the library."""
    index = tmp_path / "served" / "simple"
    with serving_folder(tmp_path / "served") as address:
        monkeypatch.setenv("UV_DEFAULT_INDEX", f"{address}/simple")
        monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
        monkeypatch.setenv("UV_NO_CONFIG", "1")

        def site(texts: dict[str, str], *, workload: str = "bench") -> SlowLibrary:
            for version, text in texts.items():
                wheel(index, "slowlib", version, files={"slowlib.py": text})
            return made(tmp_path, f"{address}/simple", index, workload=workload)

        yield site


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
    good, bad = ends(site)
    run = ("--run", f"python -c 'import slowlib; {last}'")
    code, found = site.bisect(good, bad, *options, ran=run)
    assert (code, found["outcome"]) == (0, "found"), found["sentence"]
    assert [one["steps"] for one in found["culprits"]] == [["slowlib 10.0 -> 11.0"]]
    assert len(found["runs"]) <= most
    assert "unexplained" not in found["sentence"]


def ends(site: SlowLibrary, count: int = VERSIONS) -> tuple[Path, Path]:
    """Return the locks of the first version and of the last."""
    return site.lock("good", 1), site.lock("bad", count)


# The source of a version, the workload, the question, the version that did it, and those that do not install.
FAULTS = {
    "sleeps": (lambda n: slower(1.05 if n >= 11 else 1.0), "bench", ("--metric", "norm-fp32"), 11, (8, 9)),
    "drifts": (
        lambda n: f"EPSILON = {0.05 if n >= 9 else 0.0}\n",
        *("training", ("--parity", "--set", "devices=1"), 9, ()),
    ),
    "fails": (lambda n: "1 / 0\n" if n >= 3 else slower(0.1), "bench", ("--fails",), 3, ()),
}


AT_NIGHT = [pytest.param(name, VERSIONS, marks=pytest.mark.trials) for name in ("sleeps", "drifts")]


@pytest.mark.parametrize(("fault", "count"), [("fails", 4), *AT_NIGHT])
def test_the_version_with_a_fault_is_found(make: Make, tmp_path: Path, fault: str, count: int) -> None:
    text, workload, question, version, broken = FAULTS[fault]
    site = make(versions(text, count=count), workload=workload)
    good, bad = ends(site, count)
    # The index goes on naming their hashes: what arrives are other files.
    for one in broken:
        file = tmp_path / "served/simple/slowlib" / f"slowlib-{one}.0-py3-none-any.whl"
        file.write_bytes(b"no wheel")
    code, found = site.bisect(good, bad, *question)
    assert (code, found["outcome"]) == (0, "found"), found["sentence"]
    assert found["culprits"][0]["steps"] == [f"slowlib {version - 1}.0 -> {version}.0"]
    assert bool(found["refused"]) == bool(broken)
    assert Path(found["report"]).is_file()


@pytest.mark.trials
def test_a_killed_bisection_goes_on_and_a_second_one_is_refused(make: Make) -> None:
    site = make(versions(lambda number: slower(1.5 if number >= 2 else 1.0), count=3))
    good, bad = ends(site, 3)
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
def test_a_rerun_holds_both_sides_against_the_noise_of_this_machine(make: Make) -> None:
    site = make(versions(lambda number: slower(1.5 if number >= 2 else 1.0), count=2))
    good, bad = ends(site, 2)
    options = ("--rerun", "--recipe", "timed", "--metric", "norm-fp32", "--scale", "smoke", "--json")
    process = site.start([sys.executable, "-m", "twinrun", "compare", str(good), str(bad), *options])
    found = json.loads(process.communicate(timeout=600)[0])
    assert (process.returncode, found["differs"]) == (1, True)
    assert found["difference"]["effect"]["value"] == pytest.approx(0.5, abs=0.1)
    assert abs(found["noise"]["effect"]["value"]) < 0.1


def recorded(site: SlowLibrary) -> list[object]:
    """Return the runs that the bisection of a checkout has kept so far."""
    files = list(site.root.glob("runs/timed/bisect-*/runs.json"))
    found: list[object] = json.loads(files[0].read_text(encoding="utf-8"))["runs"] if files else []
    return found
