from __future__ import annotations

import base64
import json
import subprocess
import time
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.registries import DOCKER, INDEX, LIST, RunningRegistry, free_port, serve, wire, without_proxies
from twinrun.foundation.errors import InputError, MachineError
from twinrun.images.registry import Registry

# bcrypt of the word behind the colon in LOGIN, as the registry's own user file has it.
USERS = "tester:$2b$12$eLVY9tw7O0tmcAjthwhPN.pvkPetFIhBh2buezTIkC0wRFXRlmN9G\n"
LOGIN = "tester:secret"
NAME = "base/images"

pytestmark = pytest.mark.needs("docker-registry", "openssl")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without_proxies(monkeypatch, tmp_path)


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningRegistry]:
    with RunningRegistry(tmp_path_factory.mktemp("registry")) as made:
        yield made


def asked(registry: RunningRegistry, name: str = NAME) -> Registry:
    return Registry(f"{registry.host}/{name}")


def log_in(folder: Path, host: str, login: str) -> None:
    """Write the file that `docker login` writes."""
    (folder / "engine").mkdir()
    entry = {"auths": {host: {"auth": base64.b64encode(login.encode()).decode()}}}
    (folder / "engine" / "config.json").write_text(json.dumps(entry), encoding="utf-8")


def test_a_tag_of_one_image_is_its_manifest(registry: RunningRegistry) -> None:
    digest = registry.push_image(NAME, "one")
    assert asked(registry).digest("one", "linux/amd64") == digest
    assert asked(registry).has_manifest(digest)


def test_a_manifest_of_the_engines_own_kind_is_understood(registry: RunningRegistry) -> None:
    digest = registry.push_image(NAME, "engine", kind=DOCKER)
    assert asked(registry).digest("engine", "linux/amd64") == digest


@pytest.mark.parametrize("kind", [INDEX, LIST])
def test_a_list_of_platforms_gives_the_entry_of_ours(registry: RunningRegistry, kind: str) -> None:
    inner = "application/vnd.oci.image.manifest.v1+json" if kind == INDEX else DOCKER
    platforms = ("linux/arm64", "linux/amd64")
    entries = {one: registry.push_image(NAME, f"for-{one[6:]}", one, inner) for one in platforms}
    whole = registry.push_index(NAME, "all", entries, kind)
    for platform, digest in entries.items():
        assert asked(registry).digest("all", platform) == digest != whole


def test_another_processor_is_refused_with_what_there_is(registry: RunningRegistry) -> None:
    arm = registry.push_image(NAME, "arm", "linux/arm64")
    attestation = registry.push_image(NAME, "attestation", "unknown/unknown")
    registry.push_index(NAME, "arm-only", {"linux/arm64": arm, "unknown/unknown": attestation})
    for tag in ("arm", "arm-only"):
        with pytest.raises(InputError, match="not built for this platform") as caught:
            asked(registry).digest(tag, "linux/amd64")
        assert caught.value.allowed == ["linux/arm64"]


def test_a_moved_tag_is_seen_and_the_old_image_can_still_be_had(registry: RunningRegistry) -> None:
    old = registry.push_image(NAME, "moving")
    new = registry.push_manifest(NAME, "moving", _with_label(registry, "later"))
    assert asked(registry).digest("moving", "linux/amd64") == new != old
    assert asked(registry).has_manifest(old)
    registry.delete(NAME, old)
    assert not asked(registry).has_manifest(old)


def _with_label(registry: RunningRegistry, label: str) -> dict[str, Any]:
    content = json.dumps(
        {"os": "linux", "architecture": "amd64", "config": {"Labels": {"is": label}}}
    ).encode()
    configuration = {"digest": registry.push_blob(NAME, content), "size": len(content)}
    kind = "application/vnd.oci.image.config.v1+json"
    return {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": configuration | {"mediaType": kind},
        "layers": [],
    }


