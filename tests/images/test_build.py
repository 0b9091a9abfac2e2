"""An image that is really built, from one small stack: what it is, what goes wrong, and where it goes."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import docker
import pytest
from docker import DockerClient

from tests.registries import running_registry, wire
from tests.tiny_build import SECONDS, another, answer, build, relock, run, started
from tests.tiny_image import await_daemon, containerd_store, podman, podman_variables
from tests.tiny_stack import STACK, Checkout
from twinrun.execution.engines import load_engine
from twinrun.foundation.errors import RunError
from twinrun.images.engine import find_client
from twinrun.images.inspection import write_inventory
from twinrun.machine import daemon
from twinrun.manifests.stack import load_stack
from twinrun.manifests.vendor import load_vendors

pytestmark = pytest.mark.image

STAGE = "FROM root AS python\n"
END = "USER 1000:1000\n"
ENGINES = [
    pytest.param(podman, marks=pytest.mark.needs("podman", "root"), id="podman"),
    pytest.param(containerd_store, marks=pytest.mark.needs("unshare", "root"), id="containerd-store"),
]


@pytest.fixture(scope="module")
def built(client: DockerClient, checkout: Checkout) -> dict[str, Any]:
    """The small stack's image, built where neither this machine nor the containers have a network."""
    return answer(build(checkout, "--json", wrap=("unshare", "--net")))


def test_without_a_network_the_image_is_built(
    client: DockerClient, checkout: Checkout, built: dict[str, Any]
) -> None:
    facts = client.images.get(built["built"]["id"]).attrs
    labels = facts["Config"]["Labels"]
    assert built["built"]["image"] in facts["RepoTags"]
    assert labels["dev.twinrun.inputs-sha256"] == load_stack(checkout.root, STACK).inputs_sha256
    assert list(built["built"]["layers"]) == ["root", "python"]
    program = (
        "import importlib.util, os, small, sys;"
        "print(small.VERSION, os.getuid(), sys.executable, importlib.util.find_spec('twinrun'))"
    )
    output = client.containers.run(facts["Id"], ["python3", "-c", program], remove=True, network_mode="none")
    assert output.decode().split() == ["1.0", "1000", "/opt/twinrun/python/bin/python3", "None"]
    assert "[python 1/1]" in (Path(built["folder"]) / "build.log").read_text(encoding="utf-8")
    again = answer(build(checkout, "--json"))["built"]
    assert (again["id"], again["fresh"]) == (built["built"]["id"], False)


def test_what_is_written_was_measured_inside(
    client: DockerClient, checkout: Checkout, built: dict[str, Any]
) -> None:
    stack, folder = load_stack(checkout.root, STACK), Path(built["folder"])
    contents = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    assert (contents["digest"], contents["lock_sha256"]) == (built["built"]["id"], stack.lock_sha256)
    assert contents["layers"] == list(built["built"]["layers"].values())
    measured, system = contents["measured"], stack.system_packages(checkout.root)
    assert system is not None
    assert (measured["system"], measured["user"]) == ("Debian GNU/Linux 12 (bookworm)", "1000:1000")
    assert re.fullmatch(r"3\.11\.[0-9]+", measured["python"])
    assert measured["python_packages"] == {"big": "2.0", "large": "3.1", "pip": "25.3", "small": "1.0"}
    found = {name: value.partition(" ")[0] for name, value in measured["system_packages"].items()}
    assert found == {one.name: one.version for one in system.root}
    bill = json.loads((folder / "sbom.cdx.json").read_text(encoding="utf-8"))
    digests = {part["name"]: [one["content"] for one in part["hashes"]] for part in bill["components"]}
    assert digests.keys() == measured["python_packages"].keys() | found.keys()
    assert all(digests[one.name] == [one.sha256] for one in system.root)
    assert bill["metadata"]["component"]["hashes"][0]["content"] == contents["digest"][len("sha256:") :]
    assert client.containers.list(all=True, filters={"ancestor": contents["digest"]}) == []


