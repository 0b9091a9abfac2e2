"""Checkpoints in an object store with the S3 interface: the manifest is the object that publishes."""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
from collections.abc import Iterator
from typing import IO, Any

from twinrun.checkpoints.manifest import parse_manifest
from twinrun.checkpoints.store import (
    LATEST,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    QUARANTINE,
    STEP,
    WRITER,
    DamagedError,
    Latest,
    demand_readable,
    fenced_off,
    latest_of,
    newest_token,
    step_of,
)
from twinrun.foundation.errors import InputError, MachineError, RunError
from twinrun.foundation.files import parse_json, sha256_of_bytes

# Where the manifest of a bad checkpoint goes; its files stay, and no save takes their names.
_ABSENT = {"NoSuchKey", "404", "NotFound"}
_CHANGED = {"PreconditionFailed", "412", "ConditionalRequestConflict"}
_ATTEMPTS = 20
# Variables that tell boto3 where the object store is, and who asks.
VARIABLES = (
    *("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION"),
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
)


def is_remote(place: str, *, option: str | None = None) -> bool:
    """Say whether `place`, the value of `option`, is one that every machine sees.

    Raises:
        InputError: it looks like one, and names no bucket.
    """
    if place.startswith("s3:") and not re.match(r"s3://[^/]", place):
        raise InputError("no bucket is named", place=option, found=place, allowed="s3://bucket/prefix")
    return place.startswith("s3:")