@pytest.mark.parametrize(("name", "tag"), [(NAME, "no-such-tag"), ("no/such-name", "latest")])
def test_what_is_not_there_is_the_manifests_fault(registry: RunningRegistry, name: str, tag: str) -> None:
    with pytest.raises(InputError, match="no such image") as caught:
        asked(registry, name).digest(tag, "linux/amd64")
    assert tag in str(caught.value)


def test_a_registry_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="out of reach") as caught:
        Registry(f"127.0.0.1:{free_port()}/{NAME}").digest("one", "linux/amd64")
    assert "the old lock stays" in str(caught.value)
    assert caught.value.exit_code == 3


def test_an_unknown_host_is_out_of_reach() -> None:
    with pytest.raises(MachineError, match="out of reach"):
        Registry("registry.invalid/base/images").digest("one", "linux/amd64")


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[RunningRegistry]:
    """A registry that lets in one user."""
    (tmp_path / "users").write_text(USERS, encoding="utf-8")
    auth = {"htpasswd": {"realm": "tests", "path": str(tmp_path / "users")}}
    with RunningRegistry(tmp_path, auth=auth, login=LOGIN) as made:
        yield made


def test_the_login_of_the_engine_is_used(guarded: RunningRegistry, tmp_path: Path) -> None:
    digest = guarded.push_image(NAME, "one")
    with pytest.raises(MachineError, match="refuses") as caught:
        asked(guarded).digest("one", "linux/amd64")
    assert "docker login" in str(caught.value)
    log_in(tmp_path, guarded.host, LOGIN)
    assert asked(guarded).digest("one", "linux/amd64") == digest


def test_a_wrong_password_is_refused_and_not_shown(guarded: RunningRegistry, tmp_path: Path) -> None:
    log_in(tmp_path, guarded.host, "tester:not-the-word")
    with pytest.raises(MachineError, match="HTTP 401") as caught:
        asked(guarded).digest("one", "linux/amd64")
    assert "not-the-word" not in str(caught.value)
    assert base64.b64encode(b"tester:not-the-word").decode() not in str(caught.value)