@pytest.mark.parametrize(
    ("file", "old", "new", "expected"),
    [
        ("requirements.lock", "^small==1.0", "small==1.1", "small 1.0, lock has 1.1"),
        ("requirements.lock", "^small==", "other==", "other absent, lock has 1.0"),
        ("apt.lock", r"^(python3)=\S+", r"\1=9", r"python3 \S+, lock has 9$"),
        ("apt.lock", r"^python3=.*\n", "", r"python3 \S+, lock has none$"),
    ],
)
def test_an_image_that_is_not_what_its_locks_say_is_refused(
    client: DockerClient,
    checkout: Checkout,
    built: dict[str, Any],
    tmp_path: Path,
    file: str,
    old: str,
    new: str,
    expected: str,
) -> None:
    root, folder = another(checkout, tmp_path / "project").root, tmp_path / "out"
    lock = root / "images/stacks" / STACK / file
    text = re.sub(old, new, lock.read_text(encoding="utf-8"), flags=re.MULTILINE)
    lock.write_text(text, encoding="utf-8")
    stack, image = load_stack(checkout.root, STACK), built["built"]["id"]
    with pytest.raises(RunError, match="not what its locks say") as caught:
        write_inventory(client, image, stack, root=root, folder=folder)
    assert any(re.search(expected, difference) for difference in caught.value.found)  # type: ignore[attr-defined]
    assert not folder.exists()


def test_another_folder_name_mask_and_zone_give_the_same_image(
    client: DockerClient, checkout: Checkout, built: dict[str, Any], tmp_path: Path
) -> None:
    """From an empty cache: the root file system is made again too."""
    other = another(checkout, tmp_path / "elsewhere" / "project")
    client.images.remove(built["built"]["image"])
    client.api.prune_builds()
    script = 'hostname another; umask 077; TZ=Asia/Tokyo LC_ALL=C exec "$0" "$@"'
    done = build(other, "--json", wrap=("unshare", "--uts", "sh", "-c", script))
    again = answer(done)["built"]
    assert again["fresh"]
    assert (again["id"], again["layers"]) == (built["built"]["id"], built["built"]["layers"])


@pytest.mark.parametrize("start", ENGINES)
def test_another_engine_builds_the_same_image(
    start: Callable[[Path], AbstractContextManager[str]],
    checkout: Checkout,
    built: dict[str, Any],
    tmp_path: Path,
) -> None:
    other = another(checkout, tmp_path / "there" / "checkout")
    (tmp_path / "there/cache").mkdir()
    # The root file system is the one thing that an engine has no part in.
    (tmp_path / "there/cache/roots").symlink_to(checkout.root.parent / "cache/roots")
    (tmp_path / "engine").mkdir()
    # Podman's own client builds and measures.
    settings = podman_variables(tmp_path / "engine")
    with start(tmp_path / "engine") as address:
        there = answer(build(other, "--json", DOCKER_HOST=address, **settings))["built"]
        assert (there["id"], there["layers"]) == (built["built"]["id"], built["built"]["layers"])
        again = answer(build(other, "--json", DOCKER_HOST=address, **settings))["built"]
        assert (again["id"], again["fresh"]) == (there["id"], False)
        engine: DockerClient = docker.DockerClient(base_url=address, timeout=SECONDS)
        # What somebody adds to the configuration is another image.
        container = engine.api.create_container(there["image"], command=["true"])["Id"]
        engine.api.commit(container, "twinrun-test/tiny", "planted", conf={"Entrypoint": ["sh"]})
        assert daemon.image_id(engine, "twinrun-test/tiny:planted") != there["id"]
        engine.close()


