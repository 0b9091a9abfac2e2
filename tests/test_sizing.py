from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.records import RECIPE, ROOT, gpus, loaded_recipe
from twinrun.errors import InputError, MachineError
from twinrun.manifest import validate
from twinrun.recipe import Sweep
from twinrun.record import Record, read_record
from twinrun.sizing import ESTIMATE_SLACK, MAX_ATTEMPTS, Budget, counts, points
from twinrun.training import Training

RESULTS = sorted((ROOT / "recipes" / RECIPE / "results").glob("*.json"))
NODES = Sweep(nodes=(1, 2, 32), devices_per_node=8)
ALL = Sweep(devices="powers-of-two")


def budget(model: str = "mpt-1b", *, memory: int | None = None, **changes: object) -> Budget:
    training = loaded_recipe().recipe.training.model_copy(
        update={"model": model, "activation_checkpointing": False, **changes}
    )
    shape = loaded_recipe().recipe.models[model]
    return Budget(shape=shape, training=training, device_memory_bytes=memory)


def h200() -> int:
    return gpus()["h200"].device_memory_bytes


@given(batch=st.integers(1, 2000), world=st.sampled_from([1, 2, 3, 8]), memory=st.integers(10**9, 10**12))
def test_what_is_tried_divides_falls_and_fits(batch: int, world: int, memory: int) -> None:
    one = budget("mpt-125m", memory=memory, global_batch=batch * world)
    tried = one.microbatches(world)
    assert list(tried) == sorted(set(tried), reverse=True)
    assert len(tried) <= MAX_ATTEMPTS
    assert all(batch % size == 0 for size in tried)
    assert all(one.needed(microbatch=size, world=world) <= ESTIMATE_SLACK * memory for size in tried)
    larger = [size for size in range(1, batch + 1) if batch % size == 0 and size > max(tried, default=0)]
    assert all(one.needed(microbatch=size, world=world) > ESTIMATE_SLACK * memory for size in larger)


def test_without_known_memory_the_whole_batch_is_taken() -> None:
    assert budget(global_batch=48).microbatches(2) == (24,)


def test_a_named_microbatch_is_the_only_one_tried() -> None:
    assert budget(global_batch=48, microbatch=8, memory=1).microbatches(2) == (8,)


@pytest.mark.parametrize("microbatch", [5, 48])
def test_a_microbatch_that_does_not_divide_is_refused(microbatch: int) -> None:
    with pytest.raises(InputError, match="--set microbatch") as caught:
        budget(global_batch=48, microbatch=microbatch).microbatches(2)
    assert caught.value.allowed == (24, 12, 8, 6, 4, 3, 2, 1)


def test_sharding_is_what_makes_a_large_model_fit() -> None:
    assert not budget("mpt-13b", memory=h200(), global_batch=192).fits(1)
    assert budget("mpt-13b", memory=h200(), global_batch=192).fits(4)
    assert not budget("mpt-13b", memory=h200(), global_batch=192, sharding="none").fits(4)


def test_a_batch_that_does_not_divide_does_not_fit() -> None:
    assert not budget("mpt-125m", memory=h200(), global_batch=192).fits(5)


def composer_results() -> list[Record]:
    records = [read_record(path) for path in RESULTS]
    return [record for record in records if record.plan.training.trainer == "composer" and record.gpu]


def test_there_are_peaks_to_hold_the_estimate_against() -> None:
    assert sum(len(record.points) for record in composer_results()) >= 5


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_the_estimate_is_near_the_peaks_measured_on_an_h200(path: Path) -> None:
    record = read_record(path)
    plan = record.plan
    one = Budget(
        shape=plan.shape, training=plan.training, device_memory_bytes=record.machine.devices[0].memory_bytes
    )
    for point in record.points:
        estimate = one.needed(microbatch=point.microbatch, world=point.devices)
        # Below by more than the slack would try sizes in vain.
        assert 0.95 <= estimate / point.peak_memory_bytes <= 1.04, point.id
        # What was found to fit must be among the sizes that would be tried again.
        again = one.model_copy(update={"training": _auto(plan.training)})
        assert point.microbatch in again.microbatches(point.devices)


def _auto(training: Training) -> Training:
    return training.model_copy(update={"microbatch": "auto"})


@pytest.mark.parametrize(
    ("requested", "found"),
    [(None, (1, 2, 4)), (4, (4,)), ("1,4", (1, 4)), ([4, 1, 1], (1, 4)), ("3", (3,)), (" 1 , 2 ", (1, 2))],
)
def test_devices_are_counts_in_order(requested: object, found: tuple[int, ...]) -> None:
    assert counts(ALL, requested=requested, devices=6) == found


