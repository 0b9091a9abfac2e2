"""The sizes of a sweep as recipe and machine allow them, and what each needs, against what ran."""

from __future__ import annotations

from typing import Any

import pytest

from tests.records import PROJECT, TRAINING, plan
from twinrun.foundation.errors import InputError, MachineError
from twinrun.manifests.recipe import Sweep
from twinrun.protocol.allocation import Placement
from twinrun.workloads.sweep import placements
from twinrun.workloads.workload import Choice, Hardware

DEVICES, NODES = Sweep(devices="powers-of-two"), Sweep(nodes=(1, 2, 4), devices_per_node=8)
LISTED = Sweep(devices=(1, 2, 4))
GPUS = PROJECT.gpus


def sized(
    sweep: Sweep,
    asked: Any = (),
    *,
    devices: int,
    nodes: int | None = 1,
    node: int | None = None,
    gpu: str = "",
) -> tuple[list[Placement], tuple[Choice, ...]]:
    have = Hardware(gpu=GPUS.get(gpu), device_memory_bytes=None, devices=devices, cores=8, nodes=nodes)
    return placements(sweep, dict(asked), have, node)


def ids(*asked: Any, **keys: Any) -> list[str]:
    return [one.id for one in sized(*asked, **keys)[0]]


def test_a_machine_is_swept_up_to_all_it_has() -> None:
    assert ids(DEVICES, devices=8) == ["devices=1", "devices=2", "devices=4", "devices=8"]
    assert ids(DEVICES, devices=7) == ["devices=1", "devices=2", "devices=4"]
    assert ids(LISTED, devices=3) == ["devices=1", "devices=2"]
    assert ids(LISTED, devices=0) == ["devices=1", "devices=2", "devices=4"]
    with pytest.raises(MachineError, match="fewer devices"):
        ids(Sweep(devices=(2, 4)), devices=1)


def test_points_of_more_nodes_than_there_are_are_left_out_and_named() -> None:
    found, (choice,) = sized(NODES, devices=16, nodes=2, node=8)
    assert [one.id for one in found] == ["nodes=1", "nodes=2"]
    assert (choice.name, choice.value, choice.because) == ("left out", "nodes=4", "2 nodes can be had")
    assert ids(NODES, devices=0, nodes=None) == ["nodes=1", "nodes=2", "nodes=4"]
    with pytest.raises(MachineError, match="too few nodes"):
        ids(Sweep(nodes=(4, 8), devices_per_node=8), devices=16, nodes=2, node=8)


@pytest.mark.parametrize("asked", [{"nodes": "4,1"}, {"devices": [8, 32]}, {"cards": "4,16"}])
def test_a_point_is_asked_for_by_nodes_devices_or_cards(asked: dict[str, Any]) -> None:
    """Four MI250 are a node of eight devices."""
    found, _ = sized(NODES, asked, devices=32, nodes=4, node=8, gpu="mi250")
    assert [(one.id, one.nodes, one.devices_per_node) for one in found] == [
        ("nodes=1", 1, 8),
        ("nodes=4", 4, 8),
    ]
    at_devices, _ = sized(DEVICES, asked, devices=32, nodes=4, node=8, gpu="mi250")
    assert [one.world_size for one in at_devices] == [8, 32]


def test_a_part_of_a_node_and_a_smaller_node_are_points_as_well() -> None:
    assert ids(NODES, {"devices": "2,4"}, devices=32, nodes=4, node=8) == ["devices=2", "devices=4"]
    small, _ = sized(NODES, devices=16, nodes=4, node=4)
    assert [(one.nodes, one.devices_per_node) for one in small] == [(1, 4), (2, 4), (4, 4)]
    assert ids(DEVICES, {"devices": "4,1"}, devices=8) == ["devices=1", "devices=4"]
    with pytest.raises(InputError, match="each once"):
        ids(DEVICES, {"devices": "4,1,4"}, devices=8)


@pytest.mark.parametrize(
    ("sweep", "asked", "error", "match"),
    [
        (DEVICES, {"devices": "1,4"}, MachineError, "fewer devices"),
        (NODES, {"nodes": "4"}, MachineError, "fewer devices"),
        (NODES, {"devices": "12"}, MachineError, "fewer devices"),
        (DEVICES, {"devices": "1", "cards": "1"}, InputError, "sized by one key"),
        *(
            (DEVICES, {"devices": text}, InputError, "expected counts")
            for text in ("0", "a", "1,b", [], [1.5], True)
        ),
    ],
)
def test_what_cannot_be_had_is_refused(sweep: Sweep, asked: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        ids(sweep, asked, devices=2)
    with pytest.raises(InputError, match="no nodes to count"):
        ids(LISTED, {"nodes": "1"}, devices=0)
    with pytest.raises(InputError, match="do not fill the nodes"):
        ids(NODES, {"devices": "12"}, devices=32, nodes=4, node=8)


def test_sizes_that_do_not_divide_the_global_batch_are_left_out_and_refused_where_asked_for() -> None:
    swept = plan("recipes/mpt-throughput", scale="node", gpu="mi250", settings=(), devices=32)
    assert [point.world_size for point in swept.points] == [1, 2, 4, 8, 16]
    layouts = plan("recipes/deepspeed-pretrain", scale="smoke", gpu="mi250", settings=(), devices=32)
    assert [point.world_size for point in layouts.points if point.id in ("ddp", "pp2")] == [4, 8]
    with pytest.raises(InputError, match="does not divide over the devices"):
        plan(TRAINING, scale="smoke", gpu=None, settings=("devices=3", "global_batch=16"), devices=0)


def test_a_layout_that_needs_more_devices_than_there_are_is_left_out() -> None:
    made = plan("deepspeed-pretrain", scale="smoke", gpu="h200", devices=2)
    assert "tp2-pp2-dp2" not in {point.id for point in made.points}
    with pytest.raises(MachineError, match="no layout fits"):
        plan("deepspeed-pretrain", scale="smoke", gpu="h200", devices=2, settings=("layouts=tp2-pp2-dp2",))
