"""The comparison at upstream's shapes: in emulation, with the references in upstream's place."""

from __future__ import annotations

import re
from functools import partial

import compare_upstream
import pytest

SMALL = ("--device", "cpu", "--backend", "emulated-32", "--repeats", "2")


@pytest.fixture
def references(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the references in the place of upstream's kernels."""

    reference = partial(compare_upstream.ours.function, backend="reference")
    monkeypatch.setattr(compare_upstream.upstream, "function", reference)


@pytest.mark.usefixtures("references")
@pytest.mark.parametrize(
    ("only", "group"),
    [
        ("scan fp32, 4 channels, 8 steps", "scan fp32"),
        ("conv along rows bf16, 64 channels, 8 steps", "conv along rows bf16"),
        ("conv through tokens fp16, 64 channels, 8 steps", "conv through tokens fp16"),
    ],
)
@pytest.mark.parametrize(("least", "status", "slower"), [("0", 0, 0), ("1e9", 1, 2)])
def test_pairs_are_timed_and_summed_up(
    only: str, group: str, least: str, status: int, slower: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare_upstream.main([*SMALL, "--only", only, "--least", least]) == status
    printed = capsys.readouterr().out
    assert printed.startswith(f"1 of 1: {group}\n")
    for phase in ("forward", "backward"):
        ratios = r"[\d.]+ / [\d.]+ / [\d.]+"
        assert re.search(rf"^{group}, {phase}: {ratios}, {slower // 2} of 1 below", printed, re.MULTILINE)
        line = rf"^[\d.]+ {re.escape(only)}.*, {phase}: [\d.]+ us, upstream [\d.]+$"
        assert bool(re.search(line, printed, re.MULTILINE)) == bool(slower)
    assert printed.endswith(f"\n{slower} of 2 below {float(least):g}\n")


def test_shapes_are_those_of_upstreams_tests() -> None:
    chosen = list(compare_upstream.shapes())
    assert len(chosen) == len(set(chosen)) == 3 * (9 * 4 + 2 * 3 * 18)
    for shape in (chosen[0], chosen[-1]):
        assert shape.sequence("cpu").shape == (2, shape.channels, shape.length)
    assert chosen[-1].sequence("cpu").stride(1) == 1


def test_what_cannot_start_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in (
        (["--only", "nothing"], "--only: found 'nothing', allowed a part of a name; one is: scan bf16"),
        (["--repeats", "0"], "--repeats: found 0, allowed 1 or more"),
        ([], "upstream's kernels cannot be imported"),
    ):
        with pytest.raises(SystemExit) as stopped:
            compare_upstream.main([*SMALL, *arguments])
        assert stopped.value.code == 2
        assert said in capsys.readouterr().err


@pytest.mark.usefixtures("references")
def test_a_full_stop_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(compare_upstream, "_ratios", stop)
    with pytest.raises(SystemExit) as stopped:
        compare_upstream.main([*SMALL, "--only", "conv"])
    assert stopped.value.code == 130
    assert "hint: --only" in capsys.readouterr().err