@pytest.mark.parametrize(
    "requested", ["", "a", "1,,2", 0, -1, [0, 1], True, 1.5, [], {"a": 1}, [[1]], float("nan")]
)
def test_what_is_no_count_is_refused(requested: object) -> None:
    with pytest.raises(InputError, match="--set devices: expected counts of devices"):
        counts(ALL, requested=requested, devices=4)


@pytest.mark.parametrize("requested", [[1.5], [True], [float("inf")]])
def test_a_list_holds_whole_numbers_only(requested: list[object]) -> None:
    with pytest.raises(InputError, match="--set devices: expected counts of devices"):
        counts(ALL, requested=requested, devices=4)


def test_more_devices_than_there_are_is_refused() -> None:
    with pytest.raises(MachineError, match="fewer devices") as caught:
        counts(ALL, requested="2,8", devices=4)
    assert caught.value.allowed == "1 to 4"


def test_a_cpu_runs_any_number_of_ranks_but_sweeps_none_by_itself() -> None:
    assert counts(ALL, requested="1,8", devices=0) == (1, 8)
    with pytest.raises(MachineError, match="no GPU in use"):
        counts(ALL, requested=None, devices=0)


@pytest.mark.parametrize(("devices", "found"), [(0, (1, 2)), (1, (1,)), (8, (1, 2))])
def test_a_named_sweep_stops_at_what_the_machine_has(devices: int, found: tuple[int, ...]) -> None:
    assert counts(Sweep(devices=(1, 2)), requested=None, devices=devices) == found


@given(devices=st.integers(1, 5000))
def test_powers_of_two_up_to_all_there_are(devices: int) -> None:
    found = counts(ALL, requested=None, devices=devices)
    assert found == tuple(2**power for power in range(len(found)))
    assert found[-1] <= devices < 2 * found[-1]


def test_nodes_do_not_depend_on_this_machine() -> None:
    assert counts(NODES, requested=None, devices=1) == (1, 2, 32)
    with pytest.raises(InputError, match="this scale counts nodes"):
        counts(NODES, requested="1,2", devices=8)


def test_points_of_nodes_have_all_their_devices() -> None:
    made = points(NODES, (1, 2, 32), budget("mpt-7b", memory=64 * 10**9))
    assert [point.id for point in made] == ["nodes=1", "nodes=2", "nodes=32"]
    assert [(point.nodes, point.devices_per_node, point.world_size) for point in made] == [
        (1, 8, 8),
        (2, 8, 16),
        (32, 8, 256),
    ]
    assert {point.sharding for point in made} == {"full"}


def test_a_device_alone_shards_nothing_but_in_a_sweep_it_runs_the_same_program() -> None:
    assert [point.sharding for point in points(ALL, (1,), budget(memory=h200()))] == ["none"]
    assert [point.sharding for point in points(ALL, (1, 2), budget(memory=h200()))] == ["full", "full"]


def test_points_that_do_not_fit_are_left_out() -> None:
    made = points(ALL, (1, 2, 4), budget("mpt-13b", memory=h200(), global_batch=192))
    assert [point.id for point in made] == ["devices=2", "devices=4"]


def test_a_model_that_fits_nowhere_is_told_with_its_size() -> None:
    with pytest.raises(MachineError, match=r"mpt-70b does not fit into 4 device\(s\)") as caught:
        points(ALL, (1, 2, 4), budget("mpt-70b", memory=h200(), global_batch=192))
    assert str(caught.value.found).startswith("2")
    assert caught.value.allowed == "131 GiB"


def test_a_batch_that_does_not_divide_is_told_with_what_would() -> None:
    with pytest.raises(InputError, match="--set global_batch") as caught:
        points(ALL, (1, 3), budget(memory=h200(), global_batch=64))
    assert (caught.value.found, caught.value.allowed) == (64, "a multiple of 3")


def test_a_sweep_larger_than_the_machine_is_refused() -> None:
    with pytest.raises(MachineError):
        counts(Sweep(devices=(2, 4)), requested=None, devices=1)


@pytest.mark.parametrize(
    "table", [{}, {"devices": [1], "nodes": [1]}, {"devices": []}, {"devices_per_node": 8}]
)
def test_a_sweep_says_exactly_one_thing(table: dict[str, object]) -> None:
    with pytest.raises(InputError, match="sweep"):
        validate(table, Sweep, place="sweep")