def test_the_written_folder_is_all_that_docker_needs(
    client: DockerClient, checkout: Checkout, built: dict[str, Any], tmp_path: Path
) -> None:
    folder, archive = tmp_path / "context", tmp_path / "image.tar"
    done = build(checkout, "--context", str(folder))
    assert (done.returncode, done.stdout.strip()) == (0, str(folder)), done.stderr
    program, variables = find_client(client), os.environ | {"DOCKER_BUILDKIT": "1"}
    client.images.remove(built["built"]["id"], force=True)
    client.api.prune_builds()
    with archive.open("wb") as out:
        command = [program, "build", "--quiet", "--target", "archive", "--output", "-", str(folder)]
        subprocess.run(command, env=variables, stdout=out, check=True)
    with archive.open("rb") as stream:
        (loaded,) = client.images.load(stream)
    assert (loaded.id, loaded.tags) == (built["built"]["id"], [built["built"]["image"]])
    # Without a target it is the same but for its times.
    command = [program, "build", "--quiet", "--tag", "twinrun-test/tiny:own", str(folder)]
    subprocess.run(command, env=variables, check=True)
    own = client.images.get("twinrun-test/tiny:own").attrs["Config"]
    for key in ("Env", "Labels", "User", "WorkingDir"):
        assert own[key] == loaded.attrs["Config"][key], key
    for image in (loaded.tags[0], "twinrun-test/tiny:own"):
        wheels = tmp_path / "wheels"
        wheels.mkdir(exist_ok=True)
        name = "large-3.1-py3-none-any.whl"
        (wheels / name).write_bytes((checkout.wheelhouse / name).read_bytes())
        (wheels / "Dockerfile").write_text(
            f"FROM {image}\nCOPY {name} /tmp/\nRUN pip install --force-reinstall --no-index /tmp/{name}\n"
        )
        command = [program, "build", "--quiet", str(wheels)]
        client.images.remove(subprocess.check_output(command, env=variables, text=True).strip(), force=True)


def test_another_image_than_the_committed_one_is_refused(
    client: DockerClient, checkout: Checkout, built: dict[str, Any], tmp_path: Path
) -> None:
    other = another(checkout, tmp_path / "elsewhere" / "project")
    layers = list(built["built"]["layers"].values())
    committed = {"image": built["built"]["image"], "digest": f"sha256:{'0' * 64}"}
    committed |= {"layers": [*layers[:-1], f"sha256:{'1' * 64}"]}
    file = other.root / "images/stacks" / STACK / "contents.json"
    file.write_text(json.dumps(committed), encoding="utf-8")
    client.images.remove(built["built"]["id"], force=True)
    refused = build(other)
    assert refused.returncode == 3, refused.stderr
    for text in (built["built"]["id"], committed["digest"], "layers that differ: python"):
        assert text in refused.stderr
    assert not client.images.list(name=built["built"]["image"])
    answer(build(checkout, "--json"))


def test_two_builds_at_once_give_one_image(
    client: DockerClient, checkout: Checkout, built: dict[str, Any]
) -> None:
    client.images.remove(built["built"]["id"], force=True)
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(build, checkout, "--json") for _ in range(2)]
    found = [answer(one.result())["built"] for one in both]
    assert {one["id"] for one in found} == {built["built"]["id"]}
    assert sorted(one["fresh"] for one in found) == [False, True]


