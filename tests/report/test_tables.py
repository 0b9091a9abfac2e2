from __future__ import annotations

from rich.console import Console, RenderableType

from tests.records import node_record, paper_record, smoke_record, with_losses
from twinrun.compare import compare
from twinrun.report.comparison import comparison_view
from twinrun.report.tables import choices_table, footnotes, points_table, verdict_table
from twinrun.selection import Choice


def rendered(view: RenderableType, *, width: int = 120) -> str:
    console = Console(width=width, no_color=True, highlight=False)
    with console.capture() as capture:
        console.print(view)
    return capture.get()


def test_choices_say_why() -> None:
    text = rendered(choices_table([Choice(name="scale", value="smoke", because="no GPU in use")]))
    assert "scale" in text
    assert "no GPU in use" in text


def test_a_point_has_all_its_numbers() -> None:
    text = rendered(points_table(node_record()))
    for expected in ("devices=1", "65,200", "±0.9%", "593.6", "60.0%", "93.0 GiB", "4.0873"):
        assert expected in text


def test_an_mfu_comes_with_its_formula_and_peak() -> None:
    text = rendered(points_table(node_record()), width=200)
    assert "MFU: model-flops/6N+12LDS over 989.5 TFLOP/s dense bf16 per device" in text


def test_without_an_mfu_it_is_said() -> None:
    assert "no dense peak is known" in rendered(points_table(smoke_record()))
    assert not any("over" in note for note in footnotes(smoke_record()))


def test_a_point_without_losses_is_shown() -> None:
    assert "devices=2" in rendered(points_table(with_losses(smoke_record(), (), ())))


def test_a_verdict_says_per_card_or_device() -> None:
    text = rendered(verdict_table(paper_record().verdicts))
    assert "166 TFLOP/s per card" in text
    assert "165.8 TFLOP/s per card" in text
    assert "✓ reproduced" in text


def test_what_was_not_measured_is_a_dash_with_a_reason() -> None:
    text = rendered(verdict_table(smoke_record().verdicts))
    assert "○ not comparable" in text
    assert "no GPU in images/gpus.toml" in " ".join(text.split())


def test_names_from_a_machine_are_not_markup() -> None:
    choice = Choice(name="gpu", value="[bold]GPU[/nonsense]", because="[red]seen")
    assert "[bold]GPU[/nonsense]" in rendered(choices_table([choice]))


def test_tables_fit_a_narrow_terminal() -> None:
    for view in (points_table(paper_record()), verdict_table(paper_record().verdicts)):
        assert max(len(line) for line in rendered(view, width=60).splitlines()) <= 60


def test_a_comparison_shows_both_sides_and_the_differences() -> None:
    text = rendered(
        comparison_view(compare(node_record(gpu="h100-80gb", rates={4: 50_000.0}), node_record()))
    )
    assert "50,000" in text
    assert "62,000" in text
    assert "1.240" in text
    assert "GPU model" in text
    assert "peak arithmetic" in text


def test_equal_records_differ_in_nothing() -> None:
    text = rendered(comparison_view(compare(smoke_record(), smoke_record())))
    assert "No recorded circumstance differs." in text
    assert "equal in all 40 steps" in " ".join(text.split())
