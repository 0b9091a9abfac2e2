"""From the name of a place to its store."""

from __future__ import annotations

import re
from pathlib import Path

from twinrun.checkpoints.folder import FolderStore
from twinrun.checkpoints.s3 import ObjectStore
from twinrun.checkpoints.store import Store
from twinrun.foundation.errors import InputError

# What says where the object store is, and who asks; boto3 reads them.
VARIABLES = (
    *("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION"),
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
)


def store_at(place: str) -> Store:
    """Return the store at `place`: `s3://bucket/prefix`, or a folder; raises InputError, MachineError."""
    return ObjectStore(place) if is_remote(place) else FolderStore(Path(place))


def is_remote(place: str, *, option: str | None = None) -> bool:
    """Say whether `place`, the value of `option`, is one that every machine sees.

    Raises:
        InputError: it looks like one, and names no bucket.
    """
    if place.startswith("s3:") and not re.match(r"s3://[^/]", place):
        raise InputError("no bucket is named", place=option, found=place, allowed="s3://bucket/prefix")
    return place.startswith("s3:")
