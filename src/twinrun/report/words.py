"""Numbers and outcomes in words, the same on every surface."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from twinrun.benchmark import COPY, Ceiling
from twinrun.hardware import Gpu
from twinrun.record import BenchRecord, Outcome, Record, Spread, Verdict

GIB = 1 << 30

# In the order a reader wants to hear of them; the sign keeps the meaning out of the colour.
OUTCOMES: dict[Outcome, tuple[str, str]] = {
    "failed": ("!", "failed"),
    "not-reproduced": ("✗", "not reproduced"),
    "reproduced": ("✓", "reproduced"),
    "config-mismatch": ("≠", "not judged, because the run is not the published configuration"),
    "not-comparable": ("○", "not comparable with this run"),
}


def number(value: float) -> str:
    """Return four significant digits, thousands separated."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) >= 0.001 or value == 0 else f"{value:.2g}"


def quantity(value: float | None, unit: str, per: str) -> str:
    """Return a value of a claim with its unit and what it counts, a dash when there is none."""
    if value is None:
        return "-"
    if unit == "ratio":
        return f"{value:.3f}"
    if unit == "nats/token":
        # Claims about loss are invariants: their value is a distance between curves, not a loss.
        return f"{value:.2g} apart"
    return f"{number(value)} {unit} per {per}"


def plain(value: str | int | bool | tuple[str | int | bool, ...]) -> str:
    """Return a value of a configuration, thousands separated; of several, any of them."""
    if isinstance(value, tuple):
        return " or ".join(plain(one) for one in value)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def percent(share: float) -> str:
    """Return a share of one in percent."""
    return f"{share:.1%}"


def gib(count: int) -> str:
    """Return bytes in GiB."""
    return f"{count / GIB:.1f} GiB"


def mib(count: int) -> str:
    """Return bytes in MiB."""
    return f"{count / (1 << 20):,.1f} MiB"


def distance(error: float | None) -> str:
    """Return a relative distance, a dash where there is none or it is not finite."""
    return "-" if error is None else f"{error:.1e}"


def rate(ceiling: Ceiling) -> str:
    """Return what a device does at most, in billions or trillions a second."""
    what = "B" if ceiling.id == COPY else ""
    return f"{number(ceiling.rate / 1e12)} T{what}/s"


def ends(spread: Spread) -> str:
    """Return the lowest and highest of repeated measurements."""
    return f"{number(spread.low)} to {number(spread.high)}"


def within(spread: Spread) -> str:
    """Return how far the farthest measurement is from the median."""
    farthest = max(spread.high - spread.median, spread.median - spread.low)
    return f"±{farthest / spread.median:.1%}" if spread.median else "-"


def outcome(verdict: Verdict) -> str:
    """Return the outcome with its sign, in one or two words."""
    return f"{OUTCOMES[verdict.outcome][0]} {verdict.outcome.replace('-', ' ')}"


def headline(verdicts: Sequence[Verdict]) -> str:
    """Say in one or two sentences what became of the claims."""
    if not verdicts:
        return "No claim was judged."
    counts = Counter(verdict.outcome for verdict in verdicts)
    parts = [f"{counts[name]} {phrase}" for name, (_, phrase) in OUTCOMES.items() if counts[name]]
    return f"{_JUDGEMENTS[overall(verdicts)]} Of {_plural(len(verdicts), 'claim')}: {'; '.join(parts)}."


_JUDGEMENTS = {
    "failed": "The run failed.",
    "not-reproduced": "Not reproduced.",
    "reproduced": "Reproduced.",
    "reproduced-in-part": "Reproduced as far as this run can be compared.",
    "open": "Nothing of the publication can be judged from this run.",
}


def overall(verdicts: Sequence[Verdict]) -> str:
    """Return the worst outcome that decides; `open` when no claim was decided."""
    found = {verdict.outcome for verdict in verdicts}
    for name in ("failed", "not-reproduced"):
        if name in found:
            return name
    if "reproduced" not in found:
        return "open"
    return "reproduced" if len(found) == 1 else "reproduced-in-part"


def hardware(record: Record | BenchRecord) -> str:
    """Name what the largest point of the record ran on."""
    most = max((point.devices for point in record.points), default=0)
    if record.gpu is not None:
        return _gpus(most, record.gpu)
    if record.machine.devices:
        return f"{most} x {record.machine.devices[0].name}"
    return f"{_plural(most, 'rank')} on {record.machine.cpu}"


def _gpus(devices: int, gpu: Gpu) -> str:
    if gpu.devices_per_card == 1:
        return f"{devices} x {gpu.name}"
    return f"{_plural(devices, 'device')} of {gpu.name}, {gpu.devices_per_card} to a card"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
