"""Checkpoints in an object store: against a server on this machine that speaks S3."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator

import boto3
import pytest
from moto.server import ThreadedMotoServer

from tests.checkpoints.writing import write
from twinrun.checkpoints import store_at
from twinrun.checkpoints.store import DamagedError, Store
from twinrun.checkpoints.verification import verify
from twinrun.foundation.errors import InputError, MachineError, RunError
from twinrun.foundation.files import sha256_of_bytes


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Start a server and give its address; to stop it takes half a second."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def store(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    for name, value in {
        "AWS_ENDPOINT_URL": server,
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3").create_bucket(Bucket="runs")
    yield store_at("s3://runs/one")
    urllib.request.urlopen(f"{server}/moto-api/reset", data=b"").close()


def keys() -> list[str]:
    return [one["Key"] for one in boto3.client("s3").list_objects_v2(Bucket="runs")["Contents"]]


def damage(key: str) -> None:
    client = boto3.client("s3")
    content = bytearray(client.get_object(Bucket="runs", Key=key)["Body"].read())
    content[-1] ^= 1
    client.put_object(Bucket="runs", Key=key, Body=bytes(content))


def test_what_is_written_is_read(store: Store) -> None:
    token = store.claim("first")
    assert store.steps() == []
    write(store, step=2, token=token)
    write(store, step=4, token=token)
    assert store.steps() == [2, 4]
    latest = store.latest()
    assert latest
    assert latest == (4, sha256_of_bytes(store.manifest(4)))
    assert verify(store, 4).step == 4
    store.remove(2)
    assert store.steps() == [4]
    assert not [key for key in keys() if "step-00000002" in key]


def test_what_is_put_aside_stays_and_its_step_is_saved_again(store: Store) -> None:
    write(store, step=2, token=store.claim("first"))
    for number in (1, 2):
        damage(f"one/step-00000002/{number}/rank-00000.safetensors")
        assert store.quarantine(2).endswith(f"one/quarantine/step-00000002.{number}.json")
        assert store.steps() == []
        write(store, step=2, token=store.claim("next"))
        assert verify(store, 2).step == 2
    store.remove(2)
    assert f"one/step-00000002/{number}/rank-00000.safetensors" in keys()


def test_half_an_upload_is_not_published(store: Store) -> None:
    token = store.claim("first")
    with store.create(2, token, "rank-00000.safetensors") as sink:
        sink.write(b"half")
    assert store.steps() == []
    with pytest.raises(DamagedError, match="missing"):
        store.manifest(2)
    store.claim("second")
    write(store, step=2, token=2)
    assert store.steps() == [2]


def test_damage_is_named(store: Store) -> None:
    write(store, step=2, token=store.claim("first"))
    key = "one/step-00000002/1/rank-00000.safetensors"
    damage(key)
    with pytest.raises(DamagedError) as caught:
        verify(store, 2)
    assert "rank-00000.safetensors" in str(caught.value.place)
    boto3.client("s3").delete_object(Bucket="runs", Key=key)
    with pytest.raises(DamagedError, match="missing"):
        verify(store, 2)


def test_a_run_that_another_has_replaced_publishes_nothing(store: Store) -> None:
    old = store.claim("first")
    new = store.claim("second")
    with pytest.raises(RunError, match="another run writes"):
        write(store, step=2, token=old)
    write(store, step=2, token=new)
    with pytest.raises(RunError, match="there already"):
        write(store, step=2, token=new)


def test_a_run_that_is_replaced_while_it_publishes_is_fenced_off(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its look at the writer and the swap of the latest, another run publishes."""
    old = store.claim("first")
    store.begin(4, old, needed=1)
    monkeypatch.setattr(store, "_refuse_fenced", lambda _token: None)
    write(store_at(store.place), step=2, token=store.claim("second"))
    with pytest.raises(RunError, match="another run writes") as caught:
        store.commit(4, old, b"{}")
    assert caught.value.found == "writer 2 (second)"
    latest = store.latest()
    assert (store.steps(), latest and latest.step) == ([2], 2)


@pytest.mark.parametrize("text", [b"junk", b"[]", b'{"token": null}', b'{"token": "3"}'])
def test_a_damaged_writer_hands_no_token_out_again(store: Store, text: bytes) -> None:
    write(store, step=2, token=store.claim("first"))
    boto3.client("s3").put_object(Bucket="runs", Key="one/writer.json", Body=text)
    assert store.claim("second") == 2


@pytest.mark.parametrize(
    ("place", "endpoint"),
    [("s3://", None), ("s3:/runs", None), ("s3:///prefix", None), ("s3://runs", "nowhere")],
)
def test_no_store_at_all_is_wrong_input(
    place: str, endpoint: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(InputError):
        store_at(place)


def test_a_store_that_is_not_there_is_an_error_of_the_machine(store: Store) -> None:
    with pytest.raises(MachineError, match="refuses"):
        store_at("s3://no-such-bucket/one").claim("first")