class ObjectStore:
    """A bucket and a prefix; files of a save lie under its fencing token, so that two writers never mix."""

    def __init__(self, place: str) -> None:
        """Take `s3://bucket/prefix`; raises InputError, MachineError where no client can be made."""
        self.place = place
        bucket, _, prefix = place.removeprefix("s3://").partition("/")
        self._bucket, self._prefix = bucket, f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._client = _client()

    def claim(self, run: str) -> int:
        for _attempt in range(_ATTEMPTS):
            content, tag = self._state(WRITER)
            token = newest_token(content, self._state(LATEST)[0]) + 1
            if self._put_if(WRITER, {"token": token, "run": run}, _if_unchanged(tag)):
                self._sweep()
                return token
        raise MachineError("too many runs claim this place at once", place=self.place)

    def begin(self, step: int, token: int, *, needed: int) -> None:  # noqa: ARG002
        self._refuse_fenced(token)

    @contextlib.contextmanager
    def create(self, step: int, token: int, name: str) -> Iterator[IO[bytes]]:
        with self._refusals(), tempfile.TemporaryFile() as stream:
            yield stream
            stream.seek(0)
            self._client.upload_fileobj(stream, self._bucket, self._key(step, str(token), name))

    def commit(self, step: int, token: int, manifest: bytes) -> None:
        place = self._key(step, MANIFEST)
        demand_readable(len(manifest), place=f"s3://{place}", what="the index of this checkpoint")
        self._refuse_fenced(token)
        with self._refusals():
            try:
                self._client.put_object(Bucket=self._bucket, Key=place, Body=manifest, IfNoneMatch="*")
            except self._client.exceptions.ClientError as error:
                if _code(error) not in _CHANGED:
                    raise
                raise RunError("this checkpoint is there already", place=f"s3://{place}") from None
        latest, tag = self._state(LATEST)
        content: dict[str, Any] = {"step": step, "checkpoint": STEP.format(step), "token": token}
        content["sha256"] = sha256_of_bytes(manifest)
        # Another run may have become the writer, and have published, since the check above.
        if newest_token(latest) > token or not self._put_if(LATEST, content, _if_unchanged(tag)):
            with self._refusals():
                self._client.delete_object(Bucket=self._bucket, Key=place)
            raise fenced_off(self.place, self._state(WRITER)[0], ours=token)

    def attach(self, step: int, token: int, name: str, text: str) -> None:
        with self.create(step, token, name) as stream:
            stream.write(text.encode())

    def abandon(self, step: int, token: int) -> None:
        self._delete(self._key(step, str(token), ""))

    def steps(self) -> list[int]:
        return sorted(step for name in self._names() if (step := step_of(name)) is not None)

    def strays(self) -> list[str]:
        return sorted(name for name in self._names() if step_of(name) is None)

    def latest(self) -> Latest | None:
        return latest_of(self._state(LATEST)[0])

    def manifest(self, step: int) -> bytes:
        with self._reading(key := self._key(step, MANIFEST)):
            answer = self._client.get_object(Bucket=self._bucket, Key=key)
            if (size := answer["ContentLength"]) > MAX_MANIFEST_BYTES:
                place, found = self.file(step, MANIFEST), f"{size} bytes, at most {MAX_MANIFEST_BYTES}"
                raise DamagedError("no manifest of a checkpoint", place=place, found=found)
            return bytes(answer["Body"].read())

    def contents(self, step: int, token: int) -> dict[str, int]:
        found = self._sizes(self._key(step, str(token), "")).items()
        return {key.rpartition("/")[2]: size for key, size in found}

    @contextlib.contextmanager
    def open(self, step: int, name: str) -> Iterator[_Object]:
        key = f"{self._files(step)}{name}"
        with self._reading(key):
            size = self._client.head_object(Bucket=self._bucket, Key=key)["ContentLength"]
        yield _Object(self, key, size)

    def read(self, key: str, begin: int, size: int) -> bytes:
        """Return up to `size` bytes of an object."""
        with self._reading(key):
            span = f"bytes={begin}-{begin + size - 1}"
            answer = self._client.get_object(Bucket=self._bucket, Key=key, Range=span)
            return bytes(answer["Body"].read())[:size]

    def file(self, step: int, name: str) -> str:
        return f"s3://{self._bucket}/{self._key(step, name)}"

    def quarantine(self, step: int) -> str:
        stem = f"{self._prefix}{QUARANTINE}/{STEP.format(step)}"
        key = f"{stem}.{len(self._sizes(f'{stem}.')) + 1}.json"
        manifest = {"Bucket": self._bucket, "Key": self._key(step, MANIFEST)}
        with self._refusals():
            self._client.copy_object(Bucket=self._bucket, Key=key, CopySource=manifest)
            self._client.delete_object(**manifest)
        return f"s3://{self._bucket}/{key}"

    def remove(self, step: int) -> None:
        files = None
        # A damaged manifest does not say whose files they are: the next writer of the place removes them.
        with contextlib.suppress(DamagedError, InputError):
            files = self._files(step)
        # The manifest first: what is half removed is not published.
        with self._refusals():
            self._client.delete_object(Bucket=self._bucket, Key=self._key(step, MANIFEST))
        if files:
            self._delete(files)

    def _sweep(self) -> None:
        """Remove files that no manifest is of, neither one that is published nor one that was put aside."""
        keys = self._sizes(f"{self._prefix}step-")
        known = {key.rpartition("/")[0] for key in keys if key.endswith(f"/{MANIFEST}")}
        aside = self._sizes(f"{self._prefix}{QUARANTINE}/step-")
        known |= {self._prefix + key.rpartition("/")[2].partition(".")[0] for key in aside}
        folders = {self._prefix + key.removeprefix(self._prefix).partition("/")[0] for key in keys}
        for folder in folders - known:
            self._delete(f"{folder}/")

    def _refuse_fenced(self, token: int) -> None:
        if (writer := self._state(WRITER)[0]).get("token") != token:
            raise fenced_off(self.place, writer, ours=token)

    def _files(self, step: int) -> str:
        """Return what the names of a published checkpoint's files begin with."""
        manifest = parse_manifest(self.manifest(step), place=self.file(step, MANIFEST))
        return self._key(step, str(manifest.token), "")

    def _names(self) -> set[str]:
        """Return what is called like a checkpoint, and has a manifest."""
        keys = (key.removeprefix(self._prefix) for key in self._sizes(f"{self._prefix}step-"))
        return {name for name, _, rest in (key.partition("/") for key in keys) if rest == MANIFEST}

    def _key(self, step: int, *parts: str) -> str:
        return f"{self._prefix}{'/'.join((STEP.format(step), *parts))}"

    def _sizes(self, prefix: str) -> dict[str, int]:
        with self._refusals():
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=prefix)
            return {one["Key"]: one["Size"] for page in pages for one in page.get("Contents", ())}

    def _delete(self, prefix: str) -> None:
        with self._refusals():
            for key in self._sizes(prefix):
                self._client.delete_object(Bucket=self._bucket, Key=key)

    def _state(self, name: str) -> tuple[dict[str, Any], str]:
        """Return a small object of ours and its tag; both empty where it is not there."""
        with self._refusals():
            try:
                answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + name)
            except self._client.exceptions.ClientError as error:
                if _code(error) not in _ABSENT:
                    raise
                return {}, ""
            text = answer["Body"].read()
        try:
            content = parse_json(text)
        except (ValueError, RecursionError):
            content = {}
        return content if isinstance(content, dict) else {}, answer["ETag"]

    def _put_if(self, name: str, content: dict[str, Any], condition: dict[str, str]) -> bool:
        with self._refusals():
            body = json.dumps(content).encode()
            try:
                self._client.put_object(Bucket=self._bucket, Key=self._prefix + name, Body=body, **condition)
            except self._client.exceptions.ClientError as error:
                if _code(error) not in _CHANGED:
                    raise
                return False
        return True

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            yield
        except (BotoCoreError, ClientError) as error:
            raise MachineError(f"the object store refuses: {error}", place=self.place) from None

    @contextlib.contextmanager
    def _reading(self, key: str) -> Iterator[None]:
        from botocore.exceptions import ClientError

        with self._refusals():
            try:
                yield
            except ClientError as error:
                if _code(error) not in _ABSENT and _code(error) != "InvalidRange":
                    raise
                place = f"s3://{self._bucket}/{key}"
                raise DamagedError("missing", place=place, found="no object", allowed="the object") from None


class _Object:
    def __init__(self, store: ObjectStore, key: str, size: int) -> None:
        self._store, self._key = store, key
        self.size = size

    def read_into(self, room: memoryview, begin: int) -> int:
        size = min(len(room), self.size - begin)
        if size <= 0:
            return 0
        data = self._store.read(self._key, begin, size)
        room[: len(data)] = data
        return len(data)


def _if_unchanged(tag: str) -> dict[str, str]:
    return {"IfMatch": tag} if tag else {"IfNoneMatch": "*"}


def _client() -> Any:
    try:
        import boto3
    except ImportError:
        raise MachineError(
            "checkpoints in an object store need boto3", hint='pip install "twinrun[s3]"'
        ) from None
    from botocore.exceptions import BotoCoreError

    try:
        return boto3.client("s3")
    except (BotoCoreError, ValueError) as error:
        hint = "AWS_ENDPOINT_URL and AWS_DEFAULT_REGION say where the store is"
        raise InputError(f"no object store to talk to: {error}", hint=hint) from None


def _code(error: Any) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))
