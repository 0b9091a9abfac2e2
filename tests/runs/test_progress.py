from __future__ import annotations

import pytest

from twinrun.runs.progress import Display
from twinrun.workloads.workload import Progress


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what makes rich take a file for a terminal."""
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


def step(number: int, *, loss: float = 2.5) -> Progress:
    return Progress(done=number, status=f"loss {loss:.4f}  0.250 s/step")


def shown(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the lines of stderr; stdout carries data and stays empty."""
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()


def run(display: Display, steps: int) -> None:
    with display:
        display.begin("devices=2", steps=steps, status="microbatch 4")
        for number in range(1, steps + 1):
            display.step("devices=2", step(number))
        display.end("devices=2", status="1234 tokens/s")


def test_elsewhere_than_on_a_terminal_there_are_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    run(Display(), 3)
    assert shown(capsys) == [
        "devices=2: microbatch 4",
        *(f"devices=2: step {number}/3  loss 2.5000  0.250 s/step" for number in (1, 2, 3)),
        "devices=2: 1234 tokens/s",
    ]


def test_a_long_run_shows_its_first_its_last_and_every_eighth_part(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run(Display(), 1000)
    numbers = [int(line.split("step ")[1].split("/")[0]) for line in shown(capsys) if " step " in line]
    assert numbers == [1, *range(125, 1001, 125)]


@pytest.mark.parametrize(
    "text",
    [
        "[red]devices[/red] [1, 2]",
        pytest.param("a :warning: b"),
        "x" * 300,
        "/data/[c4]/train",
        "1.5 GiB of 'x'",
    ],
)
def test_a_line_is_printed_as_it_is(capsys: pytest.CaptureFixture[str], text: str) -> None:
    Display().say(text)
    assert shown(capsys) == [text]
