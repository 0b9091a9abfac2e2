"""Ranks beside their devices, on a node laid out as LUMI's documentation draws it."""

from __future__ import annotations

from pathlib import Path

import pytest

from twinrun.protocol.allocation import Binding
from twinrun.train.node import bind, parse_cpu_list

# The pairs of the LUMI AI guide: a device, its memory node, and the cores that jobs may use beside it.
NEAR = {0: "49-55", 1: "57-63", 2: "17-23", 3: "25-31", 4: "1-7", 5: "9-15", 6: "33-39", 7: "41-47"}
NODE_OF = {0: 3, 1: 3, 2: 1, 3: 1, 4: 0, 5: 0, 6: 2, 7: 2}
# One core of each eight belongs to the system.
ALLOWED = {number for number in range(64) if number % 8}


def address(device: int) -> str:
    return f"0000:{0xC1 + device:02x}:00.0"


def node(sysfs: Path, *, threads: int = 1) -> Path:
    """Lay out a node of eight devices on four memory nodes; a second thread of core N is called N + 64."""
    for device, numa in NODE_OF.items():
        folder = sysfs / "bus" / "pci" / "devices" / address(device)
        folder.mkdir(parents=True)
        lists = [f"{16 * numa + 64 * thread}-{16 * numa + 15 + 64 * thread}" for thread in range(threads)]
        (folder / "numa_node").write_text(f"{numa}\n", encoding="ascii")
        (folder / "local_cpulist").write_text(",".join(lists) + "\n", encoding="ascii")
    for number in range(64 * threads):
        topology = sysfs / "devices" / "system" / "cpu" / f"cpu{number}" / "topology"
        topology.mkdir(parents=True)
        siblings = ",".join(str(number % 64 + 64 * thread) for thread in range(threads))
        (topology / "thread_siblings_list").write_text(f"{siblings}\n", encoding="ascii")
    return sysfs


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """What a rank binds itself to; it may use ALLOWED."""
    made: list[set[int]] = []
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(ALLOWED))
    monkeypatch.setattr("os.sched_setaffinity", lambda _pid, cores: made.append(set(cores)))
    return made


@pytest.mark.parametrize("local", range(8))
def test_every_rank_of_a_lumi_node_has_the_cores_of_the_guide(
    tmp_path: Path, chosen: list[set[int]], local: int
) -> None:
    found = bind(local, 8, address_of=address, sysfs=node(tmp_path))
    assert found == Binding(address=address(local), numa_node=NODE_OF[local], cores=NEAR[local], bound=True)
    assert chosen == [parse_cpu_list(NEAR[local])]


def test_threads_of_one_core_stay_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: list[set[int]]
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: ALLOWED | {one + 64 for one in ALLOWED})
    found = bind(1, 8, address_of=address, sysfs=node(tmp_path, threads=2))
    assert found is not None
    assert found.cores == "57-63,121-127"


def test_a_rank_that_may_use_none_of_them_stays_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: list[set[int]]
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: {1, 2})
    found = bind(0, 8, address_of=address, sysfs=node(tmp_path))
    assert found == Binding(address=address(0), numa_node=3, cores="1-2", bound=False)
    assert not chosen
