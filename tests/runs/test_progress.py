from __future__ import annotations

import pytest

from twinrun.runs.run import Display
from twinrun.workloads.workload import Progress


@pytest.mark.parametrize(
    ("steps", "shown"), [(3, [1, 2, 3]), (1000, [1, *range(125, 1001, 125)])], ids=["short", "long"]
)
def test_elsewhere_than_on_a_terminal_there_are_plain_lines(
    steps: int, shown: list[int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # What makes rich take a file for a terminal.
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    with Display() as display:
        display.begin("devices=2", steps=steps, status="microbatch 4")
        for number in range(1, steps + 1):
            display.step("devices=2", Progress(done=number, status="loss 2.5000  0.250 s/step"))
        display.end("devices=2", status="1234 tokens/s")
        for text in ("[red]devices[/red] [1, 2]", "a :warning: b", "x" * 300, "/data/[c4]/train"):
            display.say(text)
    captured = capsys.readouterr()
    # stdout carries data.
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "devices=2: microbatch 4",
        *(f"devices=2: step {number}/{steps}  loss 2.5000  0.250 s/step" for number in shown),
        "devices=2: 1234 tokens/s",
        *("[red]devices[/red] [1, 2]", "a :warning: b", "x" * 300, "/data/[c4]/train"),
    ]