def test_an_image_without_its_tag_is_known_by_its_id(
    client: DockerClient, checkout: Checkout, built: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is after `docker pull REPOSITORY@sha256:DIGEST`."""
    monkeypatch.setenv("TWINRUN_CACHE", str(checkout.root.parent / "cache"))
    stack = load_stack(checkout.root, STACK)
    client.images.get(built["built"]["id"]).tag("twinrun-test/tiny", "pulled")
    client.images.remove(built["built"]["image"])
    vendor = load_vendors(checkout.root)["cpu"]
    assert load_engine("docker").unusable(stack=stack, vendor=vendor) is None
    again = answer(build(checkout, "--json"))["built"]
    assert (again["id"], again["fresh"]) == (built["built"]["id"], False)


@pytest.mark.nightly
def test_the_newest_index_builds_and_says_what_would_move(checkout: Checkout, tmp_path: Path) -> None:
    newest = another(checkout, tmp_path / "newest" / "checkout")
    moved = run(newest, "lock", "--stack", STACK, "--only", "system", "--upgrade")
    assert moved.returncode == 0, moved.stderr
    print(moved.stdout)  # noqa: T201
    # Its packages come from the mirror, the wheels as before.
    for one in newest.wheelhouse.glob("*.whl"):
        target = tmp_path / "newest/cache/wheels" / one.name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(one.read_bytes())
    assert answer(run(newest, "build", "--stack", STACK, "--json"))["built"]["fresh"]


# What goes wrong


def test_a_failing_step_is_named_with_its_last_lines(checkout: Checkout, tmp_path: Path) -> None:
    instead = (STAGE, f"{STAGE}RUN echo so far so good; false\n")
    done = build(another(checkout, tmp_path / "project", instead=instead))
    assert done.returncode == 4, done.stderr
    assert "images/Dockerfile [python 1/2]: a step of the image failed" in done.stderr
    for text in ("so far so good", "exit code: 1", "build.log"):
        assert text in done.stderr


def test_stopped_by_the_user(client: DockerClient, checkout: Checkout, tmp_path: Path) -> None:
    slow = another(checkout, tmp_path / "project", instead=(STAGE, f"{STAGE}RUN sleep 600\n"))
    with started(slow, "sleep 600") as (running, said):
        running.send_signal(signal.SIGINT)
        output = said.read()
        assert (running.wait(60), ": stopped" in output) == (5, True), output
    assert not list((slow.root.parent / "cache").glob("building-*"))
    assert not client.images.list(name=load_stack(slow.root, STACK).image())


def test_an_engine_out_of_reach(checkout: Checkout) -> None:
    done = build(checkout, DOCKER_HOST="unix:///none.sock")
    assert (done.returncode, "does not answer" in done.stderr) == (3, True)


def test_another_processor(checkout: Checkout, tmp_path: Path) -> None:
    other = another(checkout, tmp_path / "project")
    manifest = other.root / "images/stacks" / STACK / "stack.toml"
    text = manifest.read_text(encoding="utf-8").replace("\n[base]", 'platform = "linux/arm64"\n\n[base]', 1)
    manifest.write_text(text, encoding="utf-8")
    relock(other.root)
    done = build(other)
    assert done.returncode == 3, done.stderr
    assert "the engine's processor is not the stack's" in done.stderr


@contextlib.contextmanager
def small_engine(folder: Path, megabytes: int) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """An engine of its own on a small disk: its address and its process."""
    data, address = folder / "data", f"unix://{folder}/docker.sock"
    data.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(data)], check=True)
    folders = [f"--data-root={data}", f"--exec-root={folder}/exec", f"--pidfile={folder}/pid"]
    network = ["--bridge=none", "--iptables=false", "--ip-masq=false"]
    with (folder / "log").open("wb") as log:
        # An engine without a bridge removes the one it finds: this machine's belongs to another engine.
        command = ["unshare", "--net", "dockerd", f"--host={address}", *folders, *network]
        engine = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        await_daemon(address)
        yield address, engine
    finally:
        engine.terminate()
        engine.wait(60)
        subprocess.run(["umount", "--recursive", "--lazy", str(data)], check=False)


@pytest.mark.needs("root")  # to mount a small disk
def test_an_engine_that_is_killed_leaves_nothing(checkout: Checkout, tmp_path: Path) -> None:
    slow = another(checkout, tmp_path / "project", instead=(STAGE, f"{STAGE}RUN sleep 600\n"))
    with (
        small_engine(tmp_path, 4000) as (address, engine),
        started(slow, "sleep 600", DOCKER_HOST=address) as (running, said),
    ):
        engine.kill()
        output = said.read()
        assert running.wait(60) in (3, 4), output
    assert "error: images/Dockerfile [" in output
    assert "nothing was tagged" in output
    assert "Traceback" not in output
    assert not list((slow.root.parent / "cache").glob("building-*"))


STEPS = [STAGE, "FROM root AS compiled\n"]


@pytest.mark.nightly
@pytest.mark.needs("root")  # to mount a small disk
@pytest.mark.parametrize("stage", STEPS, ids=["python", "compiled"])
def test_a_disk_that_fills_up_in_the_middle(checkout: Checkout, tmp_path: Path, stage: str) -> None:
    # The step waits until the disk is full.
    waiting = f"{stage}RUN sleep 10; dd if=/dev/zero of=/opt/large bs=1M count=64\n"
    other = another(checkout, tmp_path / "project", instead=(stage, waiting))
    with small_engine(tmp_path, 2500) as (address, _):
        filler = tmp_path / "data" / "filler"
        thread = threading.Thread(target=fill_when, args=(filler, other.root, "sleep 10"), daemon=True)
        thread.start()
        done = build(other, DOCKER_HOST=address)
        thread.join()
        assert done.returncode == 3, done.stderr
        for text in ("not enough space on the disk", " free in ", " needed", "nothing was tagged"):
            assert text in done.stderr
        engine = docker.DockerClient(base_url=address)
        assert not engine.images.list(name="twinrun-test/tiny")
        # A disk that is full before is refused before.
        again = build(checkout, DOCKER_HOST=address)
        assert (again.returncode, "not enough space" in again.stderr) == (3, True), again.stderr
        filler.unlink()
        assert build(checkout, DOCKER_HOST=address).returncode == 0
        assert engine.images.list(name="twinrun-test/tiny")
        engine.close()


def fill_when(filler: Path, root: Path, step: str) -> None:
    """Fill the disk once a step of the build runs."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        logs = (root / "runs/images").glob("*/*/build.log")
        if any(f"RUN {step}" in log.read_text(encoding="utf-8") for log in logs):
            break
        time.sleep(0.1)
    with contextlib.suppress(OSError), filler.open("wb") as stream:
        while True:
            stream.write(b"\0" * (1 << 20))
            stream.flush()


# Out of the engine


def pull(checkout: Checkout, reference: str) -> subprocess.CompletedProcess[str]:
    return run(checkout, "build", "--stack", STACK, "--pull", reference, "--json")


@pytest.mark.needs("skopeo")
def test_what_is_saved_is_a_layout_with_all_that_a_build_needs(
    client: DockerClient, checkout: Checkout, built: dict[str, Any], tmp_path: Path
) -> None:
    carried, identity = tmp_path / "carried", built["built"]["id"]
    done = answer(build(checkout, "--save", str(carried), "--json"))
    assert (done["built"]["id"], done["saved"]) == (identity, str(carried))
    layout = f"oci-archive:{carried}/image.tar"
    inspected = subprocess.run(["skopeo", "inspect", "--raw", layout], capture_output=True, check=True)
    assert json.loads(inspected.stdout)["config"]["digest"] == identity
    client.images.remove(built["built"]["image"], force=True)
    with (carried / "image.tar").open("rb") as stream:
        (loaded,) = client.images.load(stream)
    assert loaded.id == identity
    other = another(checkout, tmp_path / "there" / "checkout")._replace(wheelhouse=carried)
    client.images.remove(built["built"]["image"], force=True)
    again = answer(build(other, "--base", str(carried / "root.tar"), "--json"))["built"]
    assert (again["id"], again["fresh"]) == (identity, True)


@pytest.mark.needs("docker-registry")
@pytest.mark.parametrize("spoilt", [b"GET /v2/ ", b"PUT /v2/stacks/tiny/manifests/"], ids=["first", "last"])
def test_a_registry_that_dies_in_the_middle_leaves_nothing(
    client: DockerClient, checkout: Checkout, built: dict[str, Any], tmp_path: Path, spoilt: bytes
) -> None:
    before = sorted(client.images.get(built["built"]["id"]).tags)
    with running_registry(tmp_path) as registry, wire(registry, spoilt) as host:
        refused = build(checkout, "--push", f"{host}/stacks/tiny")
        assert (refused.returncode, "cannot push" in refused.stderr) == (3, True), refused.stderr
        refused = pull(checkout, f"{host}/stacks/tiny@sha256:{'0' * 64}")
        assert (refused.returncode, "cannot pull" in refused.stderr) == (3, True), refused.stderr
        assert sorted(client.images.get(built["built"]["id"]).tags) == before


@pytest.mark.needs("docker-registry")
def test_what_is_pushed_is_taken_by_its_digest(
    client: DockerClient, checkout: Checkout, built: dict[str, Any], tmp_path: Path
) -> None:
    with running_registry(tmp_path) as registry:
        repository = f"localhost:{registry.partition(':')[2]}/stacks/tiny"
        reference = answer(build(checkout, "--push", repository, "--json"))["pushed"]
        assert reference.startswith(f"{repository}@sha256:")
        # Where nothing was built yet.
        client.images.remove(built["built"]["id"], force=True)
        other = another(checkout, tmp_path / "there" / "checkout")._replace(wheelhouse=tmp_path / "empty")
        stranger = another(checkout, tmp_path / "else" / "checkout", instead=(END, f"{END}# another\n"))
        pulled = answer(pull(other, reference))["built"]
        assert (pulled["id"], pulled["image"]) == (built["built"]["id"], built["built"]["image"])
        refused = pull(stranger, reference)
        assert (refused.returncode, "of other inputs" in refused.stderr) == (3, True), refused.stderr


def planted(home: Path, root: Path) -> tuple[list[str], dict[str, str]]:
    """Return secrets, put wherever secrets lie, and the variables that hold some of them."""
    secrets = [f"planted-{number:02d}-{os.urandom(6).hex()}" for number in range(15)]
    draw = iter(secrets)
    variables = {name: next(draw) for name in ("GITHUB_TOKEN", "HF_TOKEN", "DB_PASSWORD", "BUILD_ARG_AUTH")}
    addresses = ("HTTP_PROXY", "https_proxy", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "UV_INDEX_URL")
    variables |= {name: f"http://user:{next(draw)}@127.0.0.1:9/simple" for name in addresses}
    proxies = {"default": {"httpProxy": f"http://user:{next(draw)}@127.0.0.1:9"}}
    login = {"auth": base64.b64encode(f"user:{next(draw)}".encode()).decode()}
    files = {
        ".docker/config.json": json.dumps({"proxies": proxies, "auths": {"registry.example": login}}),
        ".netrc": f"machine index.example login user password {next(draw)}\n",
        ".config/pip/pip.conf": f"[global]\nextra-index-url = https://user:{next(draw)}@index.example/simple\n",
        ".git-credentials": f"https://user:{next(draw)}@git.example\n",
    }
    for name, text in files.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text, encoding="utf-8")
    remote = f"https://user:{next(draw)}@git.example/project.git"
    subprocess.run(["git", "-C", str(root), "remote", "add", "origin", remote], check=True)
    assert next(draw, None) is None
    return secrets, variables | {"HOME": str(home), "NO_PROXY": "*"}


def test_no_secret_gets_anywhere(client: DockerClient, checkout: Checkout, tmp_path: Path) -> None:
    # An image of its own, so that every step runs under these variables.
    other = another(checkout, tmp_path / "project", instead=(END, f"{END}# another\n"))
    secrets, variables = planted(tmp_path / "home", other.root)
    client.api.prune_builds()
    archive = tmp_path / "image.tar"
    done = build(other, "--save", str(archive), "--json", **variables)
    outcome = answer(done)
    assert outcome["built"]["fresh"]
    facts = client.images.get(outcome["built"]["id"])
    texts = [done.stdout.encode(), done.stderr.encode(), archive.read_bytes()]
    texts += [path.read_bytes() for path in (other.root / "runs").rglob("*") if path.is_file()]
    texts += [json.dumps([facts.attrs, facts.history()]).encode()]
    for secret in secrets:
        for form in (secret.encode(), base64.b64encode(secret.encode())):
            assert not [1 for text in texts if form in text], secret
    assert b"dev.twinrun.stack" in archive.read_bytes()
