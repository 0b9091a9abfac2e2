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
from twinrun.job import BenchPlan
from twinrun.recipe import AnyRecipe, LoadedBench, LoadedRecipe
from twinrun.record import BenchRecord, CaseRecord, Record, Verdict
from twinrun.report import bars, losses, plots, roofline, series, words
from twinrun.report.svg import Picture
from twinrun.report.tables import bench_footnotes, footnotes


def write_report(
    path: Path, *, record: Record | BenchRecord, recipe: LoadedRecipe | LoadedBench, gpus: dict[str, Gpu]
) -> None:
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
    if isinstance(record, BenchRecord):
        pictures = _bench_pictures([record], recipe.published, gpus)
    else:
        pictures = [*_scaling([record], recipe.published, gpus), *_losses(record, recipe.published)]
    _write(path, "run.html.j2", recipe, gpus, record=record, pictures=pictures)


def write_recipe_report(
    path: Path,
    *,
    records: Sequence[Record | BenchRecord],
    recipe: LoadedRecipe | LoadedBench,
    gpus: dict[str, Gpu],
) -> None:
    """Write one page over all `records` of a recipe, newest first; raises as `write_report` does."""
    for record in records:
        _demand_recipe(record, recipe.recipe)
    newest = sorted(records, key=lambda record: record.created, reverse=True)
    sweeps = [record for record in newest if isinstance(record, Record)]
    benches = [record for record in newest if isinstance(record, BenchRecord)]
    pictures = _scaling(sweeps, recipe.published, gpus) if sweeps else []
    pictures += _bench_pictures(_newest_of_each(benches), recipe.published, gpus)
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


def is_bench(record: Record | BenchRecord) -> bool:
    """Say which kind of record this is."""
    return isinstance(record, BenchRecord)


def subject(record: Record | BenchRecord) -> tuple[str, str]:
    """Return what a record is of, and how it was run."""
    plan = record.plan
    if isinstance(plan, BenchPlan):
        timed = f"median of {plan.bench.repeats}" if plan.bench.repeats else "checked, not timed"
        return f"{len(plan.points)} cases", f"{timed}, scale {plan.scale}"
    training = plan.training
    return training.model, f"{training.precision}, {training.trainer}, scale {plan.scale}"


def result(record: Record | BenchRecord) -> tuple[str, str]:
    """Return the number that stands for a record, and what it is a number of."""
    if isinstance(record, BenchRecord):
        return _bench_result(record)
    if not record.points:
        return "nothing", "no point was measured"
    point = max(record.points, key=lambda one: one.devices)
    share, rate = point.utilisation, point.model_flops.rate
    tokens = f"{words.number(point.tokens_per_second.median)} tokens/s per device"
    value = f"{words.percent(share.value)} MFU" if share else tokens
    return value, f"{words.number(rate.median)} model {rate.unit} per {rate.per}, {point.id}"


def _bench_result(record: BenchRecord) -> tuple[str, str]:
    measured = [one for case in record.points for one in case.measurements]
    ratios = [one.ratio for one in measured if one.ratio]
    if not ratios:
        return f"{len(measured)} checked", "against float64; nothing beside it was timed"
    ends = f"{min(ratios):.2f} to {max(ratios):.2f} times as fast"
    return ends, f"as the baseline, {len(ratios)} measurements of {len(record.points)} cases"


def configuration(record: Record | BenchRecord) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return groups of what was asked for, each with its names and values."""
    plan = record.plan
    if isinstance(plan, BenchPlan):
        asked = list(flat(plan.bench).items())
        seeds = [(one.id, str(one.seed)) for one in record.points if isinstance(one, CaseRecord)]
        return [("Benchmark", asked), ("Seeds of the random inputs", seeds)]
    return [("Training", list(flat(plan.training).items())), ("Model", list(flat(plan.shape).items()))]


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


def _bench_pictures(
    records: Sequence[BenchRecord], published: Published, gpus: dict[str, Gpu]
) -> list[Picture]:
    roofs = (roofline.roofline(record, name=f"roofline-{place}") for place, record in enumerate(records))
    return [*bars.operation_bars(records, published, gpus), *(roof for roof in roofs if roof)]


def _newest_of_each(records: Sequence[BenchRecord]) -> list[BenchRecord]:
    """Return the first record of each scale and hardware, so that its bars stand there once."""
    return list({(words.hardware(one), one.plan.scale): one for one in reversed(records)}.values())[::-1]


def _demand_recipe(record: Record | BenchRecord, recipe: AnyRecipe) -> None:
    if record.plan.recipe != recipe.name:
        raise InputError(
            "the record is of another recipe",
            place=record.run,
            found=record.plan.recipe,
            allowed=recipe.name,
            hint=f"write its report with recipes/{record.plan.recipe}",
        )


def _write(
    path: Path, template: str, loaded: LoadedRecipe | LoadedBench, gpus: dict[str, Gpu], **context: Any
) -> None:
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
    of_sizes = (words.number, words.quantity, words.percent, words.plain, words.gib, words.mib)
    of_measurements = (words.ends, words.distance, words.rate)
    from_records = (words.outcome, words.headline, words.overall, words.hardware, claims_of, footnotes)
    of_either = (subject, result, configuration, is_bench, bench_footnotes)
    for function in (*of_sizes, *of_measurements, *from_records, *of_either, same, counted, flat):
        environment.filters[function.__name__] = function
    return environment
