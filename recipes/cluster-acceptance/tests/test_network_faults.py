"""The checks on three nodes with a network of the kernel's each: faults of links, and no false alarm."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ranks import environment, write_job
from twinrun.foundation.manifest import load_json
from twinrun.protocol.checks import ChecksResult
from twinrun.protocol.measurements import Check
from twinrun.train.checks import OTHERS_SECONDS

pytest.importorskip("torch", reason="needs the packages of a stack")

RECIPE = Path(__file__).parents[1]
ROOT = RECIPE.parents[1]
MANIFEST = tomllib.loads((RECIPE / "recipe.toml").read_text(encoding="utf-8"))
# Those that a network may fail.
NAMES = ("enumerate-workers", "network-interfaces", "link-performance", "collective-performance")
CHECKS = [one for one in MANIFEST["checks"]["check"] if one["id"] in NAMES]
NODES, INTERFACE, SPARE = 3, "eth0", "eth1"
SECONDS = 500
pytestmark = pytest.mark.needs("root", "ip", "tc", "unshare")


class Network:
    """Nodes on a switch, each a network of its own with a name; node 0 is the first."""

    def __init__(self) -> None:
        self._prefix = f"twinrun-{os.getpid()}"
        self._hub = f"{self._prefix}-hub"

    def start(self) -> None:
        _run("ip", "netns", "add", self._hub)
        self._ip(self._hub, "link add switch type bridge")
        self._ip(self._hub, "link set switch up")
        for node in range(NODES):
            name = self._name(node)
            _run("ip", "netns", "add", name)
            self._ip(self._hub, f"link add port{node} type veth peer name {INTERFACE} netns {name}")
            self._ip(self._hub, f"link set port{node} master switch up")
            self.ip(node, "link set lo up")
            self.ip(node, f"link set {INTERFACE} up")
            self.ip(node, f"addr add 10.0.0.{node + 1}/24 dev {INTERFACE}")

    def stop(self) -> None:
        for name in (*map(self._name, range(NODES)), self._hub):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def ip(self, node: int, words: str) -> None:
        self._ip(self._name(node), words)

    def limit(self, node: int, rate: str) -> None:
        """Let no more leave a node."""
        words = f"tc qdisc add dev {INTERFACE} root tbf rate {rate} burst 32kb latency 400ms"
        _run("ip", "netns", "exec", self._name(node), *words.split())

    def checks(
        self, folder: Path, *, only: str = "", interfaces: dict[int, str] | None = None
    ) -> dict[str, Check]:
        """Run all checks or one, a rank a node; `interfaces` are those that ranks are told to use."""
        checks = [one for one in CHECKS if only in ("", one["id"])]
        job = write_job(folder, "cluster-acceptance", world_size=NODES, checks=checks)
        ranks = [
            subprocess.Popen(
                [
                    *("ip", "netns", "exec", self._name(node), "unshare", "--uts", "sh", "-c"),
                    f'hostname node-{node}; exec "$0" "$@"',
                    *(sys.executable, str(RECIPE / "acceptance.py"), "--job", str(job)),
                ],
                env=_variables(node, (interfaces or {}).get(node, INTERFACE)),
                stdout=subprocess.DEVNULL,
            )
            for node in range(NODES)
        ]
        for rank in ranks:
            assert rank.wait(SECONDS) == 0
        return {one.id: one for one in load_json(folder / "result.json", ChecksResult).checks}

    def _name(self, node: int) -> str:
        return f"{self._prefix}-{node}"

    def _ip(self, name: str, words: str) -> None:
        _run("ip", "-n", name, *words.split())


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def _variables(node: int, interface: str) -> dict[str, str]:
    place = {"RANK": str(node), "LOCAL_RANK": "0", "WORLD_SIZE": str(NODES), "LOCAL_WORLD_SIZE": "1"}
    place |= {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29400", "GLOO_SOCKET_IFNAME": interface}
    return environment() | place | {"PYTHONPATH": f"{ROOT / 'src'}:{RECIPE}"}


@pytest.fixture
def network() -> Iterator[Network]:
    made = Network()
    try:
        made.start()
        yield made
    finally:
        made.stop()


def failed(found: dict[str, Check]) -> dict[str, tuple[str, ...]]:
    """Return the nodes that each check blames."""
    return {name: one.nodes for name, one in found.items() if one.outcome == "fail"}


def test_alike_nodes_raise_no_alarm(network: Network, tmp_path: Path) -> None:
    found = network.checks(tmp_path)
    said = {name: (one.outcome, one.reason) for name, one in found.items()}
    assert said == dict.fromkeys(NAMES, ("pass", ""))


def test_a_slow_link_and_a_small_mtu_are_found_at_their_nodes(network: Network, tmp_path: Path) -> None:
    network.limit(2, "50mbit")
    network.ip(1, f"link set {INTERFACE} mtu 1400")
    found = network.checks(tmp_path)
    slow = ("node-2",)
    assert failed(found) == {
        "network-interfaces": ("node-1",),
        "link-performance": slow,
        "collective-performance": slow,
    }
    assert found["network-interfaces"].reason.endswith("node-1 has 1400")


def test_an_interface_that_is_not_there_is_found_at_its_node(network: Network, tmp_path: Path) -> None:
    found = network.checks(tmp_path, only="network-interfaces", interfaces={1: SPARE})
    assert failed(found) == {"network-interfaces": ("node-1",)}
    assert found["network-interfaces"].reason == f"rank 1: node-1 has no {SPARE}"
    assert (found["network-interfaces"].seconds or SECONDS) < 2 * OTHERS_SECONDS
