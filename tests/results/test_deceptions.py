"""Records altered in several places, with all that follows computed again: none of their claims holds."""

from __future__ import annotations

import copy
import datetime
import hashlib
import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.leaves import HOLDS, committed_file, finals, sealed
from tests.records import PROJECT
from tests.results.test_leaves import RECORDS
from twinrun.foundation.errors import InputError
from twinrun.results.reading import read_content
from twinrun.results.record import Record
from twinrun.workloads import load_workload
from twinrun.workloads.workload import PointRecord

Content = Any


def followed(content: Content) -> Content:
    """Return a file whose derived numbers follow from its measured ones, and that is sealed."""
    workload = load_workload(content["plan"]["workload"])
    part = workload.read_plan(content["plan"]["part"])
    gpu = PROJECT.gpus[content["plan"]["gpu"]] if content["plan"]["gpu"] else None
    for point in content["points"]:
        basis = [one for one in point["measurements"] if workload.account.measures(one["id"], one["metric"])]
        bare = PointRecord.model_validate_json(json.dumps({**point, "measurements": basis}))
        (typed,) = workload.read_points((bare,))
        derived = workload.derived(part, typed, gpu)
        computed = {one.id for one in derived}
        kept = [one for one in point["measurements"] if one["id"] not in computed]
        point["measurements"] = [*kept, *(one.model_dump(mode="json") for one in derived)]
    return sealed(content)


def measured(content: Content, name: str, point: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in content["points"][point]["measurements"] if one["id"] == name)
    return found


def times(content: Content, factor: float, *names: str) -> None:
    for point in content["points"]:
        for one in point["measurements"]:
            if one["id"] in names or one["metric"] in names:
                one |= {key: one[key] * factor for key in ("median", "low", "high")}


def losses(content: Content, change: Callable[[list[float]], list[float]]) -> None:
    for point in content["points"]:
        for one in point["series"]:
            one["values"] = change(one["values"])


