"""Reports: one HTML file each, without scripts or anything to fetch, that opens from disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from twinrun.circumstances import flat
from twinrun.claims import Claim, Published
from twinrun.errors import InputError
from twinrun.files import write_atomically
from twinrun.hardware import Gpu
from twinrun.recipe import LoadedRecipe, Recipe
from twinrun.record import Record, Verdict
from twinrun.report import losses, plots, series, words
from twinrun.report.svg import Picture
from twinrun.report.tables import footnotes


def write_report(path: Path, *, record: Record, recipe: LoadedRecipe, gpus: dict[str, Gpu]) -> None:
    """Write the report of one run.

    Args:
        record: as `read_record` or `execute` give it, with its verdicts.
        recipe: what it ran, which holds the published numbers.
        gpus: rows of images/gpus.toml, for the peaks of the published hardware.

    Raises:
        InputError: the record is of another recipe.
        MachineError: the file cannot be written.
    """
    _demand_recipe(record, recipe.recipe)
    pictures = [*_scaling([record], recipe.published, gpus), *_losses(record, recipe.published)]
    _write(path, "run.html.j2", recipe, gpus, record=record, pictures=pictures)


def write_recipe_report(
    path: Path, *, records: Sequence[Record], recipe: LoadedRecipe, gpus: dict[str, Gpu]
) -> None:
    """Write one page over all `records` of a recipe, newest first; raises as `write_report` does."""
    for record in records:
        _demand_recipe(record, recipe.recipe)
    newest = sorted(records, key=lambda record: record.created, reverse=True)
    pictures = _scaling(newest, recipe.published, gpus) if newest else []
    _write(path, "recipe.html.j2", recipe, gpus, records=newest, pictures=pictures)


def claims_of(verdicts: Sequence[Verdict], published: Published) -> list[tuple[Verdict, Claim | None]]:
    """Pair each verdict with its claim, None where the recipe has dropped the claim since."""
    claims = {claim.id: claim for claim in published.claim}
    return [(verdict, claims.get(verdict.claim)) for verdict in verdicts]


def same(values: Sequence[str]) -> str:
    """Return the distinct `values`, which most often is one."""
    return ", ".join(dict.fromkeys(values)) or "-"


def counted(values: Sequence[str]) -> str:
    """Return the distinct `values`, each with how often it occurs."""
    return ", ".join(f"{count} x {value}" for value, count in Counter(values).items())


def _scaling(records: Sequence[Record], published: Published, gpus: dict[str, Gpu]) -> list[Picture]:
    charts = {
        "throughput": ("Throughput of one device", series.throughput(records, published, gpus)),
        "efficiency": ("What scaling keeps of it", series.efficiency(records, published, gpus)),
    }
    return [
        plots.scaling(chart, name=name, title=title)
        for name, (title, chart) in charts.items()
        if any(one.spots for one in chart.series)
    ]


def _losses(record: Record, published: Published) -> Iterator[Picture]:
    if any(point.losses for point in record.points):
        yield losses.curves(record, name="loss", title="Loss at every point")
    allowed = [claim.tolerance for claim in published.claim if claim.kind == "invariant"]
    if len(record.points) > 1 and allowed:
        title = "How far the losses are apart"
        picture = losses.distances(record, tolerance=min(allowed), name="distance", title=title)
        yield from (picture,) if picture else ()


def _demand_recipe(record: Record, recipe: Recipe) -> None:
    if record.plan.recipe != recipe.name:
        raise InputError(
            "the record is of another recipe",
            place=record.run,
            found=record.plan.recipe,
            allowed=recipe.name,
            hint=f"write its report with recipes/{record.plan.recipe}",
        )


def _write(path: Path, template: str, loaded: LoadedRecipe, gpus: dict[str, Gpu], **context: Any) -> None:
    names = {"recipe": loaded.recipe, "published": loaded.published, "gpus": gpus}
    write_atomically(path, _environment().get_template(template).render(names | context))


def _environment() -> Environment:
    # Names of devices and hosts come from elsewhere: everything is escaped, pictures excepted.
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    from_words = (words.number, words.quantity, words.percent, words.plain, words.gib, words.ends)
    from_records = (words.outcome, words.headline, words.overall, words.hardware, claims_of, footnotes)
    for function in (*from_words, *from_records, same, counted, flat):
        environment.filters[function.__name__] = function
    return environment
