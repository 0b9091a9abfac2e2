"""Grid Engine for real: Debian's 8.1.9, a master and two nodes as containers of this machine."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import docker
import pytest

from tests.execution.clusters import ROOT, SECONDS, changed, ended, handed, program, trained, until
from twinrun.execution.schedulers import client_of
from twinrun.foundation.cache import cache_root
from twinrun.foundation.errors import InputError, MachineError, RunError, RunInterruptedError
from twinrun.images.local_cluster import interpreter_paths
from twinrun.images.root_filesystem import mmdebstrap
from twinrun.manifests.cluster import LoadedSite, Site

pytestmark = [pytest.mark.cluster, pytest.mark.needs("mmdebstrap", "mirror")]
NAME, IMAGE, SUITE = "twinrun-grid", "twinrun-test/gridengine", "bookworm"
NODES = (f"{NAME}-node1", f"{NAME}-node2")
# Master and nodes are configured when they start: what their packages do then is of one host.
LATER = ("gridengine-master", "gridengine-exec", "libjemalloc2", "libtirpc3", "lsb-base")
PACKAGES = (
    *("ca-certificates", "procps", "gridengine-client", "libexpat1", "libffi8", "libssl3", "libsqlite3-0"),
    *("libgomp1", "libstdc++6", "libbz2-1.0", "liblzma5", "libncursesw6", "libreadline8", "libuuid1"),
    "zlib1g",
)


def image(client: docker.DockerClient, folder: Path) -> str:
    name = f"{IMAGE}:{SUITE}"
    if not client.images.list(name):
        tar = folder / "root.tar"
        fetch = f'chroot "$1" apt-get --yes download {" ".join(LATER)}'
        options = ("--variant=minbase", f"--include={','.join(PACKAGES)}", f"--customize-hook={fetch}")
        mirror = f"deb http://deb.debian.org/debian {SUITE} main"
        mmdebstrap(*options, SUITE, str(tar), mirror, epoch=round(time.time()))
        client.api.timeout = SECONDS
        client.api.import_image_from_file(str(tar), repository=IMAGE, tag=SUITE)
    return name


def remove(client: docker.DockerClient) -> None:
    for one in client.containers.list(all=True, filters={"name": NAME}):
        one.remove(force=True)
    for network in client.networks.list(names=[NAME]):
        network.remove()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def site(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedSite]:
    client = docker.from_env(timeout=SECONDS)
    made = image(client, tmp_path_factory.mktemp("image"))
    remove(client)
    client.networks.create(NAME)
    cache_root().mkdir(parents=True, exist_ok=True)
    shared = dict.fromkeys((folder, ROOT, cache_root()), "rw") | dict.fromkeys(interpreter_paths(), "ro")
    volumes = {str(path): {"bind": str(path), "mode": mode} for path, mode in shared.items()}
    volumes[str(Path(__file__).with_name("gridengine_node.sh"))] = {"bind": "/start", "mode": "ro"}
    hosts = (f"{NAME}-master", *NODES)
    variables = {"TWINRUN_MASTER": hosts[0], "TWINRUN_HOSTS": " ".join(hosts), "TWINRUN_NETWORK": NAME}
    given: dict[str, Any] = {"network": NAME, "environment": variables, "volumes": volumes, "shm_size": "1g"}
    try:
        for host in hosts:
            words = ["master", *NODES] if host == hosts[0] else ["node"]
            start = ["/bin/bash", "/start", *words]
            client.containers.run(made, start, name=host, hostname=host, init=True, detach=True, **given)
        keys = {"scheduler": "gridengine", "vendor": "cpu", "partition": "all.q", "poll_seconds": 0.5}
        keys |= {"nodes": 2, "devices_per_node": 1, "cores_per_node": 2, "minutes": 30}
        keys |= {"parallel_environment": "mpi1", "shared": (str(folder), str(ROOT), str(cache_root()))}
        here = Site.model_validate(keys | {"client": ("docker", "exec", hosts[0])})
        loaded = LoadedSite(name="grid", place="cluster.toml:site.grid", site=here)
        until(lambda: up(loaded) == 2)
        yield loaded
    finally:
        remove(client)
        client.close()


def up(site: LoadedSite) -> int:
    try:
        return client_of(site).size()
    except MachineError:
        return 0


SAYS = """
import os, pathlib, sys
pathlib.Path(sys.argv[1], os.environ["TWINRUN_NODE"]).write_text(os.uname().nodename)
"""
FAILS = "import os; raise SystemExit(7 * int(os.environ['TWINRUN_NODE']))"


def test_jobs_start_end_are_cancelled_and_refused(site: LoadedSite, folder: Path) -> None:
    job = handed(site, folder / "says", program(SAYS, str(folder)))
    assert ended(job) == 0
    found = [(folder / number).read_text(encoding="utf-8") for number in ("0", "1")]
    assert tuple(found) == job.nodes
    assert set(found) == set(NODES)
    assert ended(handed(site, folder / "fails", program(FAILS))) == 7
    scheduler = client_of(site)
    job = handed(site, folder / "sleeps", program("import time; time.sleep(600)"))
    until(lambda: job.poll() is None and job.nodes)
    job.cancel()
    assert scheduler.state(job.handle) is None
    with pytest.raises(RunInterruptedError, match="ended without an exit status"):
        scheduler.adopt(job.handle, point="p", logs=folder / "sleeps" / "log").poll()
    error = ended(handed(changed(site, setup=("echo gone >&2; false",)), folder / "broken", program("pass")))
    assert isinstance(error, RunError)
    assert "a set-up line of the site failed" in error.message
    assert "gone" in str(error.found)
    with pytest.raises(InputError, match="qsub refuses the job"):
        handed(changed(site, parallel_environment="nonsense"), folder / "refused", program("pass"))


@pytest.mark.skipif(not find_spec("composer"), reason="the interpreter has no stack")
def test_two_nodes_train_and_leave_a_record(
    site: LoadedSite, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cluster.toml"
    keys = site.site.model_dump(mode="json", exclude_defaults=True)
    lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in keys.items())
    file.write_text(f"[site.grid]\n{lines}\n", encoding="utf-8")
    monkeypatch.setenv("TWINRUN_CLUSTER", str(file))
    for option in ("--detach", "--resume"):
        done = trained(folder, "grid", "host", option)
        assert done.returncode == 0, done.stderr
    record = json.loads(Path(json.loads(done.stdout)["record"]).read_text(encoding="utf-8"))
    assert record["allocation"]["scheduler"] == "gridengine"
    assert sorted(record["allocation"]["nodes"]) == sorted(NODES)