class Tokens(BaseHTTPRequestHandler):
    """Hands out tokens to whoever asks, as the public registry does for public images."""

    folder: Path
    wanted: str | None = None
    asked: list[dict[str, list[str]]]

    def do_GET(self) -> None:
        query = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)
        self.asked.append(query)
        if self.wanted and self.headers.get("Authorization") != self.wanted:
            self.send_error(401)
            return
        body = json.dumps({"token": signed(self.folder, query)}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - named so by the library
        """Say nothing."""


def signed(folder: Path, query: dict[str, list[str]]) -> str:
    """Return the token for the scope asked for, signed with the key that the registry trusts."""
    kind, name, actions = query["scope"][0].split(":")
    certificate = (folder / "cert.pem").read_text(encoding="utf-8")
    chain = ["".join(certificate.splitlines()[1:-1])]
    now = int(time.time())
    claims = {
        "iss": "tests",
        "sub": "",
        "aud": query["service"][0],
        "jti": str(now),
        "exp": now + 60,
        "nbf": now - 60,
        "iat": now,
        "access": [{"type": kind, "name": name, "actions": actions.split(",")}],
    }
    parts = [_url({"typ": "JWT", "alg": "RS256", "x5c": chain}), _url(claims)]
    sign = ["openssl", "dgst", "-sha256", "-sign", str(folder / "key.pem")]
    done = subprocess.run(sign, input=".".join(parts).encode(), capture_output=True, check=True)
    return ".".join([*parts, base64.urlsafe_b64encode(done.stdout).rstrip(b"=").decode()])


def _url(content: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(content).encode()).rstrip(b"=").decode()


@pytest.fixture
def tokens(tmp_path: Path) -> Iterator[tuple[RunningRegistry, type[Tokens]]]:
    """A registry that wants tokens, and who hands them out."""
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=tests"]
    files = ["-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "cert.pem")]
    subprocess.run([*make, *files], capture_output=True, check=True)
    handler = type("Handler", (Tokens,), {"folder": tmp_path, "asked": []})
    with serve(ThreadingHTTPServer(("127.0.0.1", 0), handler)) as port:
        token = {"realm": f"http://127.0.0.1:{port}/token", "service": "tests", "issuer": "tests"}
        auth = {"token": token | {"rootcertbundle": str(tmp_path / "cert.pem")}}
        with RunningRegistry(tmp_path, auth=auth) as made:
            yield made, handler


def test_a_token_is_asked_for_and_used(tokens: tuple[RunningRegistry, type[Tokens]]) -> None:
    registry, handler = tokens
    # It has taken the token and knows no such image: without it the answer would be 401.
    with pytest.raises(InputError, match="no such image"):
        asked(registry).digest("one", "linux/amd64")
    assert handler.asked == [{"service": ["tests"], "scope": [f"repository:{NAME}:pull"]}]


def test_a_token_that_is_not_given_is_a_missing_login(
    tokens: tuple[RunningRegistry, type[Tokens]], tmp_path: Path
) -> None:
    registry, handler = tokens
    handler.wanted = f"Basic {base64.b64encode(LOGIN.encode()).decode()}"
    with pytest.raises(MachineError, match="docker login"):
        asked(registry).digest("one", "linux/amd64")
    log_in(tmp_path, registry.host, LOGIN)
    with pytest.raises(InputError, match="no such image"):
        asked(registry).digest("one", "linux/amd64")


def test_a_registry_killed_between_two_answers(tmp_path: Path) -> None:
    with RunningRegistry(tmp_path) as registry:
        registry.push_image(NAME, "one")

        def kill(number: int, answer: bytes) -> bytes:
            registry.kill()
            return answer

        with wire(registry, kill) as host, pytest.raises(MachineError, match="out of reach"):
            Registry(f"{host}/{NAME}").digest("one", "linux/amd64")


@pytest.mark.parametrize("kept", [0, 40, -20], ids=["nothing", "half a header", "half a body"])
def test_an_answer_cut_short(registry: RunningRegistry, kept: int) -> None:
    registry.push_image(NAME, "one")
    with wire(registry, lambda _, answer: answer[:kept]) as host:  # noqa: SIM117 - one context each
        with pytest.raises(MachineError, match="out of reach"):
            Registry(f"{host}/{NAME}").digest("one", "linux/amd64")


def test_bytes_that_are_not_those_of_the_digest(registry: RunningRegistry) -> None:
    digest = registry.push_image(NAME, "one")
    with wire(registry, lambda _, answer: answer.replace(b'"layers": []', b'"layers":[] ')) as host:
        with pytest.raises(MachineError, match="other bytes than its digest"):
            Registry(f"{host}/{NAME}").digest("one", "linux/amd64")
        with pytest.raises(MachineError, match="other bytes than its digest"):
            Registry(f"{host}/{NAME}").has_manifest(digest)


def test_official_names_belong_to_the_default_registry() -> None:
    assert Registry("docker.io/debian")._address == "https://registry-1.docker.io/v2/library/debian"
    assert Registry("docker.io/some/image")._address == "https://registry-1.docker.io/v2/some/image"
    assert Registry("quay.io/image")._address == "https://quay.io/v2/image"


@pytest.mark.docker
def test_the_digest_is_the_one_the_engine_pulls(registry: RunningRegistry, tmp_path: Path) -> None:
    docker = pytest.importorskip("docker")
    client = docker.from_env(timeout=60)
    name = f"{registry.host}/{NAME}"
    (tmp_path / "empty.tar").write_bytes(b"\0" * 10240)
    client.api.import_image_from_file(str(tmp_path / "empty.tar"), repository=name, tag="engine-made")
    try:
        client.images.push(name, tag="engine-made")
        digest = asked(registry).digest("engine-made", "linux/amd64")
        assert client.images.get(f"{name}:engine-made").attrs["RepoDigests"] == [f"{name}@sha256:{digest}"]
    finally:
        client.images.remove(f"{name}:engine-made", force=True)
        client.close()
