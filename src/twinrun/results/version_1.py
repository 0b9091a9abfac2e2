"""Records of version 1 in today's form; the files stay as they are."""

from __future__ import annotations

from typing import Any

from twinrun.foundation.errors import InputError
from twinrun.workloads import load_workload, workload_names

# Fields of a plan that every workload had.
COMMON = (
    *(
        "recipe",
        "recipe_version",
        "script",
        "scale",
        "vendor",
        "gpu",
        "stack",
        "lock_sha256",
        "image",
        "engine",
    ),
    *("fingerprint", "differences"),
)
KEPT = (
    *("twinrun", "run", "created", "evidence", "plan_sha256", "revision", "machine", "gpu", "environment"),
    *("verdicts", "files", "sha256"),
)


def converted(record: dict[str, Any], *, place: str) -> dict[str, Any]:
    """Return the content of a version-1 record as version 2 says it; raises InputError."""
    try:
        name = next(name for name in workload_names() if name in record["plan"])
        parts = load_workload(name).version_1(record)
        plan = {field: record["plan"][field] for field in COMMON}
        kept = {field: record[field] for field in KEPT if field in record}
    except (KeyError, TypeError, StopIteration, ValueError, IndexError) as error:
        raise InputError("not a version-1 record", place=place, found=f"without {error}") from None
    plan |= {
        "workload": name,
        # Version 1 knew one launcher, which was torchrun on the machine itself.
        "launcher": "torchrun",
        "scheduler": "local",
        "part": parts["part"],
        "points": parts["plan_points"],
    }
    missing = {"schema_version": 2, "claims_sha256": None, "allocation": None}
    return {**kept, **missing, "plan": plan, "points": parts["points"]}