def zero_at_the_last_point(content: Content) -> None:
    values = content["points"][-1]["series"][0]["values"]
    values[len(values) // 2] = 0.0


def wrong_result(content: Content) -> None:
    point = content["points"][0]
    for one in point["measurements"]:
        if one["metric"] == "error":
            one.update(dict.fromkeys(("median", "low", "high"), 0.9))
    for name in point["facts"]:
        if " errors of " in name:
            point["facts"][name] = "out 0.9"


def wrong_result_and_allowance(content: Content) -> None:
    wrong_result(content)
    for name in content["points"][0]["facts"]:
        if name.endswith(" allowed error"):
            content["points"][0]["facts"][name] = 1.0


def wrong_baselines(content: Content) -> None:
    point = content["points"][0]
    for one in point["measurements"]:
        name, _, baseline = one["id"].partition("/error@")
        if baseline:
            one.update(dict.fromkeys(("median", "low", "high"), 0.9))
            point["facts"][f"{name} errors of {baseline}"] = "out 0.9"


def unequal_devices(content: Content) -> None:
    for one in content["points"][-1]["measurements"]:
        if one["metric"] == "peak-rate":
            one |= {key: one[key] * 0.8 for key in ("median", "low", "high")}


def no_error(content: Content) -> None:
    point = content["points"][0]
    point["measurements"] = [one for one in point["measurements"] if one["metric"] != "error"]


def not_finite(content: Content) -> None:
    no_error(content)
    for name in content["points"][0]["facts"]:
        if " errors of " in name:
            content["points"][0]["facts"][name] = "out not finite"


def doubled_work(content: Content) -> None:
    for name, value in content["points"][0]["facts"].items():
        if " work " in name and isinstance(value, float):
            content["points"][0]["facts"][name] = 2 * value


def planted(content: Content) -> None:
    for point in content["points"]:
        point["measurements"].insert(
            0,
            measured(content, "model-flops-share") | {"id": "power", "median": 0.6, "low": 0.6, "high": 0.6},
        )


def planted_control(content: Content) -> None:
    for point in content["points"]:
        (loss,) = point["series"]
        control = copy.deepcopy(loss) | {"id": "control-1"}
        loss["values"] = [*loss["values"][:-1], 1e5]
        point["series"] = [control, loss]


def other_names(content: Content) -> None:
    for point in content["points"]:
        point["facts"]["device name"] = "AMD Instinct MI300X"


def other_names_everywhere(content: Content) -> None:
    other_names(content)
    for report in content["allocation"]["reports"].values():
        report["devices"] = ["AMD Instinct MI300X"] * len(report["devices"])
    for device in content["machine"]["devices"]:
        device["name"] = "AMD Instinct MI300X"


def one_gpu_twice(content: Content) -> None:
    for device in content["machine"]["devices"]:
        device["unique_id"] = "GPU-0"


def renamed_hardware(content: Content) -> None:
    """Call a record one of another GPU, wherever it says which."""
    row = PROJECT.gpus["mi300x"]
    content["gpu"] = row.model_dump(mode="json")
    content["plan"] |= {
        "gpu": row.id,
        "vendor": row.vendor,
        "stack": "rocm7.1-torch2.10",
        "image": "twinrun/rocm7.1-torch2.10:0123456789ab",
    }
    content["machine"]["vendor"] = row.vendor
    content["environment"]["libraries"]["torch"] = "2.10.0"
    for device in content["machine"]["devices"]:
        device |= {"gpu": row.id, "arch": row.arch, "memory_bytes": row.device_memory_bytes}


def many_nodes(content: Content) -> None:
    point = content["points"][0]
    for one in (point, content["plan"]["points"][0]):
        one["nodes"] = 32
    point["devices"] = 32 * content["plan"]["points"][0]["devices_per_node"]


def renamed_points(content: Content) -> None:
    for one in (*content["plan"]["points"], *content["points"]):
        one["id"] = {"devices=1": "nodes=1", "devices=2": "nodes=32"}.get(one["id"], one["id"])


def splits_nothing(content: Content) -> None:
    for point in content["points"]:
        if point["id"].startswith("zero"):
            point["facts"]["first rank's data ranks"] = 1


def other_stage(content: Content) -> None:
    for one in (*content["plan"]["points"], *content["points"]):
        if one["id"] == "zero-3":
            one["part"]["layout"]["zero"] = 1
    content["points"][-1]["facts"]["parallelism"] = "ZeRO-1"


def without_a_layout(content: Content) -> None:
    del content["points"][-1]


def unjoined(content: Content) -> None:
    leg = next(one for one in content["points"] if one["id"] == "leg=2")
    leg["series"][0]["values"][3] *= 0.9


def few_documents(content: Content) -> None:
    for name in content["points"][0]["facts"]:
        if name.startswith("documents of "):
            content["points"][0]["facts"][name] = 3


def converted(content: Content) -> None:
    content["converted_from"] = {"schema_version": 1, "sha256": "0" * 64}


def other_torch(content: Content) -> None:
    content["environment"]["libraries"]["torch"] = "2.4.1"


def without_orders(content: Content) -> None:
    for point in content["points"]:
        del point["facts"]["order hash"]


def point_again(content: Content) -> None:
    """Plan and measure a point a second time, under another name for its size."""
    for points in (content["plan"]["points"], content["points"]):
        points.append(copy.deepcopy(points[0]) | {"id": f"nodes={points[0]['nodes']}"})


def copied_numbers(content: Content) -> None:
    first, last = content["points"]
    last |= {key: copy.deepcopy(first[key]) for key in ("measurements", "series")}


def other_python(content: Content) -> None:
    content["environment"]["python"] = content["environment"]["libraries"]["python"] = "2.7"


def swapped_names(content: Content) -> None:
    first, last = (content["points"][number]["id"] for number in (0, -1))
    for one in (*content["plan"]["points"], *content["points"]):
        one["id"] = {first: last, last: first}.get(one["id"], one["id"])


def other_microbatch(content: Content) -> None:
    for point in (*content["plan"]["points"], *content["points"]):
        point["part"]["microbatches"] = [7]
    for point in content["points"]:
        point["facts"]["microbatch"] = 7


def other_sharding(content: Content) -> None:
    for point in (*content["plan"]["points"], *content["points"]):
        point["part"]["sharding"] = "none"
    for point in content["points"]:
        point["facts"]["parallelism"] = "ddp"


def too_much_memory_at_the_last_point(content: Content) -> None:
    for key in ("median", "low", "high"):
        measured(content, "peak-memory", -1)[key] *= 80


def too_short(content: Content) -> None:
    """End the run when its timed steps alone had passed."""
    content["created"] = _after(content, sum(one["low"] * one["count"] for one in _step_times(content)) + 0.1)


def _step_times(content: Content) -> list[Any]:
    return [one for point in content["points"] for one in point["measurements"] if one["id"] == "step-time"]


def _after(content: Content, seconds: float) -> str:
    began = datetime.datetime.strptime(f"{content['run'][:15]}+0000", "%Y%m%d-%H%M%S%z")
    return (began + datetime.timedelta(seconds=seconds)).isoformat()


def unplanned_number(content: Content) -> None:
    one = measured(content, "peak-memory") | {"id": "validation-loss@7", "metric": "validation-loss"}
    content["points"][0]["measurements"].append(one | {"unit": "nats/token", "per": "run"})


def formula_of_another_algorithm(content: Content) -> None:
    for point in content["points"]:
        for name, value in point["facts"].items():
            if value == "link-bytes/root":
                point["facts"][name] = "link-bytes/ring"


def digest_of_nothing(content: Content) -> None:
    for point in content["points"]:
        point["facts"]["order hash"] = hashlib.sha256(b"").hexdigest()


def passed_with_a_fault(content: Content) -> None:
    content["points"][0]["checks"][0] |= {"outcome": "pass", "nodes": ["node-0"]}


def torch_of_another_vendor(content: Content) -> None:
    version = content["environment"]["libraries"]["torch"].partition("+")[0]
    content["environment"]["libraries"]["torch"] = f"{version}+rocm6.3"


DECEPTIONS: dict[str, tuple[str, Callable[[Content], None]]] = {
    "an error of 0.9": ("kernels", wrong_result),
    "an error of 0.9 that the record allows": ("kernels", wrong_result_and_allowance),
    "baselines with an error of 0.9": ("kernels", wrong_baselines),
    "no error": ("kernels", no_error),
    "an error that is not finite": ("kernels", not_finite),
    "twice the work": ("kernels", doubled_work),
    "peak rates of a ninetieth": ("kernels", lambda one: times(one, 1 / 90, "peak-rate")),
    "a peak rate of four fifths at one point": ("cases", unequal_devices),
    "peak rates of a third": ("kernels", lambda one: times(one, 0.33, "peak-rate")),
    "calls in a hundredth of the time": ("kernels", lambda one: times(one, 0.01, "time")),
    "5,000 GiB": ("sweep", lambda one: times(one, 80.0, "peak-memory")),
    "50 kW": ("power", lambda one: times(one, 100.0, "power")),
    "steps in a tenth of the time": ("sweep", lambda one: times(one, 0.1, "step-time")),
    "a planted share": ("sweep", planted),
    "a planted control run": ("sweep", planted_control),
    "no losses": ("sweep", lambda one: [point.update(series=[]) for point in one["points"]]),  # type: ignore[dict-item]
    "three steps": ("sweep", lambda one: losses(one, lambda values: values[:3])),
    "negative losses": ("sweep", lambda one: losses(one, lambda values: [*values[:-1], -1.0])),
    "nothing from step 2": ("sweep", lambda one: losses(one, lambda values: [values[0], *[0.0] * 24])),
    "a spike": ("sweep", lambda one: losses(one, lambda values: [*values[:20], 1e6, *values[21:]])),
    "a plateau at 9": (
        "legs",
        lambda one: losses(one, lambda values: [*values[:50], *[9.0] * len(values[50:])]),
    ),
    "one loss at half of the steps": (
        "sweep",
        lambda one: losses(one, lambda values: [*values[:12], *[values[12]] * len(values[12:])]),
    ),
    "losses of 0 at another point": ("layouts", zero_at_the_last_point),
    "no order": ("sweep", without_orders),
    "other names of devices": ("sweep", other_names),
    "other names everywhere": ("sweep", other_names_everywhere),
    "one GPU twice": ("sweep", one_gpu_twice),
    "another vendor's GPU": ("sweep", renamed_hardware),
    "an empty machine": ("sweep", lambda one: one["machine"].update(devices=[])),
    "no allocation": ("sweep", lambda one: one.update(allocation=None)),
    "32 nodes on one host": ("power", many_nodes),
    "other names of points": ("sweep", renamed_points),
    "ZeRO that splits nothing": ("layouts", splits_nothing),
    "ZeRO-3 that ran ZeRO-1": ("layouts", other_stage),
    "a layout that failed": ("layouts", without_a_layout),
    "legs that do not join": ("legs", unjoined),
    "three documents": ("evaluation", few_documents),
    "an error of scores": ("evaluation", lambda one: times(one, 3.0, "score-error")),
    "another PyTorch": ("sweep", other_torch),
    "converted": ("sweep", converted),
    "a point twice": ("sweep", point_again),
    "numbers of one point at two": ("sweep", copied_numbers),
    "another Python": ("sweep", other_python),
    "names of points swapped": ("legs", swapped_names),
    "a microbatch that divides nothing": ("sweep", other_microbatch),
    "points sharded otherwise than the plan": ("sweep", other_sharding),
    "5,000 GiB at the last point": ("sweep", too_much_memory_at_the_last_point),
    "a run as long as its timed steps": ("sweep", too_short),
    "a number that nobody planned": ("sweep", unplanned_number),
    "the formula of another algorithm": ("ring", formula_of_another_algorithm),
    "the digest of nothing": ("sweep", digest_of_nothing),
    "a pass with nodes at fault": ("checks", passed_with_a_fault),
    "a check that ended before it began": (
        "checks",
        lambda one: one["points"][0]["checks"][0].update(seconds=-5.0),
    ),
    "a PyTorch of another vendor": ("sweep", torch_of_another_vendor),
    "no points at all": (
        "kernels",
        lambda one: [one["points"].clear(), one["plan"]["points"].clear()],  # type: ignore[dict-item]
    ),
    "another recipe": ("kernels", lambda one: one["plan"].update(recipe="mpt-throughput")),
    "losses longer than control runs": ("layouts", lambda one: losses(one, lambda values: [*values, 2.0])),
    "a training of scored weights beyond the peak": (
        "evaluation",
        lambda one: times(one, 1e-6, "step-time"),
    ),
    "a score beyond 1": ("evaluation", lambda one: times(one, 9.0, "score")),
}


WHOLE: dict[str, Callable[[], Content]] = {
    **RECORDS,
    "cases": lambda: committed_file("mamba-kernels", "h100-80gbx1_cuda13.0-torch2.11_2026-11-26"),
}


def read(content: Content) -> Record | None:
    try:
        return read_content(followed(content), PROJECT, place="deceiving")
    except InputError:
        return None


@pytest.mark.parametrize("name", DECEPTIONS)
def test_no_claim_of_a_deceiving_record_holds(name: str) -> None:
    of, deceive = DECEPTIONS[name]
    content = WHOLE[of]()
    honest = read(copy.deepcopy(content))
    assert honest is not None
    deceive(content)
    found = read(content)
    held = [] if found is None else [claim for claim, one in finals(found).items() if one in HOLDS]
    assert not held, held


@pytest.mark.parametrize("name", ["sweep", "kernels", "layouts", "legs", "evaluation"])
def test_the_honest_record_holds_something(name: str) -> None:
    record = read(RECORDS[name]())
    assert record is not None
    assert set(finals(record).values()) & set(HOLDS)
